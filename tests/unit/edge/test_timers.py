"""Many deadlines, one heap."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from tests.unit.edge.edges import until

from opendsec.edge.timers import MOST_VOID, Timers

pytestmark = pytest.mark.anyio


@dataclass(eq=False)
class Thing:
    at: float | None
    armed_at: float | None = None
    fired: list[float] = field(default_factory=list)


def timers() -> Timers[Thing]:
    def fire(thing: Thing) -> None:
        thing.fired.append(thing.at or 0.0)
        thing.at = None

    return Timers(lambda thing: thing.at, fire)


def test_due_things_fire_once_and_others_wait() -> None:
    heap, early, late = timers(), Thing(1.0), Thing(5.0)
    for thing in (late, early):
        heap.look(thing)
    heap.run_due(2.0)
    heap.run_due(3.0)
    assert (early.fired, late.fired) == ([1.0], [])
    heap.run_due(5.0)
    assert late.fired == [5.0]


def test_a_moved_deadline_does_not_fire_early_nor_grow_the_heap() -> None:
    heap, thing = timers(), Thing(1.0)
    for at in range(1, 1000):
        thing.at = float(at)
        heap.look(thing)
    assert len(heap._heap) == 1
    heap.run_due(998.0)
    assert thing.fired == []
    heap.run_due(999.0)
    assert thing.fired == [999.0]


def test_an_earlier_deadline_counts() -> None:
    heap, thing = timers(), Thing(100.0)
    heap.look(thing)
    thing.at = 1.0
    heap.look(thing)
    heap.run_due(1.0)
    heap.run_due(100.0)
    assert thing.fired == [1.0]


def test_what_is_gone_is_not_held_until_its_time_comes() -> None:
    heap, kept = timers(), Thing(50.0)
    heap.look(kept)
    for _ in range(5 * MOST_VOID):
        gone = Thing(1e9)
        heap.look(gone)
        heap.drop(gone)
        assert len(heap._heap) <= MOST_VOID + 2
    heap.run_due(50.0)
    assert kept.fired == [50.0]


def test_what_stays_due_does_not_hang_the_loop() -> None:
    heap: Timers[Thing] = Timers(lambda thing: thing.at, lambda thing: thing.fired.append(0.0))
    thing = Thing(1.0)
    heap.look(thing)
    heap.run_due(2.0)
    assert thing.fired == [0.0]


async def test_running_wakes_for_an_earlier_deadline() -> None:
    heap, late, early = timers(), Thing(time.monotonic() + 1000), Thing(time.monotonic() + 0.02)
    heap.look(late)
    running = asyncio.ensure_future(heap.run())
    await asyncio.sleep(0)
    heap.look(early)
    await until(lambda: bool(early.fired))
    running.cancel()
    await asyncio.wait({running})
    assert late.fired == []
