"""Which container a call runs in: pools that grow with demand, keep what is warm, and share fairly.

A group (project, image, imports, GPU) has containers of its own; none ever goes from one group to another. While there
is room a waiting call gets a new container; when there is none, a group with more than its share gives one up whenever
one of its calls ends. Containers nobody has needed for a while are ended, and each after so many calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from opendsec.errors import CapacityError, NodeError, OpenDSecError
from opendsec.fncall.member import Group, Member

log = logging.getLogger(__name__)

Start = Callable[[Group], Awaitable[Member]]
End = Callable[[Member], Awaitable[None]]


HUNGER_S = 2.0
"""A group without any container that has waited so long gets the next one that is free, whoever had it."""


class _Line:
    """Of one group: who waits, what is idle, how many there are."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[Member]] = deque()
        self.idle: list[Member] = []
        self.live = 0
        """Idle, busy and starting."""
        self.starting = 0
        self.waits_since = 0.0
        """The call that has waited longest came after this."""

    @property
    def demand(self) -> int:
        return len(self.waiting)

    @property
    def is_over(self) -> bool:
        return not self.live and not self.waiting


class Pools:
    """`start` and `end` make and end a container; `most` at once, `queue` calls wait."""

    def __init__(self, start: Start, end: End, *, most: int, queue: int, idle_s: float, calls: int) -> None:
        self._start = start
        self._end = end
        self._most = most
        self._queue = queue
        self._idle_s = idle_s
        self._calls = calls
        self._lines: dict[Group, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._live = 0
        self._waiting = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.busy = 0
        """Calls that have a container."""

    @property
    def waiting(self) -> int:
        """Calls that have none yet."""
        return self._waiting

    @property
    def live(self) -> int:
        """Containers, those that start or end among them."""
        return self._live

    def members(self) -> dict[Group, int]:
        """How many each group has."""
        return {group: line.live for group, line in self._lines.items() if line.live}

    async def close(self) -> None:
        """End all of them. Calls that wait are refused."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for line in self._lines.values():
            for future in line.waiting:
                if not future.done():
                    future.set_exception(CapacityError("this edge is stopping"))
            while line.idle:
                self._retire(line, line.idle.pop())
        while self._tasks:
            await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def member(self, group: Group) -> AsyncIterator[Member]:
        """A container of this group for one call. Raises CapacityError, and whatever `start` raises."""
        member = await self._take(group)
        self.busy += 1
        try:
            yield member
        finally:
            self.busy -= 1
            self._give_back(member)

    # In and out

    async def _take(self, group: Group) -> Member:
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = _Line()
        if line.idle and not line.waiting:
            return line.idle.pop()
        if self._closed or self._waiting >= self._queue:
            self._drop_if_over(group, line)
            raise CapacityError(
                "this edge is stopping" if self._closed else f"{self._waiting} calls wait already",
                detail={"waiting": self._waiting},
            )
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        if not line.demand:
            line.waits_since = time.monotonic()
        line.waiting.append(future)
        self._waiting += 1
        self._grow(group, line)
        try:
            return await future
        except asyncio.CancelledError:
            with suppress(ValueError):
                line.waiting.remove(future)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise
        finally:
            self._waiting -= 1
            self._drop_if_over(group, line)

    def _give_back(self, member: Member) -> None:
        line = self._lines[member.group]
        member.calls += 1
        if self._closed or member.doubt or member.calls >= self._calls or self._is_owed(line, member):
            if member.doubt:
                log.info("fncall_container_given_up", extra={"fields": {"name": member.name, "reason": member.doubt}})
            self._retire(line, member)
            return
        if self._hand_over(line, member):
            return
        member.idle_since = time.monotonic()
        line.idle.append(member)
        self._plan_sweep()

    def _hand_over(self, line: _Line, member: Member) -> bool:
        while line.waiting:
            future = line.waiting.popleft()
            if not future.done():
                future.set_result(member)
                return True
        return False

    def _is_owed(self, line: _Line, member: Member) -> bool:
        """Whether another group waits without its share while this one has more than its own."""
        if self._is_owed_gpu(line, member):
            return True
        if self._live < self._most:
            return False
        wanting = [each for each in self._lines.values() if each.demand and each is not line]
        if not wanting:
            return False
        now = time.monotonic()
        if any(not each.live and now - each.waits_since > HUNGER_S for each in wanting):
            return True
        share = max(1, self._most // (len(wanting) + 1))
        return any(each.live < share for each in wanting) and (line.live > share or not line.demand)

    # Growing and shrinking

    def _grow(self, group: Group, line: _Line) -> None:
        if self._closed or line.starting >= line.demand:
            return
        if self._live >= self._most and not self._make_room(line):
            return
        self._live += 1
        line.live += 1
        line.starting += 1
        self._spawn(self._begin(group, line))

    def _make_room(self, line: _Line) -> bool:
        """The idle one of another group that was used longest ago goes; its successor starts when it is gone."""
        others = [each for each in self._lines.values() if each is not line and each.idle]
        if others:
            oldest = min(others, key=lambda each: each.idle[0].idle_since)
            self._retire(oldest, oldest.idle.pop(0))
        return False

    async def _begin(self, group: Group, line: _Line) -> None:
        try:
            member = await self._start(group)
        except OpenDSecError as error:
            self._start_failed(group, line, error)
            return
        except Exception as error:
            log.exception("fncall_start_failed")
            self._start_failed(group, line, NodeError(f"a container for calls could not be made: {error}"))
            return
        line.starting -= 1
        if self._closed:
            self._retire(line, member)
        elif not self._hand_over(line, member):
            member.idle_since = time.monotonic()
            line.idle.append(member)
            self._plan_sweep()
        else:
            self._grow(group, line)

    def _start_failed(self, group: Group, line: _Line, error: OpenDSecError) -> None:
        """Whoever waits longest hears of it; for the others it is tried again."""
        line.starting -= 1
        line.live -= 1
        self._live -= 1
        if group.gpu and isinstance(error, CapacityError) and self._waits_for_gpu(line):
            return
        while line.waiting:
            future = line.waiting.popleft()
            if not future.done():
                future.set_exception(error)
                break
        self._grow_all()
        self._drop_if_over(group, line)

    def _waits_for_gpu(self, line: _Line) -> bool:
        """Whether a GPU will come free for this group: one of its own containers has one, or another group's, which
        gives it up now if it is idle, else when its call ends (`_is_owed_gpu`).
        """
        if line.live:
            return True
        others = [each for group, each in self._lines.items() if group.gpu and each is not line and each.live]
        idle = [each for each in others if each.idle]
        if idle:
            oldest = min(idle, key=lambda each: each.idle[0].idle_since)
            self._retire(oldest, oldest.idle.pop(0))
        return bool(others)

    def _is_owed_gpu(self, line: _Line, member: Member) -> bool:
        """Whether another group waits that has no container because GPUs are held."""
        if not member.group.gpu:
            return False
        return any(
            group.gpu and each.demand and not each.live for group, each in self._lines.items() if each is not line
        )

    def _retire(self, line: _Line, member: Member) -> None:
        self._spawn(self._ended(line, member))

    async def _ended(self, line: _Line, member: Member) -> None:
        try:
            await self._end(member)
        finally:
            line.live -= 1
            self._live -= 1
            self._grow_all()
            self._drop_if_over(member.group, line)

    def _grow_all(self) -> None:
        """Room was made: those with the fewest containers first."""
        for group, line in sorted(self._lines.items(), key=lambda item: item[1].live):
            self._grow(group, line)

    def _drop_if_over(self, group: Group, line: _Line) -> None:
        if line.is_over and self._lines.get(group) is line:
            del self._lines[group]

    def _plan_sweep(self) -> None:
        if self._sweep is None and not self._closed:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        self._sweep = None
        now = time.monotonic()
        for line in list(self._lines.values()):
            while line.idle and now - line.idle[0].idle_since >= self._idle_s:
                self._retire(line, line.idle.pop(0))
        if any(line.idle for line in self._lines.values()):
            self._plan_sweep()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
