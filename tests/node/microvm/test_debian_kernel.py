"""Debian's own kernel, which finds its devices by ACPI tables only, in sandboxes: `pytest -m soak` of this file, with a
mirror. Downloads and unpacks a kernel, and boots it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.harness import MICROVM_NEEDS, Sandbox, microvm_backend, microvm_place

from opendsec.backends.microvm import MicroVmBackend
from opendsec.vm.kernels import KernelFacts
from opendsec.vm.kernels_install import install

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.mmdebstrap,
    *(getattr(pytest.mark, name) for name in MICROVM_NEEDS),
]


@pytest.fixture
def kernels() -> Iterator[tuple[Path, KernelFacts]]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    try:
        yield state, install(state, "debian", package="linux-image-cloud-amd64")
    finally:
        shutil.rmtree(state)


@pytest.mark.timeout(400)
async def test_a_sandbox_lives_on_it_and_outlives_a_change_of_kernel(kernels: tuple[Path, KernelFacts]) -> None:
    state, facts = kernels
    assert not facts.command_line_devices
    async with microvm_place(kernels=state) as place:
        target = place.state_dir.parent / "snapshot"
        target.mkdir()
        async with place.sandbox() as box:
            assert (await box.run("uname -r; echo kept > /kept")).stdout == facts.release.encode() + b"\n"
            await box.backend.pause(box.running.handle)
            await box.backend.resume(box.running.handle)
            guest = await box.backend.reconnect(box.running.handle)
            assert guest is not None
            box.running.guest = guest
            assert (await box.run("cat /kept")).stdout == b"kept\n"
            await box.backend.snapshot(box.running.handle, target)
        first = place.backend
        assert isinstance(first, MicroVmBackend)
        await first.close()
        place.backend = microvm_backend(first._layers, place.state_dir.parent, place.run_dir.parent)
        await place.backend.open()
        async with place.sandbox() as box:
            assert (await box.run("uname -r")).stdout != facts.release.encode() + b"\n"
        plan = replace(place.plan(), snapshot=target)
        copy = Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
        assert (await copy.run("uname -r; cat /kept")).stdout == facts.release.encode() + b"\nkept\n"
        await place.destroy(plan)
        await asyncio.to_thread(shutil.rmtree, target)
