"""Chunks of one data blob on their way to this node: each is fetched by one thread, however many wait for it.

    fetches.request(waiting, numbers)    for a read: in threads of its own, at most DEMAND_PER_BLOB for each blob
    fetches.load_now(numbers)            for nobody in particular, in the caller's thread
    fetches.packed = …                   from then on chunks the layer's pack has come from there, a group at a time

What nobody waits for any longer is not fetched; what fails is told to those who wait for that chunk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from opendsec.errors import NodeError, OpenDSecError
from opendsec.model.image import Blob
from opendsec.store.loading.cache import CachedBlob
from opendsec.store.loading.engine import Engine, Waiting

RUN_CHUNKS = 16
"""At most so many chunks with one request to the store: 1 MiB."""
DEMAND_PER_BLOB = 16

Given = tuple[Sequence[int], Callable[[], Mapping[int, bytes]]]
"""Numbers of chunks, and what gets those of them that are to be had and right. It raises nothing."""


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


@dataclass(slots=True, kw_only=True)
class Run:
    """Consecutive chunks to be fetched with one request."""

    first: int
    futures: list[Future[bytes]]
    deadline: float


class Fetches:
    """Of one blob. Threads may share it.

    `must_keep`: the kernel reads the cached file itself, so a chunk that could not be written there was not got.
    `failed` is told what is wrong with the cache.
    """

    def __init__(
        self,
        engine: Engine,
        data: Blob,
        table: bytes,
        cached: CachedBlob,
        *,
        must_keep: bool,
        failed: Callable[[str], None],
    ) -> None:
        self.packed: Pack | None = None
        self._engine = engine
        self._data = data
        self._table = table
        self._cached = cached
        self._must_keep = must_keep
        self._failed = failed
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[bytes]] = {}
        self._queue: deque[Callable[[], object]] = deque()
        self._active = 0

    @property
    def are_none(self) -> bool:
        """Whether no chunk is on its way."""
        return not self._under_way

    def absent(self, first: int, count: int) -> list[int]:
        """Which of these chunks are certainly not on this node."""
        missing = self._cached.missing(first, count)
        packed = self.packed
        return missing if packed is None else [number for number in missing if not packed.has(number)]

    def remembered(self, number: int) -> bytes | None:
        """From memory; nothing where the kernel reads the file and it is not there, or no longer."""
        if self._must_keep and self._cached.missing(number, 1):
            return None
        return self._engine.recent((self._cached.name, number))

    def request(self, waiting: Waiting, numbers: Sequence[int]) -> None:
        """See that these chunks are fetched, if nobody does so yet, and that they arrive."""
        works = [] if self.packed is None else [self._claim_given(given) for given in self.packed.with_chunks(numbers)]
        wanted, runs = self._claim(numbers, waiting.deadline)
        with self._lock:
            self._queue.extend(work for work in works if work is not None)
            self._queue.extend(partial(self._fetch, run) for run in runs)
        self._start_works()
        for number, future in wanted:
            future.add_done_callback(lambda done, number=number: waiting.arrived(number, done))  # type: ignore[misc]

    def load_now(self, numbers: Sequence[int]) -> OpenDSecError | None:
        """In this thread, what is neither here nor under way."""
        for given in self.packed.with_chunks(self._absent_of(numbers)) if self.packed is not None else ():
            error = self.load_given(given)
            if error is not None:
                return error
        return self._fetch_each(self._claim_absent(numbers))

    def load_given(self, given: Given) -> OpenDSecError | None:
        """In this thread, what is neither here nor under way."""
        work = self._claim_given(given)
        return None if work is None else work()

    def _absent_of(self, numbers: Iterable[int]) -> list[int]:
        return [number for one in numbers for number in self.absent(one, 1)]

    def _claim(self, numbers: Sequence[int], deadline: float) -> tuple[list[tuple[int, Future[bytes]]], list[Run]]:
        """A future for each chunk, and the runs to be fetched for those nobody fetches yet."""
        wanted: list[tuple[int, Future[bytes]]] = []
        runs: list[Run] = []
        with self._lock:
            for number in numbers:
                future = self._under_way.get(number) or self._just_arrived(number)
                if future is None:
                    future = self._under_way[number] = Future()
                    last = runs[-1] if runs else None
                    if last and last.first + len(last.futures) == number and len(last.futures) < RUN_CHUNKS:
                        last.futures.append(future)
                    else:
                        runs.append(Run(first=number, futures=[future], deadline=deadline))
                wanted.append((number, future))
        return wanted, runs

    def _claim_absent(self, numbers: Iterable[int]) -> list[Run]:
        with self._lock:
            absent = [number for number in self._absent_of(numbers) if number not in self._under_way]
        return self._claim(absent, time.monotonic() + self._engine.patience_s)[1]

    def _claim_given(self, given: Given) -> Callable[[], OpenDSecError | None] | None:
        """What gets those of these chunks that are neither here nor under way; None when all are."""
        runs = self._claim_absent(given[0])
        return partial(self._bring, runs, given[1]) if runs else None

    def _just_arrived(self, number: int) -> Future[bytes] | None:
        content = self.remembered(number)
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

    def _fetch(self, run: Run) -> OpenDSecError | None:
        """Complete the futures of a run, then keep what came; why some did not."""
        chunks: dict[int, bytes] = {}
        error: OpenDSecError | None = NodeError("nobody waits any longer", retryable=True)
        try:
            if time.monotonic() < run.deadline:
                fetched = self._engine.source.fetch(self._data, self._table, run.first, len(run.futures))
                chunks, error = dict(fetched.chunks), fetched.error
                if self._must_keep:
                    chunks, error = self._written(chunks, error)
        finally:
            self._complete(run, chunks, error)
        if not self._must_keep:
            self._written(chunks, error)
        return error

    def _fetch_each(self, runs: Sequence[Run]) -> OpenDSecError | None:
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

    def _bring(self, runs: Sequence[Run], read: Callable[[], Mapping[int, bytes]]) -> OpenDSecError | None:
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

    def _complete(self, run: Run, chunks: Mapping[int, bytes], error: OpenDSecError | None) -> None:
        for number, content in chunks.items():
            self._engine.keep((self._cached.name, number), content)
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
                if not self._cached.write(number, content):
                    break
                kept.append(number)
        except OSError as problem:
            why = str(problem)
            self._failed(f"cache: {why}")
        if len(kept) < len(chunks):
            error = error or NodeError(
                f"data of {self._data.digest} cannot be kept on this node: {why}", retryable=False
            )
        return {number: chunks[number] for number in kept}, error


def runs_of(numbers: Iterable[int], count: int) -> Iterator[list[int]]:
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
