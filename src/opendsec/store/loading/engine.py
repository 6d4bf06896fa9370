"""What the readers of a node share: threads, memory, and the clock that ends a read which waits too long.

A read that has waited for its patience gets EIO, also when the thread that fetches for it hangs in a file system that
will never answer: such threads are lost, and reads of other blobs go on. It knows nothing of where chunks come from.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from opendsec.errors import OpenDSecError
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.fetch import ChunkSource

DEMAND_THREADS = 96
AHEAD_THREADS = 16
RECENT_CHUNKS = 256
"""Kept in memory, of all blobs together: the kernel asks for a chunk in pieces."""
_TICK_S = 0.1


class Answer(Protocol):
    """`opendsec.linux.fuse.Reply` is one."""

    def give(self, *parts: bytes | memoryview) -> bool: ...

    def fail(self, number: int) -> bool: ...


class Reader(Protocol):
    """Whose read it is. `reading.BlobReader` is one."""

    @property
    def patience_s(self) -> float:
        """Of a read."""

    def request(self, waiting: Waiting, numbers: Sequence[int]) -> None:
        """See that these chunks are fetched, if nobody does so yet, and that they arrive."""

    def give_up(self, numbers: Sequence[int]) -> None:
        """A read has waited in vain for these."""

    def failed(self, why: str) -> None:
        """A read got EIO."""


class Engine:
    """What the readers of a node share: threads, memory, and the clock that ends what waits too long."""

    def __init__(self, source: ChunkSource, *, patience_s: float) -> None:
        self.source = source
        self.patience_s = patience_s
        self.demand = ThreadPoolExecutor(DEMAND_THREADS, thread_name_prefix="demand")
        self.ahead = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="ahead")
        self._recent: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._waiting: deque[Waiting] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._watch, name="clock", daemon=True)
        self._clock.start()

    def recent(self, key: tuple[str, int]) -> bytes | None:
        with self._lock:
            content = self._recent.get(key)
            if content is not None:
                self._recent.move_to_end(key)
            return content

    def keep(self, key: tuple[str, int], content: bytes) -> None:
        with self._lock:
            self._recent[key] = content
            self._recent.move_to_end(key)
            if len(self._recent) > RECENT_CHUNKS:
                self._recent.popitem(last=False)

    def watch(self, waiting: Waiting) -> None:
        with self._lock:
            self._waiting.append(waiting)

    def close(self) -> None:
        """Whoever waits gets EIO; threads that hang are left behind."""
        self._ended.set()
        self.source.close()
        for pool in (self.demand, self.ahead):
            pool.shutdown(wait=False, cancel_futures=True)
        self._clock.join()

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._end_overdue(time.monotonic())
        self._end_overdue(float("inf"))

    def _end_overdue(self, now: float) -> None:
        while True:
            with self._lock:
                if not self._waiting or not (self._waiting[0].is_done or self._waiting[0].deadline <= now):
                    return
                first = self._waiting.popleft()
            first.end("no answer in time")


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A read some chunks of which are on their way."""

    reader: Reader
    offset: int
    size: int
    reply: Answer
    have: dict[int, bytes]
    missing: int
    deadline: float
    is_done: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arrived(self, number: int, future: Future[bytes]) -> None:
        error = future.exception()
        if error is not None:
            self._failed(number, error)
            return
        with self.lock:
            self.missing -= 1
            if not self.is_done:
                self.have[number] = future.result()
            complete = self.missing == 0 and not self.is_done
            self.is_done = self.is_done or complete
        if complete:
            self.reply.give(*cut(self.have, self.offset, self.size))
            self.have.clear()

    def _failed(self, number: int, error: BaseException) -> None:
        """A fetch that began long before this read may have given up before this read has to."""
        retryable = isinstance(error, OpenDSecError) and error.retryable
        if retryable and not self.is_done and self.deadline - time.monotonic() > self.reader.patience_s / 2:
            self.reader.request(self, [number])
        else:
            self.end(str(error))

    def end(self, why: str) -> None:
        with self.lock:
            if self.is_done:
                return
            self.is_done = True
            lacking = [number for number in numbers_of(self.offset, self.size) if number not in self.have]
            self.have.clear()
        if self.deadline - time.monotonic() < self.reader.patience_s / 2:
            self.reader.give_up(lacking)
        self.reply.fail(errno.EIO)
        self.reader.failed(why)


def numbers_of(offset: int, size: int) -> range:
    """Of the chunks that part lies in."""
    return range(offset // CHUNK_BYTES, -(-(offset + size) // CHUNK_BYTES))


def cut(chunks: dict[int, bytes], offset: int, size: int) -> list[memoryview]:
    """That part of a blob out of the chunks it lies in."""
    parts = []
    end = offset + size
    for number in numbers_of(offset, size):
        start = number * CHUNK_BYTES
        parts.append(memoryview(chunks[number])[max(0, offset - start) : end - start])
    return parts
