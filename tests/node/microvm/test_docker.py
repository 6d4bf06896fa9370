"""A Docker daemon in microVMs: `pytest -m soak` of this file, with a mirror. Builds an image with Debian's docker.io,
and works with the daemon as people do: on Debian's kernel and on the one this node has, whatever that is.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR
from tests.contract.harness import MICROVM_NEEDS, Sandbox, microvm_place

from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_shape import DATA_LABEL
from opendsec.model.image import Image
from opendsec.model.spec import Resources
from opendsec.store.debian import DebianRecipe, build_debian
from opendsec.store.images import ImageStore
from opendsec.vm.kernels import find_kernel
from opendsec.vm.kernels_install import install

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.mmdebstrap,
    *(getattr(pytest.mark, name) for name in MICROVM_NEEDS),
]
PACKAGES = ("docker.io", "iptables", "iproute2", "busybox-static")
ROOM = Resources(memory_limit_mb=1024, disk_limit_mb=2048)
STEP_MS = 1_800_000
"""Emulated, on a busy host, the longest takes some minutes."""
CHECK = (files("opendsec.cli") / "docker_check.sh").read_text()
LEFT = "ls -A /var/lib/docker; iptables -t nat -S | grep ods-check || true; ls /sys/fs/cgroup | grep ods-check || true"
DAEMON = """
setsid dockerd >/var/log/dockerd.log 2>&1 </dev/null &
until docker info >/dev/null 2>&1; do sleep 1; kill -0 $! || { tail /var/log/dockerd.log; exit 1; }; done
docker info --format '{{.Driver}} {{.CgroupVersion}}'
"""
MAKE_IMAGES = """
mkdir -p /tmp/tree/bin /tmp/context
cp /bin/busybox /tmp/tree/bin
for name in sh cat ip wget httpd sleep; do ln -s busybox /tmp/tree/bin/$name; done
tar -C /tmp/tree -c . | docker import - small >/dev/null
printf 'FROM small\\nRUN echo built > /built\\nCMD ["cat", "/built"]\\n' > /tmp/context/Dockerfile
docker build -t mine /tmp/context >/dev/null
docker save mine > /tmp/mine.tar
docker rmi mine >/dev/null
docker load < /tmp/mine.tar
docker run --rm mine
"""
NETWORKS = """
docker run --rm small ip -o -4 addr show eth0 | grep -c 172.17.
docker run --rm --network host small ip -o -4 addr show docker0 | grep -c 172.17.
docker run --rm -v volume:/v small sh -c 'echo kept > /v/file'
docker run --rm -v volume:/v small cat /v/file
docker network create ours >/dev/null
docker run -d --name web --network ours -p 8080:80 --memory 64m --cpus 0.5 --pids-limit 50 small \
    sh -c 'echo served > /index.html; exec httpd -f -p 80 -h /' >/dev/null
docker exec web cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/pids.max /sys/fs/cgroup/cpu.max
until docker run --rm --network ours small wget -qO- http://web/index.html; do sleep 1; done
busybox wget -qO- http://127.0.0.1:8080/index.html
"""
GO_ON = """
docker exec web cat /index.html
busybox wget -qO- http://127.0.0.1:8080/index.html
docker run --rm mine
"""
DAEMON_ANEW = f"""
kill $(pidof dockerd)
while pidof dockerd containerd >/dev/null; do sleep 1; done
{DAEMON}
docker start web
docker run --rm -v volume:/v small cat /v/file
"""


@pytest.fixture(scope="module")
def store() -> Iterator[ImageStore]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    try:
        yield ImageStore(state / "store")
    finally:
        shutil.rmtree(state)


@pytest.fixture(scope="module")
def image(store: ImageStore) -> Image:
    made = build_debian(store, "docker-base", DebianRecipe(include=PACKAGES))
    labels = {**made.config.labels, DATA_LABEL: "/var/lib/docker"}
    return store.publish("docker", layers=made.layers, config=replace(made.config, labels=labels), source="test")


@pytest.fixture(scope="module", params=["installed", "debian"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Path]:
    if request.param == "installed":
        yield STATE_DIR
        return
    state = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    try:
        install(state, "debian")
        yield state
    finally:
        shutil.rmtree(state)


async def worked(box: Sandbox, script: str) -> str:
    done = await box.run(f"set -e\n{script}", timeout_ms=STEP_MS)
    assert done.exit.exit_code == 0, (done.stdout, done.stderr)
    return done.stdout.decode()


@pytest.mark.timeout(3600)
async def test_a_daemon_builds_runs_pauses_and_is_copied(store: ImageStore, image: Image, kernels: Path) -> None:
    async with microvm_place(kernels=kernels, image=image, store=store) as place:
        assert isinstance(place.backend, MicroVmBackend)
        target = place.state_dir.parent / "snapshot"
        target.mkdir()
        async with place.sandbox("docker", resources=ROOM, rules={"*": True}) as box:
            assert (await worked(box, "uname -r")).strip() == find_kernel(kernels).facts.release
            assert "a Docker daemon can run here" in await worked(box, CHECK)
            assert await worked(box, LEFT) == "lost+found\n"
            assert await worked(box, DAEMON) == "overlay2 2\n"
            assert await worked(box, MAKE_IMAGES) == "Loaded image: mine:latest\nbuilt\n"
            limits = "67108864\n50\n50000 100000\n"
            assert await worked(box, NETWORKS) == f"1\n1\nkept\n{limits}served\nserved\n"
            await box.backend.pause(box.running.handle)
            await box.backend.resume(box.running.handle)
            guest = await box.backend.reconnect(box.running.handle)
            assert guest is not None
            box.running.guest = guest
            assert await worked(box, GO_ON) == "served\nserved\nbuilt\n"
            await box.backend.snapshot(box.running.handle, target)
            assert await worked(box, GO_ON) == "served\nserved\nbuilt\n"
        plan = replace(place.plan("docker", resources=ROOM, rules={"*": True}), snapshot=target)
        copy = Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
        assert await worked(copy, GO_ON) == "served\nserved\nbuilt\n"
        assert await worked(copy, DAEMON_ANEW) == "overlay2 2\nweb\nkept\n"
        assert await worked(copy, GO_ON) == "served\nserved\nbuilt\n"
        await place.destroy(plan)
        await asyncio.to_thread(shutil.rmtree, target)
