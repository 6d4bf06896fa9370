"""What `opendsec docker-check` says where a Docker daemon cannot run; that one can is test_docker.py's business."""

from __future__ import annotations

from importlib.resources import files

import pytest
from tests.contract.harness import CONTAINER_NEEDS, MICROVM_NEEDS, Sandbox, container_place

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in sorted({*MICROVM_NEEDS, *CONTAINER_NEEDS})),
]
CHECK = (files("opendsec.cli") / "docker_check.sh").read_text()
PROGRAMS = """
mkdir -p /usr/local/bin
for name in dockerd containerd runc iptables; do
    printf '#!/bin/sh\\necho "$0 was refused" >&2\\nexit 1\\n' > /usr/local/bin/$name
    chmod 755 /usr/local/bin/$name
done
"""
WORKS = "printf '#!/bin/sh\\n' > /usr/local/bin/iptables"


async def said(box: Sandbox, before: str = "", *, status: int = 1) -> str:
    done = await box.run(f"{before}\n{CHECK}", user="0:0")
    assert done.exit.exit_code == status, done
    return done.stdout.decode()


async def test_a_container_is_told_to_be_a_microvm() -> None:
    async with container_place() as place, place.sandbox() as box:
        assert "shares its host's kernel\nstart it with `--backend microvm`" in await said(box)


async def test_what_is_missing_first_is_named_with_its_remedy_and_nothing_stays(box: Sandbox) -> None:
    assert "no program dockerd\ninstall docker.io" in await said(box)
    assert "overlays cannot be stacked\ngive the image the label" in await said(box, PROGRAMS)
    disk = "mount -t tmpfs docker /var/lib/docker"
    assert "iptables: /usr/local/bin/iptables was refused\n" in await said(box, disk)
    assert "a Docker daemon can run here" in await said(box, WORKS, status=0)  # the shell has an `ip` of its own
    left = await box.run("ls -A /var/lib/docker; ls /sys/fs/cgroup | grep ods-check; mount | grep ods-check")
    assert left.stdout == b""
