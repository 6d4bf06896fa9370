"""A writer keeps the order of its jobs, whoever does them, and leaves the loop alone once a job was slow."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from opendsec.edge import writer
from opendsec.edge.writer import WriterThread

pytestmark = pytest.mark.anyio


async def test_jobs_are_done_on_the_thread() -> None:
    async with WriterThread("test") as one:
        assert await one.run(threading.get_ident) != threading.get_ident()


async def test_at_once_a_job_is_done_where_it_is_given() -> None:
    async with WriterThread("test", at_once=True) as one:
        done = one.run(threading.get_ident)
        assert done.done()
        assert await done == threading.get_ident()


async def test_what_is_known_to_take_long_is_for_the_thread() -> None:
    async with WriterThread("test", at_once=True) as one:
        assert await one.run(threading.get_ident, long=True) != threading.get_ident()


async def test_at_once_a_failure_is_the_callers() -> None:
    def job() -> None:
        raise OSError(28, "no space")

    async with WriterThread("test", at_once=True) as one:
        with pytest.raises(OSError, match="no space"):
            await one.run(job)


async def test_after_a_slow_job_the_thread_does_all_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SLOW_S", -1.0)  # every job is slow
    async with WriterThread("test", at_once=True) as one:
        here = threading.get_ident()
        assert await one.run(threading.get_ident) == here
        assert await one.run(threading.get_ident) != here


async def test_it_comes_back_when_the_disk_is_quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SLOW_S", -1.0)
    monkeypatch.setattr(writer, "SLOW_FOR_S", 0.0)
    async with WriterThread("test", at_once=True) as one:
        for _ in range(3):
            assert await one.run(threading.get_ident) == threading.get_ident()


async def test_a_job_waits_for_those_the_thread_still_has() -> None:
    """When the disk is quick again while the thread has work, the order stays that in which jobs were given."""
    order: list[int] = []
    free = threading.Event()

    def first() -> None:
        assert free.wait(60)
        order.append(1)

    async with WriterThread("test", at_once=True) as one:
        one._at_once_from = math.inf
        waiting = one.run(first)
        one._at_once_from = 0.0
        behind = one.run(lambda: order.append(2))
        assert not behind.done()
        free.set()
        await asyncio.gather(waiting, behind)
        assert order == [1, 2]
        assert one.run(lambda: order.append(3)).done()
    assert order == [1, 2, 3]


async def test_leaving_waits_for_every_job() -> None:
    order: list[int] = []
    async with WriterThread("test") as one:
        for number in range(100):
            one.run(lambda number=number: order.append(number))  # type: ignore[misc]
    assert order == list(range(100))
