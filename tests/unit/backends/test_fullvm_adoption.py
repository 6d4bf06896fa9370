"""A hung agent holds up a new edge for seconds, not for as long as a whole system may take to boot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from opendsec.backends import fullvm, fullvm_meeting
from opendsec.backends.base import Handle
from opendsec.backends.fullvm import FullVmBackend
from opendsec.backends.fullvm_console import MachineConsole
from opendsec.backends.fullvm_live import Live
from opendsec.backends.fullvm_meeting import meet
from opendsec.backends.ground import Ground
from opendsec.guest.base import GuestGoneError, GuestLostError
from opendsec.model.ids import new_sandbox_id
from opendsec.model.spec import BackendKind
from opendsec.store.mounts import LayerMounts
from opendsec.vm.q35 import AGENT_SOCKET, Q35Machine

pytestmark = pytest.mark.anyio


async def test_a_hung_agent_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fullvm_meeting, "GREETING_S", 0.2)
    backend = FullVmBackend(
        layers=cast("LayerMounts", None),
        state_dir=tmp_path,
        run_dir=tmp_path,
        host_state_dir=tmp_path,
        ground=Ground(tmp_path),
    )

    machine = _machine()
    handle = Handle(
        backend=BackendKind.FULLVM, sandbox_id=new_sandbox_id("local"), data={"run": str(tmp_path), "boot_id": ""}
    )
    backend._live[handle.sandbox_id] = Live(machine=machine, console=cast("MachineConsole", None), agent=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / AGENT_SOCKET))
        silent.listen()
        async with asyncio.timeout(30):
            with pytest.raises(GuestLostError):
                await backend.recover(handle)


async def test_a_machine_is_taken_over_once_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, held = 0, asyncio.Event()

    async def connect(*_: object) -> MachineConsole:
        nonlocal connecting
        connecting += 1
        await held.wait()
        return cast("MachineConsole", None)

    monkeypatch.setattr(MachineConsole, "connect", connect)
    monkeypatch.setattr(fullvm, "shape_in", lambda _: SimpleNamespace(machine=SimpleNamespace(agent=True)))
    backend = FullVmBackend(
        layers=cast("LayerMounts", SimpleNamespace(hold=lambda _: None)),
        state_dir=tmp_path,
        run_dir=tmp_path,
        host_state_dir=tmp_path,
        ground=Ground(tmp_path),
    )
    monkeypatch.setattr(backend._qemu, "find", lambda *_: _machine())
    data: dict[str, str | int] = {
        "run": str(tmp_path),
        "state": str(tmp_path),
        "boot_id": "",
        "pid": 1,
        "start_ticks": 1,
    }
    handle = Handle(backend=BackendKind.FULLVM, sandbox_id=new_sandbox_id("local"), data=data)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(backend._found(handle)) for _ in range(3)]
        while not connecting:
            await asyncio.sleep(0.001)
        held.set()
    found = [task.result() for task in asking]
    assert found == [backend._live[handle.sandbox_id]] * 3
    assert all(one is found[0] for one in found)
    assert connecting == 1


async def test_an_agent_that_is_there_and_silent_is_given_up_for_good(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / AGENT_SOCKET))
        silent.listen()
        with pytest.raises(GuestGoneError, match=r"has not answered for [0-9]+ s, and is there"):
            await meet(_machine(), tmp_path / AGENT_SOCKET, silent_s=0.3)


async def test_time_in_which_it_stands_still_does_not_count(tmp_path: Path) -> None:
    stands_still, asked = True, 0

    async def is_paused() -> bool:
        nonlocal stands_still, asked
        asked += 1
        stands_still = asked < 4
        return stands_still

    with pytest.raises(GuestGoneError, match="its operating system runs none"):
        await meet(_machine(is_paused=is_paused, is_there=False), tmp_path / AGENT_SOCKET, boot_s=0.001)
    assert asked == 4


def _machine(*, is_paused: Callable[[], Awaitable[bool]] | None = None, is_there: bool = True) -> Q35Machine:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def runs() -> bool:
        return False

    async def agent_is_there() -> bool:
        return is_there

    given = SimpleNamespace(
        wait_ended=for_ever,
        has_ended=lambda: False,
        is_paused=is_paused or runs,
        agent_is_there=agent_is_there,
        turn=lambda **_: contextlib.nullcontext(),
    )
    return cast("Q35Machine", given)
