"""Output of commands, recorded on the host: what was written, how much of it is kept, and who follows it.

A stream begins in memory; beyond 64 KiB it moves to a file `out/<number>.<1|2>` through the writer thread. The guest
is told that output is safe only when it is: written to the file, or counted and dropped. What is only in memory the
guest still has (its window is 256 KiB), so the death of the edge loses nothing: a new edge continues at the end of
the file, or at 0.

Two caps: per command and stream (the request's), and per sandbox (files). Beyond them bytes are counted, not kept;
what is kept is always a prefix. Dropped output is acknowledged at a bounded rate, so a command that floods does not
take the edge's time from the others.

Followers read by offset, from memory, from the last chunks still in flight, or from the file. A slow follower holds
nothing and blocks nobody.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

from opendsec.edge.writer import WriterThread
from opendsec.guest.base import CHUNK_BYTES

log = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Larger streams go to a file."""
RECENT_BYTES = 1024 * 1024
"""Of a growing file kept in memory for followers at its end."""
DROP_PAUSE_S = 0.004
"""Per 256 KiB of dropped output: 64 MB/s."""


class Budget:
    """Bytes of output files one sandbox may keep.

    The first 64 KiB of each stream are free, so nobody's short answers are lost. When it runs out, `make_room(wanted)`
    is called, which may give some back.
    """

    def __init__(self, cap_bytes: int, make_room: Callable[[int], None] = lambda wanted: None) -> None:
        self.left = cap_bytes
        self._make_room = make_room

    def grant(self, wanted: int) -> int:
        """How many of these bytes may be kept; they are taken from the budget."""
        if wanted > self.left:
            self._make_room(wanted)
        given = max(0, min(wanted, self.left))
        self.left -= given
        return given

    def give_back(self, count: int) -> None:
        """A file has gone."""
        self.left += count


class OutputStream:
    """One stream of one command."""

    def __init__(self, path: str, *, limit: int, budget: Budget, writer: WriterThread) -> None:
        self.total = 0
        """Bytes seen so far, which is also the offset expected next."""
        self.kept = 0
        """Bytes that can be read: [0, kept)."""
        self.in_file = False
        self.removed = False
        """It was in a file, which had to make room for newer output or is gone."""
        self._path = path
        self._limit = limit
        self._budget = budget
        self._writer = writer
        self._memory: bytearray | bytes | None = bytearray()
        self._durable = 0
        self._dropping = False
        self._recent: deque[tuple[int, bytes]] = deque()
        self._recent_bytes = 0
        self._last_write: asyncio.Future[int] | None = None

    def resume_from_file(self) -> None:
        """After a restart: what is in the file is kept, the rest comes from the guest again. Blocking (one stat)."""
        try:
            size = Path(self._path).stat().st_size
        except FileNotFoundError:
            return
        self.in_file, self._memory = True, None
        self.total = self.kept = self._durable = size
        self._budget.grant(size)

    def skip_to(self, offset: int) -> None:
        """The guest holds nothing below this offset any more: what is missing was dropped before."""
        if offset > self.total:
            self.total, self._dropping = offset, True

    def record(self, offset: int, data: bytes, *, on_safe: Callable[[], None]) -> None:
        """Take a chunk as the guest sent it. `on_safe` is called whenever `safe` may have grown."""
        if offset > self.total:
            self._dropping = True
        fresh = data[max(0, self.total - offset) :] if offset <= self.total else data
        self.total = max(self.total, offset + len(data))
        if not fresh:
            return
        room = 0 if self._dropping else min(len(fresh), self._limit - self.kept)
        if not self.in_file and self.kept + room <= INLINE_BYTES and (room == len(fresh) or self.kept + room == 0):
            self._keep_in_memory(fresh[:room])
        else:
            # A stream that drops must not stay in memory: nothing of it could be acknowledged, and the guest would
            # stall.
            self._move_to_file(on_safe)
            room = self._budget.grant(room)
            self._keep_in_file(fresh[:room], on_safe)
        if room < len(fresh):
            self._dropping = True
            asyncio.get_running_loop().call_later(DROP_PAUSE_S, on_safe)

    def safe(self) -> int:
        """Offset below which the guest may forget everything."""
        return self.total if self._dropping and self._durable >= self.kept else self._durable

    async def settle(self) -> None:
        """Wait until everything that will be kept is in the file."""
        if self._last_write is not None:
            await asyncio.wait([self._last_write])

    def inline(self) -> bytes | None:
        """The bytes for the journal, or None when they are in the file."""
        return None if self.in_file else bytes(self._memory or b"")

    def _keep_in_memory(self, data: bytes) -> None:
        assert isinstance(self._memory, bytearray)
        self._memory += data
        self.kept += len(data)

    def _move_to_file(self, on_safe: Callable[[], None]) -> None:
        if self.in_file:
            return
        held, self._memory, self.in_file = bytes(self._memory or b""), None, True
        self.kept = 0
        self._keep_in_file(held, on_safe)

    def _keep_in_file(self, data: bytes, on_safe: Callable[[], None]) -> None:
        if not data:
            return
        position = self.kept
        self.kept += len(data)
        self._recent.append((position, data))
        self._recent_bytes += len(data)
        self._last_write = self._writer.run(lambda: write_at(self._path, position, data))
        self._last_write.add_done_callback(lambda done: self._written(done, position, len(data), on_safe))

    def _written(self, done: asyncio.Future[int], position: int, length: int, on_safe: Callable[[], None]) -> None:
        error = done.exception()
        if error is None:
            self._durable = max(self._durable, position + length) if self._durable == position else self._durable
        elif self.kept > self._durable:
            # The node's disk takes no more: what did not arrive is dropped, and `kept` says so.
            log.warning("output_not_kept", extra={"fields": {"path": self._path, "reason": str(error)}})
            self._budget.give_back(self.kept - self._durable)
            self._dropping, self.kept = True, self._durable
            end = self._durable
            self._last_write = self._writer.run(lambda: cut_at(self._path, end), long=True)
            self._recent.clear()
            self._recent_bytes = 0
        while self._recent and self._recent_bytes > RECENT_BYTES and self._recent[0][0] < self._durable:
            self._recent_bytes -= len(self._recent.popleft()[1])
        on_safe()

    def read_now(self, offset: int) -> bytes | memoryview | None:
        """Kept bytes from `offset` if they are in memory, the kernel's included (b"" at the end), None when the disk
        must be read.
        """
        if offset >= self.kept:
            return b""
        if self._memory is not None:
            return memoryview(bytes(self._memory))[offset : offset + CHUNK_BYTES]
        for start, data in self._recent:
            if start <= offset < start + len(data):
                return memoryview(data)[offset - start : offset - start + CHUNK_BYTES]
        return read_cached(self._path, offset, min(CHUNK_BYTES, self._durable - offset))

    def read_file(self, offset: int) -> bytes:
        """Kept bytes from the file. Blocking: for a thread of its own."""
        with Path(self._path).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(min(CHUNK_BYTES, self._durable - offset))

    def end(self) -> None:
        """No more will come: nothing need be held for followers at the end of a file."""
        if self.in_file:
            self._recent.clear()
            self._recent_bytes = 0

    def restore(self, *, total: int, kept: int, in_file: bool) -> None:
        """An ended stream as the journal has it; inline bytes stay there until somebody asks."""
        self.total, self.kept, self._durable, self.in_file = total, kept, kept, in_file
        self._memory = None if in_file or kept else b""
        if in_file and Path(self._path).exists():
            self._budget.grant(kept)
        elif in_file:
            self.removed, self.kept = True, 0

    def remove(self) -> None:
        """Give the file of an ended stream up."""
        if not self.in_file or self.removed:
            return
        self._budget.give_back(self.kept)
        self.removed, self.kept = True, 0
        self._writer.run(lambda: Path(self._path).unlink(missing_ok=True), long=True)

    @property
    def forgotten(self) -> bool:
        """Ended, inline, and no longer in memory: the journal has it."""
        return not self.in_file and self._memory is None

    def forget(self) -> int:
        """Drop the memory of an ended inline stream; returns the bytes saved."""
        saved = len(self._memory or b"")
        self._memory = None if self.kept else b""
        return saved

    def remember(self, content: bytes) -> None:
        """Undo `forget` with the journal's bytes."""
        self._memory = content


