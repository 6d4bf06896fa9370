"""One start of Firecracker, from the record of it to a process that answers: whoever fails, or is cancelled, in
between leaves nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from types import TracebackType
from typing import Final, Self

from opendsec.errors import NodeError, StartError
from opendsec.linux import process
from opendsec.linux.cgroup import put_into
from opendsec.vm.base import Binding, MachineSpec, Place
from opendsec.vm.firecracker_api import Api, ApiError, ApiGoneError
from opendsec.vm.firecracker_machine import UFFD_SOCKET, VSOCK, FirecrackerVm, Record, ServedBy, clear
from opendsec.vm.firecracker_saved import Saved
from opendsec.vm.firecracker_start import (
    API_SOCKET,
    Programs,
    Reach,
    Start,
    in_own_thread,
    open_console,
    read_console,
    spawn,
)
from opendsec.vm.userfault_client import MemoryServer

API_WAIT_S: Final = 30.0
_FIRST_WAIT_S: Final = 0.0005
_MOST_WAIT_S: Final = 0.01
_MAX_SOCKET_PATH: Final = 107
"""unix(7)"""
_CONSOLE_TAIL: Final = 1000


class Starting:
    """`async with Starting(…) as starting:` a VMM whose `api` answers; then `finished()`, in the block."""

    def __init__(
        self,
        *,
        programs: Programs,
        spec: MachineSpec,
        place: Place,
        reaches: tuple[Reach, ...],
        binding: Binding,
        memory: MemoryServer,
    ) -> None:
        self._place = place
        self._binding = binding
        self._memory = memory
        self.record = Record.fresh(spec, host_id=place.host_id)
        self._start = Start(
            programs=programs,
            identifier=self.record.identifier,
            directory=place.directory,
            host_id=place.host_id,
            reaches=reaches,
        )
        self._root = self.record.root(place.directory)
        self._pidfd = -1
        self._left = contextlib.ExitStack()
        self.api = Api(self._root / API_SOCKET)
        self._vm: FirecrackerVm | None = None

    async def __aenter__(self) -> Self:
        self.record.claim(self._place.directory)
        try:
            self._console = self._left.enter_context(open_console())
            self._check_length()
            await self._spawn()
            await self._answers()
        except BaseException as error:
            await self.api.__aexit__(type(error), error, None)
            await self._undo()
            self._left.close()
            _raise_start_error(error, "")
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.api.__aexit__(kind, value, trace)
        with self._left:
            if value is None:
                return
            console = read_console(self._console)
            await self._undo()
            _raise_start_error(value, console)

    def _check_length(self) -> None:
        for name in (VSOCK, API_SOCKET, UFFD_SOCKET):
            if len(os.fsencode(self._root / name)) > _MAX_SOCKET_PATH:
                raise StartError(f"the path {self._root / name} is too long for a socket", retryable=False)

    async def _spawn(self) -> None:
        spawned = in_own_thread(lambda: spawn(self._start, self._console))
        try:
            self.record.pid, self._pidfd, gate = await asyncio.shield(spawned)
        except asyncio.CancelledError:
            await asyncio.wait([spawned])  # a matter of milliseconds
            if spawned.exception() is None:
                self.record.pid, self._pidfd, gate = spawned.result()
                os.close(gate)
            raise
        try:
            await put_into(self._place.cgroup_procs, self.record.pid)
            os.write(gate, b"go\n")  # from here on it is in its groups
        finally:
            os.close(gate)
        identity = process.identify(self.record.pid)
        if identity is None:
            raise StartError("Firecracker ended at once")
        self.record.start_ticks = identity.start_ticks

    async def _answers(self) -> None:
        deadline = time.monotonic() + API_WAIT_S
        wait_s = _FIRST_WAIT_S
        while not self.api.connects():
            if process.has_ended(self._pidfd):
                words = read_console(self._console).strip()[-_CONSOLE_TAIL:]
                raise StartError(f"Firecracker ended before it answered: {words}")
            if time.monotonic() > deadline:
                raise StartError(f"Firecracker does not answer within {API_WAIT_S:g} seconds")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _MOST_WAIT_S)

    async def serve_memory(self, saved: Saved) -> None:
        """Have the memory server wait for it at its socket. Raises OSError."""
        path = self._root / UFFD_SOCKET
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(path))
            os.chown(path, self._place.host_id, self._place.host_id)
            listener.listen(1)
            identity = await self._memory.serve(
                pidfd=self._pidfd,
                listener=listener,
                directory=self._place.directory,
                layers=saved.layers,
                table=saved.table,
            )
        self.record.served_by = ServedBy(pid=identity.pid, start_ticks=identity.start_ticks)
        self._left.callback(self._memory.on_end(identity, self._memory_ended))

    def _memory_ended(self) -> None:
        process.send_signal(self._pidfd)

    def finished(self) -> FirecrackerVm:
        """The machine, now its own master."""
        self.record.running = True
        self.record.write(self._place.directory)
        self._vm = FirecrackerVm(self.record, self._place.directory, self._pidfd, self._binding, self._memory)
        return self._vm

    async def _undo(self) -> None:
        if self._vm is not None:
            await self._vm.kill()
            return
        if self._pidfd >= 0:
            process.send_signal(self._pidfd)
            await process.wait_ended(self._pidfd, timeout_s=API_WAIT_S)
            process.reap(self.record.pid)
            os.close(self._pidfd)
            self._pidfd = -1
        clear(self._place.directory)


def _raise_start_error(error: BaseException, console: str) -> None:
    """Ours for what a start can fail with; anything else is left as it is."""
    words = console.strip()[-_CONSOLE_TAIL:]
    tail = f"; its console: {words}" if words else ""
    if isinstance(error, ApiError):
        raise StartError(f"Firecracker does not start the machine: {error.fault}") from error
    if isinstance(error, ApiGoneError):
        raise StartError(f"Firecracker ended while it started the machine: {error}{tail}") from error
    if isinstance(error, NodeError | OSError):
        raise StartError(f"the machine cannot be started: {error}{tail}") from error
