"""What a batch of calls may hold in memory, and what is wrong with one said where it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from opendsec.edge.fncall_routes import UNSENT_BYTES, Budget, most_written
from opendsec.model.fncall import Case, FnCallSpec, TaskType

pytestmark = pytest.mark.anyio
SCRIPT = FnCallSpec(code="1")


def test_what_a_call_may_write() -> None:
    assert most_written(SCRIPT) == 2 * 1024 * 1024
    assert UNSENT_BYTES // most_written(SCRIPT) == 16
    judged = replace(SCRIPT, task_type=TaskType.JUDGE, cases=(Case(),) * 100)
    assert most_written(judged) == 2 * 4096 * 100
    assert most_written(replace(SCRIPT, fetch=("a",))) > most_written(SCRIPT)


async def test_first_come_first_served_within_the_budget() -> None:
    budget = Budget(10)
    order: list[str] = []

    async def take(name: str, wanted: int) -> None:
        taken = await budget.take(wanted)
        assert taken == min(wanted, 10)
        order.append(name)

    await take("a", 6)
    async with asyncio.TaskGroup() as group:
        group.create_task(take("large", 100))
        gone = group.create_task(take("gone", 3))
        group.create_task(take("small", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["a"]  # the small one does not overtake
        gone.cancel()
        await asyncio.sleep(0)
        budget.give_back(6)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["a", "large"]
        budget.give_back(10)
    assert order == ["a", "large", "small"]
