"""Reads of one data blob, answered from memory, this node's cache or the store: with the right bytes, or with EIO.

    reader.read(offset, size, reply)     the kernel asks; `reply` is completed later, from some thread
    reader.load(numbers)                 the same chunks for the cache, before anybody asks
    reader.packed = …                    from then on chunks the layer's pack has come from there, a group at a time

A chunk is fetched by one thread however many wait for it. A read that has waited for `patience_s` gets EIO, also when
the thread that fetches for it hangs in a file system that will never answer: the threads are lost then, up to
DEMAND_PER_BLOB for each blob, and reads of other blobs go on. What fails is told to that read alone.

Sequential reads of long files are read ahead of, by no more than a quarter of what was read already: so a start,
which reads in small pieces, does not fetch what it will not touch.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from opendsec.errors import OpenDSecError
from opendsec.model.image import Blob
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.cache import CachedBlob
from opendsec.store.loading.engine import Answer, Engine, Waiting, cut, numbers_of
from opendsec.store.loading.fetching import RUN_CHUNKS, Fetches, Pack, runs_of

log = logging.getLogger(__name__)

AHEAD_PER_BLOB = 6
STREAK_BYTES = 1 << 20
"""So much is read in order before anything is read ahead."""
LONGEST_AHEAD_BYTES = 4 << 20
GIVEN_UP_S = 1.0
"""After a read has waited in vain for a chunk, others of it fail at once for so long. Readers of one page wait for each
other in the kernel, and each would begin to wait anew when the one before it was told: sandboxes times patience."""
_STREAKS = 32
_TELL_EVERY_S = 5.0


class BlobReader:
    """Reads of one blob. Threads may share it.

    `must_keep`: the kernel reads the cached file itself, so a chunk that could not be written there was not got.
    """

    def __init__(
        self,
        engine: Engine,
        data: Blob,
        table: bytes,
        cached: CachedBlob,
        *,
        must_keep: bool = False,
    ) -> None:
        self.data = data
        self.cached = cached
        self.failures = 0
        self.asked_bytes = 0
        """Of reads of the kernel."""
        self._engine = engine
        self.table = table
        self._fetches = Fetches(engine, data, table, cached, must_keep=must_keep, failed=self.failed)
        self._lock = threading.Lock()
        self._streaks: OrderedDict[int, int] = OrderedDict()
        self._given_up: dict[int, float] = {}
        self._told_at = float("-inf")

    @property
    def packed(self) -> Pack | None:
        """Where chunks of the layer's pack come from."""
        return self._fetches.packed

    @packed.setter
    def packed(self, packed: Pack | None) -> None:
        self._fetches.packed = packed

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is on its way."""
        return self._fetches.are_none

    @property
    def present_bytes(self) -> int:
        """About as many bytes of the blob are on this node, compressed or not."""
        packed = self.packed.count() * CHUNK_BYTES if self.packed is not None else 0
        return min(self.cached.present_bytes + packed, self.data.size_bytes)

    @property
    def patience_s(self) -> float:
        """Of a read."""
        return self._engine.patience_s

    def read(self, offset: int, size: int, reply: Answer) -> None:
        """Complete `reply` with that part of the blob, now or later, or with EIO. The part lies within the blob."""
        numbers = numbers_of(offset, size)
        self.asked_bytes += size
        have = {number: content for number in numbers if (content := self._here(number)) is not None}
        missing = [number for number in numbers if number not in have]
        if missing and self._is_given_up(missing):
            reply.fail(errno.EIO)
            self.failed("another read of it has waited in vain just now")
        elif missing:
            self._wait_for(missing, have, offset, size, reply)
        else:
            reply.give(*cut(have, offset, size))
        self._read_ahead(offset, size)

    def load(self, numbers: Iterable[int], *, at_once: int = AHEAD_PER_BLOB) -> list[Future[None]]:
        """Fetch what is not here of these chunks, in this order, in the background.

        The first failure ends it, and the future it happened in raises: OpenDSecError.
        """
        runs = runs_of(numbers, chunk_count(self.data.size_bytes))
        return self._in_turn([partial(self._fetches.load_now, run) for run in runs], at_once)

    def load_packed(self, packed: Pack, *, at_once: int = AHEAD_PER_BLOB) -> list[Future[None]]:
        """As `load`, but what a pack has; it is this blob's from now on."""
        self.packed = packed
        return self._in_turn([partial(self._fetches.load_given, given) for given in packed.all()], at_once)

    def _in_turn(self, works: Sequence[Callable[[], OpenDSecError | None]], at_once: int) -> list[Future[None]]:
        ready = iter(works)
        turn, failed = threading.Lock(), threading.Event()

        def work() -> None:
            while True:
                with turn:
                    one = next(ready, None)
                if one is None or failed.is_set():
                    return
                error = one()
                if error is not None:
                    failed.set()
                    raise error

        return [self._engine.ahead.submit(work) for _ in range(at_once)]

    def give_up(self, numbers: Sequence[int]) -> None:
        """A read has waited in vain for these: whoever the kernel made wait behind it is told at once."""
        now = time.monotonic()
        with self._lock:
            self._given_up = {number: until for number, until in self._given_up.items() if until > now}
            self._given_up |= dict.fromkeys(numbers, now + GIVEN_UP_S)

    def _is_given_up(self, numbers: Iterable[int]) -> bool:
        now = time.monotonic()
        return any(self._given_up.get(number, 0.0) > now for number in numbers)

    def failed(self, why: str) -> None:
        """A read got EIO. Told in the log, not more often than anybody reads it."""
        with self._lock:
            self.failures += 1
            now = time.monotonic()
            told = now - self._told_at < _TELL_EVERY_S
            self._told_at = self._told_at if told else now
        if not told:
            fields = {"data": self.data.digest, "why": why, "failures": self.failures}
            log.warning("read_failed", extra={"fields": fields})

    def _here(self, number: int) -> bytes | None:
        key = (self.cached.name, number)
        content = self._fetches.remembered(number)
        if content is None:
            try:
                content = self.cached.read(number)
            except OSError as error:  # the node's disk is in trouble; the store still has it
                self.failed(f"cache: {error}")
                return None
            if content is None and self.packed is not None:
                content = self.packed.read(number)
            if content is not None:
                self._engine.keep(key, content)
        return content

    def _wait_for(self, missing: list[int], have: dict[int, bytes], offset: int, size: int, reply: Answer) -> None:
        deadline = time.monotonic() + self._engine.patience_s
        waiting = Waiting(
            reader=self, offset=offset, size=size, reply=reply, have=have, missing=len(missing), deadline=deadline
        )
        self._engine.watch(waiting)
        self._fetches.request(waiting, missing)

    def request(self, waiting: Waiting, numbers: Sequence[int]) -> None:
        """See that these chunks are fetched, if nobody does so yet, and that they arrive."""
        self._fetches.request(waiting, numbers)

    def _read_ahead(self, offset: int, size: int) -> None:
        end = offset + size
        with self._lock:
            streak = self._streaks.pop(offset, 0) + size
            self._streaks[end] = streak
            if len(self._streaks) > _STREAKS:
                self._streaks.popitem(last=False)
        window = min(streak // 4, LONGEST_AHEAD_BYTES)
        if streak < STREAK_BYTES or end >= self.data.size_bytes:
            return
        first, count = -(-end // CHUNK_BYTES), window // CHUNK_BYTES
        absent = self._fetches.absent(first, count)
        if len(absent) * 2 > count:
            self.load(absent, at_once=1 + len(absent) // RUN_CHUNKS)
