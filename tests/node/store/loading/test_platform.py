"""A whole platform on a store behind HTTP: sandboxes read through the loader, whoever of the platform is killed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.images import make_busybox_image
from tests.node.store.loading.servers import web_server
from tests.ports import free_port

from opendsec import errors
from opendsec.linux.mount import mountinfo
from opendsec.linux.process import children
from opendsec.store.images import ImageStore
from opendsec.sync import DSecClient, DSecContainerRunArgs, Sandbox

pytestmark = [
    pytest.mark.root,
    pytest.mark.erofs,
    pytest.mark.fuse,
    pytest.mark.cgroup,
    pytest.mark.overlay,
    pytest.mark.native,
]

FILES = {f"/data/f{number}": random.Random(number).randbytes(200_000) for number in range(6)}


def opendsec(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opendsec", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def environment(disk: Path) -> Mapping[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENDSEC_")}
    return {
        **kept,
        "OPENDSEC_STATE_DIR": str(disk / "state"),
        "OPENDSEC_RUN_DIR": f"/run/ods-test-{os.getpid()}",
        "OPENDSEC_LISTEN": f"127.0.0.1:{free_port()}",
    }


@contextlib.contextmanager
def platform(environment: Mapping[str, str]) -> Iterator[DSecClient]:
    try:
        started = opendsec(environment, "up", "-d")
        assert started.returncode == 0, started.stderr
        local = json.loads(Path(environment["OPENDSEC_RUN_DIR"], "local.json").read_bytes())
        with DSecClient(api_url=local["api_url"], api_key=local["api_key"]) as client:
            yield client
    finally:
        stopped = opendsec(environment, "down")
    assert stopped.returncode == 0, stopped.stderr


def ready_with(environment: Mapping[str, str], store: str) -> contextlib.AbstractContextManager[DSecClient]:
    return platform({**environment, "OPENDSEC_STORE": store, "OPENDSEC_STORE_TIMEOUT": "3"})


def pid_of(environment: Mapping[str, str], name: str) -> int:
    return int(Path(environment["OPENDSEC_RUN_DIR"], f"{name}.pid").read_text().split()[0])


def wait_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def reads_right(sandbox: Sandbox, path: str) -> bool:
    result = sandbox.commands.run(["sha256sum", path], timeout=30)
    return result.stdout.startswith(hashlib.sha256(FILES[path]).hexdigest())


def test_sandboxes_read_on_whoever_is_killed(store: ImageStore, environment: Mapping[str, str]) -> None:
    make_busybox_image(store, files=FILES)
    arguments = DSecContainerRunArgs(container_image="busybox")
    with (
        web_server(store.root) as web,
        ready_with(environment, web.url) as client,
        client.container(arguments) as sandbox,
    ):
        assert reads_right(sandbox, "/data/f0")
        (server,) = children(pid_of(environment, "loader"))
        os.kill(server, signal.SIGKILL)
        assert reads_right(sandbox, "/data/f1")
        os.kill(pid_of(environment, "edge"), signal.SIGKILL)
        assert reads_right(sandbox, "/data/f2")
        with pytest.raises(errors.UnsupportedError):
            sandbox.pack_diff("mine")
        guardian = pid_of(environment, "loader")
        restarted = opendsec(environment, "up", "-d", "--restart")
        assert restarted.returncode == 0, restarted.stderr
        assert pid_of(environment, "loader") == guardian, "a restart leaves the loader alone"
        (server,) = children(guardian)
        os.kill(guardian, signal.SIGKILL)
        wait_gone(server)
        lost = sandbox.commands.run(["cat", "/data/f3"], timeout=30)
        assert lost.exit_code != 0
        assert lost.stdout == ""
        assert "I/O error" in lost.stderr or lost.exit_code == 128 + signal.SIGBUS, "read, or a page of the program"
        with client.container(arguments) as later:
            assert reads_right(later, "/data/f3")
            assert pid_of(environment, "loader") != guardian
            web.faults = ["500"]
            assert not reads_right(later, "/data/f4")
            web.faults = [""]
            assert reads_right(later, "/data/f5")
    run_dir = Path(environment["OPENDSEC_RUN_DIR"])
    assert not run_dir.exists()
    assert not [entry for entry in mountinfo() if entry.target.startswith(str(run_dir))]


def test_a_store_that_is_gone_fails_the_create_and_nothing_else(
    store: ImageStore, environment: Mapping[str, str]
) -> None:
    make_busybox_image(store, files=FILES)
    arguments = DSecContainerRunArgs(container_image="busybox")
    with web_server(store.root) as web, ready_with(environment, web.url) as client:
        web.everything = True
        web.faults = ["500"]
        begun = time.monotonic()
        with pytest.raises((errors.NodeError, errors.StartError)) as caught:
            client.run_container(arguments)
        assert caught.value.retryable
        assert time.monotonic() - begun < 60
        web.faults = [""]
        with client.container(arguments) as sandbox:
            assert sandbox.commands.run(["true"]).exit_code == 0
        with pytest.raises(errors.ImageNotFoundError):
            client.run_container(DSecContainerRunArgs(container_image="other"))
        recorded = opendsec(environment, "image", "profile", "--json", "busybox", "--", "sha256sum", "/data/f1")
        assert recorded.returncode == 0, recorded.stderr
        assert json.loads(recorded.stdout)["chunks"] > 0
        (kept,) = Path(environment["OPENDSEC_STATE_DIR"], "cache", "profiles").iterdir()
        assert "data/f1" in kept.read_text(), "the store takes no writes"
        assert "data/f2" not in kept.read_text()
        assert opendsec(environment, "image", "profile", "busybox", "--", "false").returncode == 1
