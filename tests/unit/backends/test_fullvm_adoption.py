"""A hung agent holds up a new edge for seconds, not for as long as a whole system may take to boot."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from opendsec.backends import fullvm_meeting
from opendsec.backends.base import Handle
from opendsec.backends.fullvm import FullVmBackend, _Live
from opendsec.backends.fullvm_console import MachineConsole
from opendsec.backends.ground import Ground
from opendsec.guest.base import GuestLostError
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

    async def for_ever() -> None:
        await asyncio.Event().wait()

    machine = cast("Q35Machine", SimpleNamespace(wait_ended=for_ever, has_ended=lambda: False))
    handle = Handle(
        backend=BackendKind.FULLVM, sandbox_id=new_sandbox_id("local"), data={"run": str(tmp_path), "boot_id": ""}
    )
    backend._live[handle.sandbox_id] = _Live(machine=machine, console=cast("MachineConsole", None), agent=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(os.fspath(tmp_path / AGENT_SOCKET))
        silent.listen()
        async with asyncio.timeout(30):
            with pytest.raises(GuestLostError):
                await backend.recover(handle)
