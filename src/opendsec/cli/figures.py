"""Latencies as people read them: median, tail, worst; milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """What a row of the table says about one kind of operation."""

    what: str
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    def cells(self) -> tuple[str, ...]:
        """The row."""
        numbers = (self.p50_ms, self.p90_ms, self.p99_ms, self.max_ms)
        return self.what, str(self.count), *(f"{number:.1f}" for number in numbers)


COLUMNS = ("", "N", "p50 ms", "p90 ms", "p99 ms", "max ms")


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that a `share` (above 0, up to 1) of all does not exceed."""
    return sorted_values[max(math.ceil(share * len(sorted_values)), 1) - 1]


def latency(what: str, seconds: Sequence[float]) -> Latency:
    """Seconds as measured → a row. Raises ValueError when nothing was measured."""
    if not seconds:
        raise ValueError(f"nothing was measured for {what!r}")
    ordered = sorted(value * 1000 for value in seconds)
    return Latency(
        what=what,
        count=len(ordered),
        p50_ms=percentile(ordered, 0.50),
        p90_ms=percentile(ordered, 0.90),
        p99_ms=percentile(ordered, 0.99),
        max_ms=ordered[-1],
    )
