"""Whose turn it is with a microVM, how long a guest may take to send what it has written, and a close meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendsec.backends import microvm_packing
from opendsec.backends.base import Handle
from opendsec.backends.microvm_live import Live
from opendsec.backends.microvm_machines import Machines
from opendsec.backends.microvm_parking import Parking
from opendsec.backends.turns import Turns
from opendsec.errors import NodeError, SandboxLostError
from opendsec.guest.base import Guest, GuestLostError
from opendsec.linux.cgroup import CgroupDriver
from opendsec.linux.network import SandboxNetwork
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.spec import BackendKind
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import Vm, Vmm

pytestmark = pytest.mark.anyio
BOX = new_sandbox_id("local")


@pytest.fixture
def live() -> Live:
    """Nothing is started here."""
    return Live(
        vmm=cast("Vmm", None),
        made=cast("Machines", None),
        groups=cast("CgroupDriver", None),
        network=cast("SandboxNetwork", None),
        first_slot=0,
        resolvers=(),
        boot_id="1",
    )


async def test_a_sandbox_has_one_turn_while_anybody_waits_for_it() -> None:
    turns = Turns()
    inside: list[str] = []

    async def take(name: str) -> None:
        async with turns.of(BOX):
            inside.append(name)
            assert len(inside) == 1
            await asyncio.sleep(0.01)
            inside.remove(name)

    first = asyncio.create_task(take("first"))
    waits = asyncio.create_task(take("waits"))
    await first  # which, as `destroy` does, leaves while another waits
    await asyncio.gather(waits, take("late"))
    assert len(turns) == 0


async def test_a_guest_that_trickles_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microvm_packing, "FREEZE_TIMEOUT_MS", 200)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield b""
            await asyncio.sleep(0.01)

    guest = cast("Guest", SimpleNamespace(pack_upper=trickle))
    with pytest.raises(NodeError, match="did not send"):
        async with asyncio.timeout(60):
            await microvm_packing.receive(guest, tmp_path / "tree", disk_bytes=1 << 30, sandbox_id=BOX)


@pytest.mark.parametrize("finished", [True, False])
async def test_a_guest_lost_after_the_pack_was_read_costs_it_nothing(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, finished: bool
) -> None:
    closed: list[bool] = []

    async def aclose() -> None:
        closed.append(True)

    @contextlib.asynccontextmanager
    async def written(*_: object) -> AsyncIterator[None]:
        if not finished:
            raise GuestLostError("gone")
        yield
        raise GuestLostError("gone")

    live.guests[BOX] = cast("Guest", SimpleNamespace(closed=False, aclose=aclose))
    parking = Parking(live, cast("LayerMounts", None))
    monkeypatch.setattr(microvm_packing, "written", written)
    handle = Handle(backend=BackendKind.MICROVM, sandbox_id=BOX, data={"state_dir": str(tmp_path), "boot_id": "1"})
    if not finished:
        with pytest.raises(SandboxLostError, match="did not hold still"):
            async with microvm_packing.changes(live, parking, handle, lower=()):
                pass
        return
    async with microvm_packing.changes(live, parking, handle, lower=()) as changes:
        assert changes.lower == ()
    assert closed == [True]  # whoever connects next renews it


async def test_a_stop_that_ends_during_close_disturbs_nothing(live: Live) -> None:
    released: list[SandboxId] = []

    def vm_of(name: SandboxId) -> Any:
        async def release() -> None:
            released.append(name)
            live.vms.pop(third, None)

        return cast("Vm", SimpleNamespace(release=release))

    first, second, third = (new_sandbox_id("local") for _ in range(3))
    live.vms.update({name: vm_of(name) for name in (third, second, first)})
    await live.release()
    assert released == [first, second]
    assert live.vms == {}
