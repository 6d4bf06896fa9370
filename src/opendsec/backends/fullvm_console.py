"""Screen, input and serial line of one machine, as the edge asks for them (`backends.console`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from opendsec.backends.console import Console, Picture
from opendsec.errors import NodeError, SandboxLostError
from opendsec.model.screen import Action
from opendsec.vm.display import act, take_picture
from opendsec.vm.q35 import SERIAL_SOCKET, Q35Machine
from opendsec.vm.qmp import MonitorError
from opendsec.vm.serial_record import SerialLine, SerialRecord

WRITE_TIMEOUT_S = 30.0


class MachineConsole(Console):
    """Made by `connect`; `close` lets go of the serial line."""

    def __init__(self, machine: Q35Machine, line: SerialLine) -> None:
        self._machine = machine
        self._line = line
        self._acting = asyncio.Lock()
        """Two who type at once would not even mix words."""

    @classmethod
    async def connect(cls, machine: Q35Machine, state: Path) -> Self:
        """From now on what the serial console says is recorded below `state`. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, os.fspath(machine.directory / SERIAL_SOCKET))
            line = SerialLine(SerialRecord(state))
            await loop.create_connection(lambda: line, sock=sock)
        except BaseException:
            sock.close()
            raise
        return cls(machine, line)

    def close(self) -> None:
        """The machine goes on; what its serial console says is lost then."""
        self._line.close()

    async def picture(self) -> Picture:
        png, size = await take_picture(self._machine)
        return Picture(png=png, size=size)

    async def act(self, actions: Sequence[Action]) -> None:
        async with self._acting:
            await act(self._machine, actions)

    def serial_total(self) -> int:
        return self._line.record.total

    def serial_read(self, offset: int) -> tuple[int, bytes]:
        return self._line.record.read(offset)

    async def serial_changed(self, offset: int, *, timeout_s: float) -> None:
        await self._line.changed(offset, timeout_s=timeout_s)

    async def serial_write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._line.write(data)
        except TimeoutError as error:
            raise NodeError(
                f"the guest has not taken all of it from its serial console within {WRITE_TIMEOUT_S:g} s",
                remedy="see what it has answered before anything is written again: what was handed on may reach it yet",
                retryable=False,
            ) from error
        except ConnectionError as error:
            raise SandboxLostError("the machine is gone") from error

    async def vnc(self) -> socket.socket:
        """QEMU is handed one end of a pair: there is no socket anybody else could find."""
        ours, theirs = socket.socketpair()
        try:
            async with self._machine.monitor() as qmp:
                await qmp.give("viewer", theirs.fileno())
                await qmp.execute("add_client", {"protocol": "vnc", "fdname": "viewer", "skipauth": True})
        except MonitorError as error:
            ours.close()
            raise NodeError(f"QEMU takes no viewer: {error}", retryable=True) from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours
