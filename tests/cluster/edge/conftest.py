"""An edge process with real containers and a small image, in directories of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.edge.processes import EdgeProcess
from tests.images import make_busybox_image, make_scratch_image

from opendsec.linux import libc
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.linux.mount import mountinfo
from opendsec.store.images import ImageStore


@pytest.fixture
async def containers() -> AsyncIterator[EdgeProcess]:
    """An edge of the test's own, which may be killed."""
    async with container_edge() as one:
        yield one


@pytest.fixture(scope="module")
async def containers_process() -> AsyncIterator[EdgeProcess]:
    async with container_edge() as one:
        await one.client.aclose()
        yield one
        one.client = one.fresh_client()


@pytest.fixture
async def shared_containers(containers_process: EdgeProcess) -> AsyncIterator[EdgeProcess]:
    """An edge shared by the tests of a module, none of which kills it."""
    containers_process.client = containers_process.fresh_client()
    async with containers_process.client:
        yield containers_process


@contextlib.asynccontextmanager
async def container_edge() -> AsyncIterator[EdgeProcess]:
    name = secrets.token_hex(4)
    root, run_dir = Path(f"/var/lib/opendsec-edge-{name}"), Path(f"/run/ods-{name}")
    root.mkdir()
    run_dir.mkdir()
    store = ImageStore(root / "store")
    make_busybox_image(store, env={"GREETING": "hello 'world'  x"}, workdir="/home/agent", user="agent")
    make_scratch_image(store)
    cgroup = f"opendsec-test-{name}"
    one = EdgeProcess(root, run_dir, backends="container", OPENDSEC_EDGE_CGROUP=cgroup)
    try:
        await one.start()
        yield one
        await one.delete_all()
        await nothing_left(one)
        assert one.stop() == 0
    finally:
        await one.close()
        for entry in reversed(mountinfo()):
            if Path(entry.target).is_relative_to(run_dir):
                libc.umount2(entry.target, libc.MNT_DETACH)
        choose_driver(find_mounts(), root=cgroup).remove_root()
        shutil.rmtree(run_dir)
        shutil.rmtree(root)


async def nothing_left(edge: EdgeProcess) -> None:
    """No process, directory or control group of any sandbox."""
    assert list((edge.socket.parent / "sbx").iterdir()) == []
    assert list(edge.log.parent.glob("edge/local/sandboxes/*/box")) == []
    left = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{edge.cgroup}/*/sbx-*")]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"{edge.cgroup}/*/sbx-*")]
    assert left == []
    until = time.monotonic() + 60
    while held := [told for told in map(_told, filter(str.isdigit, os.listdir("/proc"))) if edge.cgroup in told]:
        # The host's init reaps the guest agents in its own time.
        assert time.monotonic() < until, held
        await asyncio.sleep(0.05)


def _told(pid: str) -> str:
    """Name, state and control groups of a process."""
    try:
        return "".join(Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8") for name in ("stat", "cgroup"))
    except (FileNotFoundError, ProcessLookupError):
        return ""
