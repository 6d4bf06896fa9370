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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from opendsec.errors import NodeError, OpenDSecError
from opendsec.model.image import Blob
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.cache import CachedBlob
from opendsec.store.loading.fetch import ChunkSource

log = logging.getLogger(__name__)

RUN_CHUNKS = 16
"""At most so many chunks with one request to the store: 1 MiB."""
DEMAND_THREADS = 96
DEMAND_PER_BLOB = 16
AHEAD_THREADS = 16
AHEAD_PER_BLOB = 6
RECENT_CHUNKS = 256
"""Kept in memory, of all blobs together: the kernel asks for a chunk in pieces."""
STREAK_BYTES = 1 << 20
"""So much is read in order before anything is read ahead."""
LONGEST_AHEAD_BYTES = 4 << 20
GIVEN_UP_S = 1.0
"""After a read has waited in vain for a chunk, others of it fail at once for so long. Readers of one page wait for each
other in the kernel, and each would begin to wait anew when the one before it was told: sandboxes times patience."""
_STREAKS = 32
_TICK_S = 0.1
_TELL_EVERY_S = 5.0


Given = tuple[Sequence[int], Callable[[], Mapping[int, bytes]]]
"""Numbers of chunks, and what gets those of them that are to be had and right. It raises nothing."""


class Answer(Protocol):
    """`opendsec.linux.fuse.Reply` is one."""

    def give(self, *parts: bytes | memoryview) -> bool: ...

    def fail(self, number: int) -> bool: ...


class Pack(Protocol):
    """Chunks that come compressed, and may be kept so. `packed.Packed` is one."""

    def has(self, number: int) -> bool:
        """Whether that chunk may be on this node."""

    def count(self) -> int:
        """Of chunks that may be."""

    def read(self, number: int) -> bytes | None:
        """A chunk whose bytes are right, from this node; None when it is not here."""

    def all(self) -> list[Given]:
        """Everything, in the order to load it."""

    def with_chunks(self, numbers: Iterable[int]) -> list[Given]:
        """What has these chunks, as far as it is worth asking for."""


class Engine:
    """What the readers of a node share: threads, memory, and the clock that ends what waits too long."""

    def __init__(self, source: ChunkSource, *, patience_s: float) -> None:
        self.source = source
        self.patience_s = patience_s
        self.demand = ThreadPoolExecutor(DEMAND_THREADS, thread_name_prefix="demand")
        self.ahead = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="ahead")
        self._recent: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._waiting: deque[_Waiting] = deque()
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

    def watch(self, waiting: _Waiting) -> None:
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
class _Waiting:
    """A read some chunks of which are on their way."""

    reader: BlobReader
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
            self.reply.give(*_cut(self.have, self.offset, self.size))
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
            lacking = [number for number in _numbers(self.offset, self.size) if number not in self.have]
            self.have.clear()
        if self.deadline - time.monotonic() < self.reader.patience_s / 2:
            self.reader.give_up(lacking)
        self.reply.fail(errno.EIO)
        self.reader.failed(why)