def write_at(path: str, position: int, data: bytes) -> int:
    """Write all of it at this place, making file and directory when missing. Blocking. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        Path(path).parent.mkdir(0o700)
        fd = os.open(path, flags, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], position + done)
        return done
    finally:
        os.close(fd)


def read_cached(path: str, position: int, length: int) -> memoryview | None:
    """Up to so many bytes from this place if they are in the page cache, as what was just written is; None: the disk
    must be asked, and that may take its time. Raises OSError."""
    found = bytearray(length)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        got = os.preadv(fd, [found], position, os.RWF_NOWAIT)
    except (BlockingIOError, NotImplementedError):
        return None
    except OSError as exc:
        if exc.errno == errno.EOPNOTSUPP:
            return None
        raise
    finally:
        os.close(fd)
    return memoryview(found)[:got] if got else None


def cut_at(path: str, size: int) -> int:
    """Undo what later writes may have left behind a failed one. Blocking."""
    if Path(path).exists():
        os.truncate(path, size)
    return size


class RecentOutputs:
    """Inline outputs of ended commands in memory, oldest dropped first; the journal has them all."""

    def __init__(self, cap_bytes: int = 64 * 1024 * 1024) -> None:
        self._cap = cap_bytes
        self._size = 0
        self._streams: OrderedDict[OutputStream, int] = OrderedDict()

    def add(self, stream: OutputStream) -> None:
        """Count an ended stream that is in memory."""
        if stream.in_file or not stream.kept or stream in self._streams:
            return
        self._streams[stream] = stream.kept
        self._size += stream.kept
        while self._size > self._cap:
            oldest, size = self._streams.popitem(last=False)
            self._size -= size
            oldest.forget()

    def discard(self, stream: OutputStream) -> None:
        """Its sandbox is forgotten."""
        self._size -= self._streams.pop(stream, 0)
