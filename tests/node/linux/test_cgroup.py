"""Control groups of this kernel: limits limit, counters count, and removal removes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.linux.cgroup import CgroupClass, CgroupDriver, CgroupLimits, choose_driver, find_mounts, put_into

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.cgroup]
MIB = 1024 * 1024


@pytest.fixture
def groups() -> Iterator[CgroupDriver]:
    driver = choose_driver(find_mounts(), root=f"opendsec-test-{os.getpid()}")
    driver.open()
    yield driver
    driver.remove_root()


@contextlib.contextmanager
def member(groups: CgroupDriver, limits: CgroupLimits, code: str, owner: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program in the group `box` from its first instruction on; it runs when its stdin ends."""
    with groups.create("box", limits, owner=owner) as leaf:
        program = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", f"import sys; print(flush=True); sys.stdin.read()\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert program.stdout is not None
        program.stdout.readline()
        fd = os.open("cgroup.procs", os.O_WRONLY, dir_fd=leaf.cgroup2)
        for procs in (fd, *leaf.procs):
            os.write(procs, str(program.pid).encode())
        os.close(fd)
    with program:
        yield program
        program.kill()


@pytest.mark.memcg
async def test_memory_is_limited_and_kills_are_counted(groups: CgroupDriver) -> None:
    with member(groups, CgroupLimits(memory_bytes=32 * MIB), f"x = b'x' * {100 * MIB}") as program:
        program.communicate(timeout=120)
        assert program.returncode == -9
        assert groups.usage("box").oom_kills == 1
    await groups.remove("box")


async def test_processes_are_limited_and_refusals_counted(groups: CgroupDriver) -> None:
    if "pids" not in groups.limits:
        pytest.skip("capability: pids: no pids controller")
    code = """
import os, time
for i in range(9):
    try:
        if not os.fork(): time.sleep(60)
    except OSError as error: print(error.errno)
"""
    with member(groups, CgroupLimits(pids=8), code) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.close()
        assert program.stdout.readline() == b"11\n"
        denied = groups.usage("box").pids_denied
        assert denied is not None
        assert denied >= 1
        groups.kill("box")
        await groups.wait_empty("box")
    await groups.remove("box")


async def test_a_frozen_group_stands_still_and_can_be_killed(groups: CgroupDriver) -> None:
    with member(groups, CgroupLimits(), "while True: pass") as program:
        assert program.stdin is not None
        program.stdin.close()
        await groups.freeze("box")
        assert groups.is_frozen("box")
        before, end = groups.usage("box").cpu_s, time.monotonic() + 0.1
        while time.monotonic() < end:
            assert groups.usage("box").cpu_s == before
        await groups.thaw("box")
        assert not groups.is_frozen("box")
        await groups.freeze("box")
        groups.kill("box")
        assert program.wait(timeout=60) == -9
        await groups.wait_empty("box")
    await groups.remove("box")


async def test_the_leaf_belongs_to_its_owner_and_nested_groups_go_with_it(groups: CgroupDriver) -> None:
    owner = 268_435_456
    with groups.create("box", CgroupLimits(), owner=owner) as leaf:
        assert os.fstat(leaf.cgroup2).st_uid == owner
        for file in ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control"):
            assert os.stat(file, dir_fd=leaf.cgroup2).st_uid == owner
        assert os.stat("cgroup.freeze", dir_fd=leaf.cgroup2).st_uid == 0
        os.mkdir("cmd-1", dir_fd=leaf.cgroup2)
        os.mkdir("cmd-1/deeper", dir_fd=leaf.cgroup2)
    assert groups.names() == {("box", CgroupClass.LATENCY)}
    await groups.remove("box")
    assert groups.names() == set()


async def test_a_group_with_a_process_is_not_removed(groups: CgroupDriver) -> None:
    with member(groups, CgroupLimits(), ""):
        assert groups.is_populated("box")
        with pytest.raises(TimeoutError, match="box"):
            await groups.remove("box", timeout_s=0.05)
    await groups.wait_empty("box")
    await groups.remove("box")


async def test_a_cpu_quota(groups: CgroupDriver) -> None:
    if "cpu" not in groups.limits:
        pytest.skip("capability: cpu: no cpu controller")
    code = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    with member(groups, CgroupLimits(cpu_cores=0.1), code) as program:
        before = groups.usage("box").cpu_s or 0.0
        program.communicate(timeout=120)
        used_s = (groups.usage("box").cpu_s or 0.0) - before
    assert 0 < used_s < 0.4
    await groups.remove("box")


async def test_a_hundred_made_and_removed(groups: CgroupDriver) -> None:
    limits = CgroupLimits(memory_bytes=64 * MIB, pids=100, cpu_cores=1)
    limits = CgroupLimits(
        **{name: getattr(limits, name) for name in limits.__slots__ if name.split("_")[0] in groups.limits}
    )
    for number in range(100):
        groups.create(f"box-{number}", limits, owner=1000).__exit__()
    assert len(groups.names()) == 100
    for number in range(100):
        await groups.remove(f"box-{number}")
    assert groups.names() == set()


async def test_a_process_is_put_into_its_groups_also_for_who_is_cancelled(groups: CgroupDriver) -> None:
    with groups.create("box", CgroupLimits(), owner=0), subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        procs = groups.open_procs("box")
        try:
            putting = asyncio.ensure_future(put_into(procs, cat.pid))
            await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            assert "box" in Path(f"/proc/{cat.pid}/cgroup").read_text()
            assert cat.stdin is not None
            cat.stdin.close()
            cat.wait(60)
            with pytest.raises(ProcessLookupError):
                await put_into(procs, cat.pid)
        finally:
            for fd in procs:
                os.close(fd)
    await groups.remove("box")