@dataclass(slots=True, kw_only=True)
class _Run:
    """Consecutive chunks to be fetched with one request."""

    first: int
    futures: list[Future[bytes]]
    deadline: float


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
        self.packed: Pack | None = None
        self.failures = 0
        self.asked_bytes = 0
        """Of reads of the kernel."""
        self._engine = engine
        self.table = table
        self._must_keep = must_keep
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[bytes]] = {}
        self._queue: deque[Callable[[], object]] = deque()
        self._active = 0
        self._streaks: OrderedDict[int, int] = OrderedDict()
        self._given_up: dict[int, float] = {}
        self._told_at = float("-inf")

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
        numbers = _numbers(offset, size)
        self.asked_bytes += size
        have = {number: content for number in numbers if (content := self._here(number)) is not None}
        missing = [number for number in numbers if number not in have]
        if missing and self._is_given_up(missing):
            reply.fail(errno.EIO)
            self.failed("another read of it has waited in vain just now")
        elif missing:
            self._wait_for(missing, have, offset, size, reply)
        else:
            reply.give(*_cut(have, offset, size))
        self._read_ahead(offset, size)

    def load(self, numbers: Iterable[int], *, at_once: int = AHEAD_PER_BLOB) -> list[Future[None]]:
        """Fetch what is not here of these chunks, in this order, in the background.

        The first failure ends it, and the future it happened in raises: OpenDSecError.
        """
        runs = _runs(numbers, chunk_count(self.data.size_bytes))
        return self._in_turn([partial(self._load_now, run) for run in runs], at_once)

    def load_packed(self, packed: Pack, *, at_once: int = AHEAD_PER_BLOB) -> list[Future[None]]:
        """As `load`, but what a pack has; it is this blob's from now on."""
        self.packed = packed
        return self._in_turn([partial(self._load_given, given) for given in packed.all()], at_once)

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
        content = self._remembered(number)
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

    def _absent(self, first: int, count: int) -> list[int]:
        """Which of these chunks are certainly not on this node."""
        missing = self.cached.missing(first, count)
        packed = self.packed
        return missing if packed is None else [number for number in missing if not packed.has(number)]

    def _absent_of(self, numbers: Iterable[int]) -> list[int]:
        return [number for one in numbers for number in self._absent(one, 1)]

    def _wait_for(self, missing: list[int], have: dict[int, bytes], offset: int, size: int, reply: Answer) -> None:
        deadline = time.monotonic() + self._engine.patience_s
        waiting = _Waiting(
            reader=self, offset=offset, size=size, reply=reply, have=have, missing=len(missing), deadline=deadline
        )
        self._engine.watch(waiting)
        self.request(waiting, missing)

    def request(self, waiting: _Waiting, numbers: Sequence[int]) -> None:
        """See that these chunks are fetched, if nobody does so yet, and that they arrive."""
        works = [] if self.packed is None else [self._claim_given(given) for given in self.packed.with_chunks(numbers)]
        wanted, runs = self._claim(numbers, waiting.deadline)
        with self._lock:
            self._queue.extend(work for work in works if work is not None)
            self._queue.extend(partial(self._fetch, run) for run in runs)
        self._start_works()
        for number, future in wanted:
            future.add_done_callback(lambda done, number=number: waiting.arrived(number, done))  # type: ignore[misc]

    def _claim(self, numbers: Sequence[int], deadline: float) -> tuple[list[tuple[int, Future[bytes]]], list[_Run]]:
        """A future for each chunk, and the runs to be fetched for those nobody fetches yet."""
        wanted: list[tuple[int, Future[bytes]]] = []
        runs: list[_Run] = []
        with self._lock:
            for number in numbers:
                future = self._under_way.get(number) or self._just_arrived(number)
                if future is None:
                    future = self._under_way[number] = Future()
                    last = runs[-1] if runs else None
                    if last and last.first + len(last.futures) == number and len(last.futures) < RUN_CHUNKS:
                        last.futures.append(future)
                    else:
                        runs.append(_Run(first=number, futures=[future], deadline=deadline))
                wanted.append((number, future))
        return wanted, runs

    def _remembered(self, number: int) -> bytes | None:
        """From memory; nothing where the kernel reads the file and it is not there, or no longer."""
        if self._must_keep and self.cached.missing(number, 1):
            return None
        return self._engine.recent((self.cached.name, number))

    def _just_arrived(self, number: int) -> Future[bytes] | None:
        content = self._remembered(number)
        if content is None:
            return None
        future: Future[bytes] = Future()
        future.set_result(content)
        return future

    def _start_works(self) -> None:
        with self._lock:
            ready = []
            while self._queue and self._active < DEMAND_PER_BLOB:
                self._active += 1
                ready.append(self._queue.popleft())
        for work in ready:
            try:
                self._engine.demand.submit(self._work, work)
            except RuntimeError:  # closed meanwhile; the clock has told those who wait
                return

    def _work(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._active -= 1
            self._start_works()

    def _fetch(self, run: _Run) -> OpenDSecError | None:
        """Complete the futures of a run, then keep what came; why some did not."""
        chunks: dict[int, bytes] = {}
        error: OpenDSecError | None = NodeError("nobody waits any longer", retryable=True)
        try:
            if time.monotonic() < run.deadline:
                fetched = self._engine.source.fetch(self.data, self.table, run.first, len(run.futures))
                chunks, error = dict(fetched.chunks), fetched.error
                if self._must_keep:
                    chunks, error = self._written(chunks, error)
        finally:
            self._complete(run, chunks, error)
        if not self._must_keep:
            self._written(chunks, error)
        return error

    def _complete(self, run: _Run, chunks: Mapping[int, bytes], error: OpenDSecError | None) -> None:
        for number, content in chunks.items():
            self._engine.keep((self.cached.name, number), content)
        with self._lock:
            for number in range(run.first, run.first + len(run.futures)):
                self._under_way.pop(number, None)
        for number, future in enumerate(run.futures, run.first):
            if number in chunks:
                future.set_result(chunks[number])
            else:
                future.set_exception(error or NodeError("not fetched"))

    def _written(
        self, chunks: dict[int, bytes], error: OpenDSecError | None
    ) -> tuple[dict[int, bytes], OpenDSecError | None]:
        """What of it is on this node's disk now, and why the rest is not."""
        kept: list[int] = []
        why = "no room"
        try:
            for number, content in chunks.items():
                if not self.cached.write(number, content):
                    break
                kept.append(number)
        except OSError as problem:
            why = str(problem)
            self.failed(f"cache: {why}")
        if len(kept) < len(chunks):
            error = error or NodeError(
                f"data of {self.data.digest} cannot be kept on this node: {why}", retryable=False
            )
        return {number: chunks[number] for number in kept}, error

    def _load_now(self, numbers: Sequence[int]) -> OpenDSecError | None:
        """In this thread, what is neither here nor under way."""
        for given in self.packed.with_chunks(self._absent_of(numbers)) if self.packed is not None else ():
            error = self._load_given(given)
            if error is not None:
                return error
        return self._fetch_each(self._claim_absent(numbers))

    def _fetch_each(self, runs: Sequence[_Run]) -> OpenDSecError | None:
        """One after the other until one fails. The others are given up too: who waits for them asks anew."""
        left = deque(runs)
        error: OpenDSecError | None = None
        try:
            while left and error is None:
                error = self._fetch(left.popleft())
        finally:
            for run in left:
                self._complete(run, {}, NodeError("given up after another chunk failed", retryable=True))
        return error

    def _claim_absent(self, numbers: Iterable[int]) -> list[_Run]:
        with self._lock:
            absent = [number for number in self._absent_of(numbers) if number not in self._under_way]
        return self._claim(absent, time.monotonic() + self._engine.patience_s)[1]

    def _load_given(self, given: Given) -> OpenDSecError | None:
        """In this thread, what is neither here nor under way."""
        work = self._claim_given(given)
        return None if work is None else work()

    def _claim_given(self, given: Given) -> Callable[[], OpenDSecError | None] | None:
        """What gets those of these chunks that are neither here nor under way; None when all are."""
        runs = self._claim_absent(given[0])
        return partial(self._bring, runs, given[1]) if runs else None

    def _bring(self, runs: Sequence[_Run], read: Callable[[], Mapping[int, bytes]]) -> OpenDSecError | None:
        """What `read` does not give is fetched. What stays here compressed is kept once."""
        left = list(runs)
        problem: OpenDSecError | None = None
        try:
            given = read()
            for run in runs:
                wanted = range(run.first, run.first + len(run.futures))
                chunks = {number: given[number] for number in wanted if number in given}
                if len(chunks) == len(wanted):
                    packed = self.packed
                    unkept = {n: chunk for n, chunk in chunks.items() if packed is None or not packed.has(n)}
                    kept, error = self._written(unkept, None)
                    left.remove(run)
                    self._complete(run, kept if self._must_keep else chunks, error)
                    problem = problem or error
        finally:
            error = self._fetch_each(left)
        return error or problem

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
        absent = self._absent(first, count)
        if len(absent) * 2 > count:
            self.load(absent, at_once=1 + len(absent) // RUN_CHUNKS)


def _runs(numbers: Iterable[int], count: int) -> Iterator[list[int]]:
    """Numbers below `count` in their order, neighbours together, at most RUN_CHUNKS at once."""
    run: list[int] = []
    for number in numbers:
        if not 0 <= number < count:
            continue
        if run and (number != run[-1] + 1 or len(run) == RUN_CHUNKS):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _numbers(offset: int, size: int) -> range:
    """Of the chunks that part lies in."""
    return range(offset // CHUNK_BYTES, -(-(offset + size) // CHUNK_BYTES))


def _cut(chunks: dict[int, bytes], offset: int, size: int) -> list[memoryview]:
    """That part of a blob out of the chunks it lies in."""
    parts = []
    end = offset + size
    for number in _numbers(offset, size):
        start = number * CHUNK_BYTES
        parts.append(memoryview(chunks[number])[max(0, offset - start) : end - start])
    return parts
