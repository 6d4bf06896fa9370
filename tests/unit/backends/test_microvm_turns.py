"""Whose turn it is with a microVM, how long a guest may take to send what it has written, and a close meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendsec.backends import microvm
from opendsec.backends.base import Handle
from opendsec.backends.ground import Ground
from opendsec.backends.microvm import MicroVmBackend
from opendsec.errors import NodeError, SandboxLostError
from opendsec.guest.base import Guest, GuestLostError
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.image import Image, ImageConfig
from opendsec.model.spec import BackendKind
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import Vm, Vmm

pytestmark = pytest.mark.anyio
BOX = new_sandbox_id("local")


class NoVmm:
    """Nothing is started here."""

    async def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture
def backend(tmp_path: Path) -> MicroVmBackend:
    return MicroVmBackend(
        vmm=cast("Vmm", NoVmm()),
        layers=cast("LayerMounts", None),
        state_dir=tmp_path,
        run_dir=tmp_path,
        kernels=tmp_path,
        ground=Ground(tmp_path),
    )


async def test_a_sandbox_has_one_turn_while_anybody_waits_for_it(backend: MicroVmBackend) -> None:
    inside: list[str] = []

    async def take(name: str) -> None:
        async with backend._turn(BOX):
            inside.append(name)
            assert len(inside) == 1
            await asyncio.sleep(0.01)
            inside.remove(name)

    first = asyncio.create_task(take("first"))
    waits = asyncio.create_task(take("waits"))
    await first  # which, as `destroy` does, leaves while another waits
    await asyncio.gather(waits, take("late"))
    assert backend._turns == {}


async def test_a_guest_that_trickles_is_waited_for_so_long_and_no_longer(
    backend: MicroVmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microvm, "FREEZE_TIMEOUT_MS", 200)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b""
            await asyncio.sleep(0.01)

    guest = cast("Guest", SimpleNamespace(pack_upper=trickle))
    handle = Handle(backend=BackendKind.MICROVM, sandbox_id=BOX, data={})
    with pytest.raises(NodeError, match="did not send"):
        async with asyncio.timeout(20):
            await backend._receive(handle, guest, tmp_path / "tree", disk_bytes=1 << 30)


@pytest.mark.parametrize("finished", [True, False])
async def test_a_guest_lost_after_the_pack_was_read_costs_it_nothing(
    backend: MicroVmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, finished: bool
) -> None:
    closed: list[bool] = []

    async def acquire_soon(_image: Image) -> tuple[int, ...]:
        return ()

    async def aclose() -> None:
        closed.append(True)

    @contextlib.asynccontextmanager
    async def written(*_: object) -> AsyncIterator[None]:
        if not finished:
            raise GuestLostError("gone")
        yield
        raise GuestLostError("gone")

    backend._guests[BOX] = cast("Guest", SimpleNamespace(closed=False, aclose=aclose))
    monkeypatch.setattr(backend, "_layers", SimpleNamespace(acquire_soon=acquire_soon))
    monkeypatch.setattr(backend, "_written", written)
    handle = Handle(backend=BackendKind.MICROVM, sandbox_id=BOX, data={"state_dir": str(tmp_path), "boot_id": "1"})
    image = Image(name="i", digest="sha256:0", layers=(), config=ImageConfig(), created_at=0)
    if not finished:
        with pytest.raises(SandboxLostError, match="did not hold still"):
            async with backend.changes(handle, image=image):
                pass
        return
    async with backend.changes(handle, image=image) as changes:
        assert changes.lower == ()
    assert closed == [True]  # whoever connects next renews it


async def test_a_stop_that_ends_during_close_disturbs_nothing(backend: MicroVmBackend) -> None:
    released: list[SandboxId] = []

    def vm_of(name: SandboxId) -> Any:
        async def release() -> None:
            released.append(name)
            backend._vms.pop(third, None)

        return cast("Vm", SimpleNamespace(release=release))

    first, second, third = (new_sandbox_id("local") for _ in range(3))
    backend._vms.update({name: vm_of(name) for name in (third, second, first)})
    await backend.close()
    assert released == [first, second]
    assert backend._vms == {}
