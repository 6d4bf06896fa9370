"""What was missing and is installed while the platform runs is found by it, without a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.host.test_up import Machine
from tests.images import make_busybox_image
from tests.ports import free_port

from opendsec.store.images import ImageStore
from opendsec.vm.kernels import find_kernel

STATE_DIR = Path(os.environ.get("OPENDSEC_STATE_DIR", "/var/lib/opendsec"))
DUMMY = {"spec": {"image": "busybox", "backend": "dummy"}}
MICROVM = {"spec": {"image": "none-of-this-name", "backend": "microvm"}}

pytestmark = [
    pytest.mark.root,
    pytest.mark.cgroup,
    pytest.mark.erofs,
    pytest.mark.native,
    pytest.mark.qemu,
    pytest.mark.vmkernel,
]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, free_port(), backends="dummy,microvm")
    make_busybox_image(ImageStore(tmp_path / "state/store"))
    try:
        yield machine
    finally:
        stopped = machine.opendsec("down")
        assert stopped.returncode == 0, stopped.stderr


def test_a_kernel_installed_while_the_platform_runs_is_used_by_it(machine: Machine) -> None:
    started = machine.opendsec("up", "-d")
    assert started.returncode == 0, started.stderr
    edge = machine.pid("edge")
    with machine.client() as client:
        kept = client.post("/v1/sandboxes", json=DUMMY).json()["sandbox_id"]
        refused = client.post("/v1/sandboxes", json=MICROVM).json()["error"]
        assert (refused["code"], refused["retryable"]) == ("backend_unavailable", False)
        assert "opendsec kernel install" in refused["message"]
        installed = machine.opendsec("kernel", "install", "--from", str(find_kernel(STATE_DIR).vmlinux))
        assert installed.returncode == 0, installed.stderr
        assert "still offers no microVMs" not in installed.stderr
        told = machine.json("status")["node"]["backends"]["microvm"]
        assert told["available"], told
        found = client.post("/v1/sandboxes", json=MICROVM).json()["error"]
        assert found["code"] == "image_not_found", "the backend is open: now it is about the image"
        assert client.get(f"/v1/sandboxes/{kept}").json()["state"] == "running"
    assert machine.pid("edge") == edge
