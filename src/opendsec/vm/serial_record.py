"""The serial console of a machine: all it says is recorded while an edge lives, the last megabyte of it is kept.

    <directory>/serial.<offset>    pieces of what was said, each named by the offset of its first byte

QEMU drops what a guest says while nobody is connected: it never waits for us, and nothing grows without a bound. So
what is said between the death of one edge and the start of the next is not recorded, and not counted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

PIECE_BYTES = 256 * 1024
PIECES = 4
"""Kept besides the one that is being written."""
_PREFIX = "serial."


class SerialRecord:
    """The pieces below one directory; small synchronous writes to the page cache."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pieces = sorted(
            int(path.name.removeprefix(_PREFIX))
            for path in directory.glob(f"{_PREFIX}*")
            if path.name.removeprefix(_PREFIX).isdigit()
        )
        last = self._pieces[-1] if self._pieces else 0
        self.total = last + (self._path(last).stat().st_size if self._pieces else 0)
        """Bytes recorded so far, also those that were forgotten."""

    @property
    def base(self) -> int:
        """Offset of the first byte that is still there."""
        return self._pieces[0] if self._pieces else 0

    def append(self, data: bytes) -> None:
        """OSError: it could not be written; it counts as not recorded then."""
        if not self._pieces or self.total - self._pieces[-1] >= PIECE_BYTES:
            self._pieces.append(self.total)
            while len(self._pieces) > PIECES + 1:
                self._path(self._pieces.pop(0)).unlink(missing_ok=True)
        fd = os.open(self._path(self._pieces[-1]), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.total += os.write(fd, data)
        finally:
            os.close(fd)

    def read(self, offset: int, *, most: int = 1 << 20) -> tuple[int, bytes]:
        """(offset of the first byte, bytes) from there on, or from where something is still there."""
        at = max(offset, self.base)
        parts: list[bytes] = []
        left = most
        for number, start in enumerate(self._pieces):
            end = self._pieces[number + 1] if number + 1 < len(self._pieces) else self.total
            if end <= at or end == start or not left:  # one that could not be made holds nothing, and is no file
                continue
            skip = max(0, at - start)
            with self._path(start).open("rb") as file:
                file.seek(skip)
                parts.append(file.read(min(left, end - start - skip)))
            left -= len(parts[-1])
        return at, b"".join(parts)

    def _path(self, offset: int) -> Path:
        return self._directory / f"{_PREFIX}{offset}"


class SerialLine(asyncio.Protocol):
    """The connection to a machine's serial port. `record` gets what it says."""

    def __init__(self, record: SerialRecord, on_lost: Callable[[], None] = lambda: None) -> None:
        self.record = record
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self.closed = False
        self.failed = ""
        """Why something was not recorded."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self.record.append(data)
        except OSError as error:
            self.failed = str(error)
        self._wake()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._writable.set()
        self._wake()
        self._on_lost()

    async def write(self, data: bytes) -> None:
        """Waits while the guest takes nothing. Raises ConnectionError when the machine is gone."""
        await self._writable.wait()
        if self.closed or self._transport is None:
            raise ConnectionResetError("the serial line is gone")
        self._transport.write(data)
        await self._writable.wait()

    async def changed(self, offset: int, *, timeout_s: float) -> None:
        """Until something lies behind that offset, the machine is gone, or the time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self.record.total <= offset and not self.closed and loop.time() < end:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            loop.call_at(end, _resolve, waiter)
            await waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _resolve(waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
