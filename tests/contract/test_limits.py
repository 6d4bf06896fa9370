"""Limits on every backend: they limit, they are counted, and the agent stays alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.contract.harness import Place, Sandbox

from opendsec.backends.base import Capability
from opendsec.guest.base import GuestError
from opendsec.model.spec import BackendKind, Resources

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024


def need(place: Place, capability: Capability) -> None:
    if capability not in place.backend.capabilities:
        pytest.skip(f"capability: {capability}: {'; '.join(place.backend.report().reasons)}")


def on(box: Sandbox, *, real: str, dummy: str) -> str:
    return dummy if box.backend.kind == BackendKind.DUMMY else real


def limited(place: Place) -> Resources:
    """All limits at once, so that one machine is booted for all tests."""
    return Resources(memory_limit_mb=place.least_memory_mb, pids_limit=16, disk_limit_mb=place.least_disk_mb)


async def test_too_much_memory(place: Place) -> None:
    need(place, Capability.MEMORY_LIMIT)
    async with place.sandbox(resources=limited(place)) as box:
        eat = on(box, real="tail /dev/zero", dummy="allocate 100")
        result = await box.run(eat)
        assert result.exit.signal == 9 or result.exit.exit_code in (137, 2)
        assert box.backend.usage(box.running.handle).oom_kills == 1
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_too_many_processes(place: Place) -> None:
    need(place, Capability.PIDS_LIMIT)
    async with place.sandbox(resources=limited(place)) as box:
        fork = on(box, real="for i in $(seq 40); do sleep 1000 & done; wait", dummy="forks 40")
        command = await box.start(fork, timeout_ms=5000, grace_ms=0)
        await box.finish(command)
        denied = box.backend.usage(box.running.handle).pids_denied
        assert denied is not None
        assert denied >= 1
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def zeros(size_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(size_bytes // MIB):
        yield bytes(MIB)


async def test_a_full_disk(place: Place) -> None:
    need(place, Capability.DISK_LIMIT)
    async with place.sandbox(resources=limited(place)) as box:
        with pytest.raises(GuestError) as refused:
            await box.guest.write_file("/big", zeros((place.least_disk_mb + 24) * MIB))
        assert (refused.value.code, refused.value.errno) == ("file", 28)
        async with asyncio.timeout(60):  # what had arrived is deleted in the agent's own time
            while box.backend.usage(box.running.handle).disk_full:
                await asyncio.sleep(0.01)
        if box.backend.kind != BackendKind.DUMMY:
            assert (await box.run("dd if=/dev/zero of=/big bs=1M")).exit.exit_code == 1
        else:
            await box.guest.write_file("/big", zeros(16 * MIB))
        assert box.backend.usage(box.running.handle).disk_full is True
        assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_cpu_is_counted(place: Place) -> None:
    need(place, Capability.CPU_LIMIT)
    async with place.sandbox(resources=Resources(cpu_cores_limit=0.1)) as box:
        began, before_s = time.monotonic(), box.backend.usage(box.running.handle).cpu_s
        end = (await box.run("i=0; while true; do i=$((i+1)); done", timeout_ms=1000, grace_ms=0)).exit
        used_s = box.backend.usage(box.running.handle).cpu_s
        assert end.reason == 1
        assert used_s is not None
        # A tenth of a core however long it took, and what a period of the limit's may be over.
        assert 0 < used_s - (before_s or 0) < 0.1 * (time.monotonic() - began) + 0.2
