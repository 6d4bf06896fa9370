"""Pools, with containers that are only names: who gets one, who waits, what is ended, and that nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendsec.errors import CapacityError, StartError
from opendsec.fncall.member import Group, Member
from opendsec.fncall.pool import Pools

pytestmark = pytest.mark.anyio

A, B, C = (Group(project, "sha256:1", None) for project in "abc")


class Containers:
    """Makes and ends names."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.made = 0
        self.most = 0
        self.fail: Exception | None = None

    async def start(self, group: Group) -> Member:
        self.made += 1
        name = f"{group.project}-{self.made}"
        self.live.add(name)
        self.most = max(self.most, len(self.live))
        await asyncio.sleep(0)
        if self.fail is not None:
            self.live.remove(name)
            raise self.fail
        return cast("Member", SimpleNamespace(name=name, group=group, calls=0, idle_since=0.0, doubt=""))

    async def end(self, member: Member) -> None:
        await asyncio.sleep(0)
        self.live.remove(member.name)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., tuple[Pools, Containers]]]:
    made: list[tuple[Pools, Containers]] = []

    def make(**changes: Any) -> tuple[Pools, Containers]:
        containers = Containers()
        settings = {"most": 2, "queue": 100, "idle_s": 60.0, "calls": 1000} | changes
        made.append((Pools(containers.start, containers.end, **settings), containers))
        return made[-1]

    yield make
    for pools, containers in made:
        await pools.close()
        assert containers.live == set()
        assert (pools.live, pools.busy, pools.waiting) == (0, 0, 0)


async def use(pools: Pools, group: Group, *, turns: int = 1) -> str:
    async with pools.member(group) as member:
        assert member.group == group
        for _ in range(turns):
            await asyncio.sleep(0)
        return member.name


async def test_what_is_warm_is_used_again(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make()
    assert [await use(pools, A) for _ in range(5)] == ["a-1"] * 5
    assert containers.made == 1


async def test_it_grows_with_demand_and_no_further(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make(most=3)
    await asyncio.gather(*(use(pools, A, turns=3) for _ in range(20)))
    assert containers.made == 3
    await asyncio.gather(*(use(pools, A, turns=3) for _ in range(2)))
    assert containers.made == 3


async def test_doubt_and_age_end_a_container(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make(calls=2)
    async with pools.member(A) as member:
        member.doubt = "something"
    assert await use(pools, A) == "a-2"
    assert await use(pools, A) == "a-2"
    assert await use(pools, A) == "a-3"
    assert containers.live == {"a-3"}


async def test_a_group_never_gets_anothers(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make(most=1)
    for group in (A, B, A, C):
        await use(pools, group)
    assert containers.made == 4
    assert containers.most == 1


async def test_a_long_queue_of_one_does_not_keep_another_out(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, _ = make(most=2, queue=10_000)
    ended: list[str] = []

    async def one(group: Group) -> None:
        await use(pools, group, turns=2)
        ended.append(group.project)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(500):
            tasks.create_task(one(A))
        await asyncio.sleep(0)
        tasks.create_task(one(B))
    assert ended.index("b") < 50


async def test_a_full_queue_refuses(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, _ = make(most=1, queue=2)
    async with pools.member(A):
        waiting = [asyncio.ensure_future(use(pools, group)) for group in (A, B)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await use(pools, A)
    await asyncio.gather(*waiting)


async def test_a_start_that_fails_is_told_to_one_and_tried_again(
    make: Callable[..., tuple[Pools, Containers]],
) -> None:
    pools, containers = make(most=1)
    containers.fail = StartError("no")
    with pytest.raises(StartError):
        await use(pools, A)
    assert pools.members() == {}
    containers.fail = None
    assert await use(pools, A) == "a-2"


async def test_whoever_leaves_the_queue_takes_nothing_along(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make(most=1)
    async with pools.member(A):
        leaving = asyncio.ensure_future(use(pools, A))
        staying = asyncio.ensure_future(use(pools, A))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert pools.waiting == 1
    assert await staying == "a-1"
    assert containers.made == 1


async def test_idle_ones_end(make: Callable[..., tuple[Pools, Containers]]) -> None:
    pools, containers = make(idle_s=0.01)
    await use(pools, A)
    async with asyncio.timeout(30):
        while containers.live:
            await asyncio.sleep(0.005)
    assert pools.members() == {}


async def test_closing_refuses_who_waits_and_waits_for_who_runs(
    make: Callable[..., tuple[Pools, Containers]],
) -> None:
    pools, containers = make(most=1)
    async with pools.member(A):
        waiting = asyncio.ensure_future(use(pools, B))
        await asyncio.sleep(0)
        await pools.close()
        with pytest.raises(CapacityError):
            await waiting
        with pytest.raises(CapacityError):
            await use(pools, A)
    await pools.close()
    assert containers.live == set()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_every_call_ends_and_nothing_stays(
    make: Callable[..., tuple[Pools, Containers]], seed: int
) -> None:
    chance = random.Random(seed)
    pools, containers = make(most=chance.randint(1, 4), queue=1000, calls=chance.randint(1, 5))
    outcomes: list[str] = []

    async def one() -> None:
        for _ in range(chance.randint(0, 20)):
            await asyncio.sleep(0)
        containers.fail = StartError("no") if chance.random() < 0.1 else None
        try:
            async with pools.member(chance.choice((A, B, C))) as member:
                for _ in range(chance.randint(0, 5)):
                    await asyncio.sleep(0)
                if chance.random() < 0.1:
                    member.doubt = "by chance"
            outcomes.append("done")
        except StartError:
            outcomes.append("failed")
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    tasks = [asyncio.ensure_future(one()) for _ in range(60)]
    for task in chance.sample(tasks, 10):
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        task.cancel()
    containers.fail = None
    async with asyncio.timeout(60):
        await asyncio.wait(tasks)
    assert containers.most <= 4
    assert len(outcomes) >= 50
