"""Small blocking writes in order, on a thread of their own when the disk is slow, so that it does not hold the loop.

Jobs run in the order they were given. What has gathered while the thread was busy is done in one go and answered
with one wake-up of the loop (group commit). A writer made with `at_once` does a job where it is given as long as jobs
are as short as they usually are: a line written into the page cache takes 20 us, handing it to a thread and back three
times that in CPU, and milliseconds while the loop is busy, for the thread waits for the interpreter's lock. The first
job that takes longer than SLOW_S is the last one for SLOW_FOR_S.

Nothing here calls fsync: a journal must survive the death of the edge, and bytes handed to the kernel do. A reboot ends
every sandbox of the node, so a journal that lost its tail to a power cut has nothing to say that is still true.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_Job = tuple[asyncio.Future[Any], Callable[[], Any]]
_Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]

SLOW_S = 0.03
"""More than a busy machine keeps a thread from its processor."""
SLOW_FOR_S = 1.0
"""How long the thread does everything after a job that held the loop for SLOW_S."""


class WriterThread:
    """`async with WriterThread("journal") as writer: await writer.run(job)`. Leaving waits for every job given
    before.
    """

    def __init__(self, name: str, *, at_once: bool = False) -> None:
        self._name = name
        self._at_once_from = 0.0 if at_once else math.inf
        """On the monotonic clock: from then on jobs may run where they are given."""
        self._outstanding = 0
        """Jobs that were given to the thread and are not answered yet."""
        self._batches: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        self._gathered: list[_Job] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=f"opendsec-{self._name}", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._hand_over()
            self._batches.put(None)
            await asyncio.to_thread(self._thread.join)

    def run(self, job: Callable[[], T], *, long: bool = False) -> asyncio.Future[T]:
        """Do or queue a job now; the future has what it returned or raised. It runs even if nobody waits any more.

        `long`: it is known to take its time, so it is for the thread.
        """
        assert self._loop is not None, "the writer has not been entered"
        future: asyncio.Future[T] = self._loop.create_future()
        begin = time.monotonic()
        if not long and not self._outstanding and begin >= self._at_once_from:
            _settle(*_attempt((future, job)))
            if (end := time.monotonic()) - begin > SLOW_S:
                self._at_once_from = end + SLOW_FOR_S
            return future
        self._outstanding += 1
        if not self._gathered:
            # One wake-up of the thread for all that comes in this turn of the loop.
            self._loop.call_soon(self._hand_over)
        self._gathered.append((future, job))
        return future

    def _hand_over(self) -> None:
        if self._gathered:
            self._batches.put(self._gathered)
            self._gathered = []

    def _work(self) -> None:
        assert self._loop is not None
        while (batch := self._batches.get()) is not None:
            self._loop.call_soon_threadsafe(self._deliver, [_attempt(job) for job in batch])

    def _deliver(self, outcomes: list[_Outcome]) -> None:
        self._outstanding -= len(outcomes)
        for outcome in outcomes:
            _settle(*outcome)


def _attempt(entry: _Job) -> _Outcome:
    future, job = entry
    try:
        return future, job(), None
    except Exception as exc:  # noqa: BLE001 - delivered to whoever waits for this job
        return future, None, exc


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
