"""A guest that does not read its serial console: whoever writes is told in time, and not to write it all again."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from opendsec.backends import fullvm_console
from opendsec.backends.fullvm_console import MachineConsole
from opendsec.errors import NodeError
from opendsec.vm.q35 import Q35Machine
from opendsec.vm.serial_record import SerialLine, SerialRecord

pytestmark = pytest.mark.anyio


async def test_what_may_still_arrive_is_not_to_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fullvm_console, "WRITE_TIMEOUT_S", 0.05)
    ours, guest = socket.socketpair()
    ours.setblocking(False)
    line = SerialLine(SerialRecord(tmp_path))
    await asyncio.get_running_loop().create_connection(lambda: line, sock=ours)
    console = MachineConsole(Q35Machine(0, -1, tmp_path), line)
    try:
        with pytest.raises(NodeError, match="not taken all") as caught:
            await console.serial_write(b"x" * (4 << 20))
        assert not caught.value.retryable
        assert guest.recv(16) == b"x" * 16
    finally:
        console.close()
        guest.close()
