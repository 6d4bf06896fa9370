"""A create that is asked for again: by a caller that was cut off, after a failed start, after a killed edge."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.edge.edges import created, dummy_spec, edge, run, until

from opendsec.backends.base import Running, StartPlan
from opendsec.backends.dummy import DummyBackend
from opendsec.edge.node import Node
from opendsec.errors import StartError
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.node import SandboxState

pytestmark = pytest.mark.anyio


class SlowStart(DummyBackend):
    """The first start hangs, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    async def start(self, plan: StartPlan) -> Running:
        self.begun += 1
        if self.begun == 1:
            await asyncio.Event().wait()
        return await super().start(plan)


class FailingOnce(DummyBackend):
    """The first start fails."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    async def start(self, plan: StartPlan) -> Running:
        self.begun += 1
        if self.begun == 1:
            raise StartError("not this time")
        return await super().start(plan)


async def cut_off(node: Node, sandbox_id: SandboxId, turns: int) -> None:
    """A create whose caller leaves after so many turns of the loop."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(node.create(dummy_spec(), project="default", sandbox_id=sandbox_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_caller_that_was_cut_off_gets_its_sandbox_when_it_asks_again(tmp_path: Path, turns: int) -> None:
    async with edge(tmp_path) as node:
        sandbox_id = new_sandbox_id("local")
        await cut_off(node, sandbox_id, turns)
        sandbox = await created(node, dummy_spec(), sandbox_id=sandbox_id)
        assert (await run(sandbox, "true")).exit_code == 0
        assert node.report().live == 1


async def test_what_has_begun_goes_on_without_its_caller(tmp_path: Path) -> None:
    async with edge(tmp_path) as node:
        sandbox_id = new_sandbox_id("local")
        turns = 0
        while not node.all(project=None):  # cut off at the first moment at which something has begun
            turns += 1
            await cut_off(node, sandbox_id, turns)
        await until(lambda: node.get(sandbox_id, project=None).state is SandboxState.RUNNING)


async def test_a_start_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    async with edge(tmp_path, FailingOnce()) as node:
        sandbox_id = new_sandbox_id("local")
        with pytest.raises(StartError, match="not this time"):
            await created(node, dummy_spec(), sandbox_id=sandbox_id)
        both = await asyncio.gather(*(created(node, dummy_spec(), sandbox_id=sandbox_id) for _ in range(2)))
        assert both[0] is both[1]
        assert (await run(both[0], "true")).exit_code == 0
        assert node.report().live == 1


async def test_what_an_edge_was_starting_when_it_was_killed_is_started_by_the_next(tmp_path: Path) -> None:
    backend = SlowStart()
    sandbox_id = new_sandbox_id("local")
    async with edge(tmp_path, backend) as node:
        await node.create(dummy_spec(), project="default", sandbox_id=sandbox_id)
        await until(lambda: backend.begun == 1)
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node, dummy_spec(), sandbox_id=sandbox_id)
        assert (await run(sandbox, "true")).exit_code == 0
    async with edge(tmp_path, backend) as node:
        assert node.get(sandbox_id, project=None).state is SandboxState.RUNNING
