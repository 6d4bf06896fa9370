"""QEMU's monitor protocol (QMP), as drivers use it: a connection for as long as one operation takes.

    async with monitor(directory / "qmp.sock") as qmp:
        await qmp.execute("stop")

The protocol itself is the QEMU project's own library. Added is what its users here rely on: every call ends within its
time, a VMM that dies in the middle is `MonitorLostError` and nothing else, refusals keep QEMU's words, and events
nobody waits for are not kept. QEMU serves one connection of a monitor at a time; a second one waits for the first's
end, so a machine that is watched for long gets two monitors. Any number may ask at once: they come one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from qemu.qmp import EventListener, ExecuteError, QMPClient, QMPError, Runstate

TIMEOUT_S = 30.0
"""For one answer: a host that swaps or an emulated machine under load may take seconds."""
_QUEUE_S = 0.02
"""Between two attempts to get into a full queue."""
_LIBRARY = logging.getLogger("qemu.qmp")
_LIBRARY.setLevel(logging.CRITICAL)
"""It logs what it also raises."""


class MonitorError(Exception):
    """QEMU refused a command; its words, and `reason`, its class of error (`GenericError`, ...)."""

    def __init__(self, command: str, reason: str, words: str) -> None:
        super().__init__(f"{command}: {words}")
        self.command = command
        self.reason = reason


class MonitorLostError(Exception):
    """The VMM is gone or does not answer in time."""


@contextlib.asynccontextmanager
async def monitor(address: Path | socket.socket, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Monitor]:
    """Connect, negotiate, and close afterwards. A socket given is taken over. Raises MonitorLostError."""
    client = QMPClient()
    client.events.event_filter = lambda _: False
    try:
        with _lost("connect"):
            async with asyncio.timeout(timeout_s):
                await client.connect(address if isinstance(address, socket.socket) else await _queued(address))
        yield Monitor(client)
    finally:
        with contextlib.suppress(QMPError, OSError, EOFError):
            await client.disconnect()


async def _queued(path: Path) -> socket.socket:
    """Connected. QEMU serves one and lets one more wait; whoever finds its queue full tries again. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


class Monitor:
    """One negotiated connection. Calls may overlap; QEMU answers them in order."""

    def __init__(self, client: QMPClient) -> None:
        self._client = client

    async def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """One command's answer. Raises MonitorError (refused), MonitorLostError."""
        with _lost(command):
            async with asyncio.timeout(timeout_s):
                return await self._client.execute(command, None if arguments is None else dict(arguments))

    async def give(self, name: str, fd: int) -> None:
        """QEMU gets a duplicate of a descriptor, which `fd:<name>` means from then on until it is used."""
        self._send(fd, "getfd")
        await self.execute("getfd", {"fdname": name})

    async def add_fd(self, fd: int) -> int:
        """QEMU gets a duplicate of a descriptor: `/dev/fdset/<the number>` means it wherever QEMU takes a path."""
        self._send(fd, "add-fd")
        return int((await self.execute("add-fd"))["fdset-id"])

    def _send(self, fd: int, command: str) -> None:
        """A descriptor, with the blank the protocol passes over. The library's own way knows asyncio's sockets only,
        not those of the loop servers run on. Nothing waits in its buffer: every command before has been answered.
        """
        with _lost(command):
            transport = self._client._writer.transport if self._client._writer is not None else None  # noqa: SLF001
            if transport is None or transport.is_closing():
                raise EOFError("the connection ended")
            with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:
                socket.send_fds(connection, [b" "], [fd])

    def capture(self, *names: str) -> Events:
        """Events of these names from now on (all, without names). Close it; what is not read is kept until then."""
        return Events(self._client, names)

    async def wait_event(
        self, *names: str, accept: Callable[[Mapping[str, Any]], bool] = lambda _: True, timeout_s: float = TIMEOUT_S
    ) -> Mapping[str, Any]:
        """The next event of these names that is accepted. Raises MonitorLostError."""
        with self.capture(*names) as events:
            return await events.next(accept=accept, timeout_s=timeout_s)


class Events:
    """Events of one connection; a context manager."""

    def __init__(self, client: QMPClient, names: tuple[str, ...]) -> None:
        self._client = client
        self._listener = EventListener(names or None)
        client.register_listener(self._listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.remove_listener(self._listener)

    async def next(
        self, *, accept: Callable[[Mapping[str, Any]], bool] = lambda _: True, timeout_s: float = TIMEOUT_S
    ) -> Mapping[str, Any]:
        """The next one that is accepted. Raises MonitorLostError: too late, or the VMM is gone."""
        with _lost("events"):
            async with asyncio.timeout(timeout_s):
                while True:
                    event = await self._get()
                    if accept(event):
                        return event

    async def _get(self) -> Mapping[str, Any]:
        """The library does not wake those who wait for an event when the connection ends."""
        getting = asyncio.ensure_future(self._listener.get())
        ending = asyncio.ensure_future(self._client.runstate_changed())
        try:
            while self._client.runstate is Runstate.RUNNING and not getting.done():
                # A change before `ending` has begun to wait would be missed: hence the second.
                await asyncio.wait((getting, ending), timeout=1, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                raise EOFError("the connection ended")
            return cast("Mapping[str, Any]", getting.result())
        finally:
            getting.cancel()
            ending.cancel()


@contextlib.contextmanager
def _lost(command: str) -> Iterator[None]:
    try:
        yield
    except ExecuteError as error:
        raise MonitorError(command, error.error_class, str(error)) from error
    except TimeoutError as error:
        raise MonitorLostError(f"QEMU did not answer {command} in time") from error
    except (QMPError, OSError, EOFError) as error:
        raise MonitorLostError(f"QEMU's monitor is gone ({command}): {error}") from error
