"""Deadlines of many things in one heap: no task and no timer per thing.

A thing that is used again and again does not touch the heap: its entry is looked at when it is due, and put back if
its deadline has moved.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MOST_VOID = 1000


class Timed(Protocol):
    armed_at: float | None
    """Owned by Timers: when the earliest entry of this thing is due."""


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """`deadline(thing)`: monotonic seconds, or None. `due(thing)` is called when it has passed."""

    def __init__(self, deadline: Callable[[T], float | None], due: Callable[[T], None]) -> None:
        self._deadline = deadline
        self._due = due
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()
        self._void = 0
        """Entries that mean nothing any more: their thing was put in again earlier, or dropped."""
        self._earlier = asyncio.Event()

    def look(self, thing: T) -> None:
        """Its deadline may be earlier than before."""
        at = self._deadline(thing)
        if at is None or (thing.armed_at is not None and thing.armed_at <= at):
            return
        self._void += thing.armed_at is not None
        thing.armed_at = at
        heapq.heappush(self._heap, (at, next(self._order), thing))
        if self._heap[0][2] is thing:
            self._earlier.set()

    def drop(self, thing: T) -> None:
        """It is gone: the heap, where its time may be days away, need not hold it."""
        self._void += thing.armed_at is not None
        thing.armed_at = None
        if self._void > max(MOST_VOID, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].armed_at == entry[0]]
            heapq.heapify(self._heap)
            self._void = 0

    def run_due(self, now: float) -> None:
        """Everything whose time has come."""
        popped = []
        while self._heap and self._heap[0][0] <= now:
            at, _, thing = heapq.heappop(self._heap)
            if thing.armed_at == at:
                thing.armed_at = None
                popped.append(thing)
            else:
                self._void = max(0, self._void - 1)
        for thing in popped:
            deadline = self._deadline(thing)
            if deadline is not None and deadline <= now:
                self._due(thing)
            self.look(thing)

    async def run(self) -> None:
        """For ever."""
        while True:
            self._earlier.clear()
            now = time.monotonic()
            self.run_due(now)
            wait = None if not self._heap else max(0.0, self._heap[0][0] - now)
            try:
                async with asyncio.timeout(wait):
                    await self._earlier.wait()
            except TimeoutError:
                continue
