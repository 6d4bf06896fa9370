"""One thread that does small blocking writes in order, so that a slow disk never blocks the event loop.

Jobs run in the order they were given. What has gathered while the thread was busy is done in one go and answered
with one wake-up of the loop (group commit). Nothing here calls fsync: a journal must survive the death of the edge,
and bytes handed to the kernel do. A reboot ends every sandbox of the node, so a journal that lost its tail to a
power cut has nothing to say that is still true.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_Job = tuple[asyncio.Future[Any], Callable[[], Any]]
_Outcome = tuple[asyncio.Future[Any], Any, BaseException | None]


class WriterThread:
    """`async with WriterThread("journal") as writer: await writer.run(job)`. Leaving waits for every job given
    before.
    """

    def __init__(self, name: str) -> None:
        self._name = name
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

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job now; the future has what it returned or raised. The job runs even if nobody waits any more."""
        assert self._loop is not None, "the writer has not been entered"
        future: asyncio.Future[T] = self._loop.create_future()
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
            self._loop.call_soon_threadsafe(_deliver, [_attempt(job) for job in batch])


def _attempt(entry: _Job) -> _Outcome:
    future, job = entry
    try:
        return future, job(), None
    except Exception as exc:  # noqa: BLE001 - delivered to whoever waits for this job
        return future, None, exc


def _deliver(outcomes: list[_Outcome]) -> None:
    for future, value, error in outcomes:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
