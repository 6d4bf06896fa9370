"""The clock of a run: ends it when it has used its time, on the wall or on processors, all its processes together.

Processor time is the control group's, so nothing hides from it. A look is due no earlier than the limit can be reached
with every processor busy; short runs are never looked at.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

SHORTEST_S = 0.004
_PROCESSORS = os.cpu_count() or 1


class Watch:
    """`with Watch(...) as watch`: until the block is left, `end` is called once when a limit is passed."""

    def __init__(self, *, cpu_s: Callable[[], float], cpu_limit_s: float, wall_limit_s: float) -> None:
        self._cpu = cpu_s
        self._cpu_limit_s = cpu_limit_s
        self._wall_limit_s = wall_limit_s
        self._processors = _PROCESSORS
        self._end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False
        """A limit was passed."""
        self.wall_s = 0.0
        self.cpu_s = 0.0
        """Both complete when the block has been left."""

    def __call__(self, end: Callable[[], None]) -> Self:
        self._end = end
        return self

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._begin = time.monotonic()
        self._cpu_begin = self._cpu()
        self._due_in(min(self._wall_limit_s, self._cpu_limit_s / self._processors))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """The run has ended: what it used is what was used until now. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.wall_s = time.monotonic() - self._begin
            self.cpu_s = max(0.0, self._cpu() - self._cpu_begin)
            self.is_over = self.is_over or self.cpu_s > self._cpu_limit_s

    def _due_in(self, seconds: float) -> None:
        self._timer = self._loop.call_later(max(SHORTEST_S, seconds), self._look)

    def _look(self) -> None:
        wall = self._wall_limit_s - (time.monotonic() - self._begin)
        cpu = self._cpu_limit_s - (self._cpu() - self._cpu_begin)
        if wall <= 0 or cpu <= 0:
            self.is_over = True
            self._end()
            return
        self._due_in(min(wall, cpu / self._processors))
