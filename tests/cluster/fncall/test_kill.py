"""kill -9 of an edge and of the apiserver in the middle of a batch: every index is told about once, and rightly."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.fncall.processes import Cluster, cluster

import opendsec
from opendsec.errors import OpenDSecError

pytestmark = pytest.mark.anyio
CALLS = 600


@pytest.fixture
async def running() -> AsyncIterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="ods-") as folder:
        async with cluster(Path(folder), "a", "b") as made:
            yield made


def calls() -> list[opendsec.DSecFnCallArgs]:
    return [
        opendsec.DSecFnCallArgs(language="sh", code=f"sleep 0.02; echo {index}; exit {index % 7}")
        for index in range(CALLS)
    ]


def check(index: int, outcome: opendsec.FnCallResult | OpenDSecError) -> None:
    assert isinstance(outcome, opendsec.FnCallResult), outcome
    assert outcome.run is not None
    assert (outcome.stdout, outcome.run.exit_code) == (f"{index}\n", index % 7)


async def test_an_edge_s_calls_go_to_the_other(running: Cluster) -> None:
    told: list[int] = []
    async with opendsec.DSecClient(running.apiserver.url, running.apiserver.key) as client, asyncio.timeout(60):
        async for index, outcome in client.fncall_many(calls()):
            check(index, outcome)
            told.append(index)
            if len(told) == CALLS // 4:
                running.edges["a"].kill()
        assert sorted(told) == list(range(CALLS))
        for _ in range(5):
            assert (await client.fncall(opendsec.DSecFnCallArgs(language="sh", code="echo x"))).stdout == "x\n"
        await running.edges["a"].start()
    await killed_again_and_again(running)


async def killed_again_and_again(running: Cluster) -> None:
    stop = asyncio.Event()

    async def unrest() -> None:
        for name in ("a", "b"):
            await asyncio.sleep(0.4)
            running.edges[name].kill()
            await running.edges[name].start()
        stop.set()

    async with opendsec.DSecClient(running.apiserver.url, running.apiserver.key) as client, asyncio.timeout(60):
        task = asyncio.create_task(unrest())
        rounds = 0
        while not stop.is_set():
            told = []
            async for index, outcome in client.fncall_many(calls()):
                check(index, outcome)
                told.append(index)
            assert sorted(told) == list(range(CALLS))
            rounds += 1
        await task
    assert rounds


async def test_the_apiserver_s_calls_are_asked_for_again(running: Cluster) -> None:
    told: list[int] = []
    restarting: asyncio.Task[None] | None = None
    async with opendsec.DSecClient(running.apiserver.url, running.apiserver.key) as client, asyncio.timeout(60):
        async for index, outcome in client.fncall_many(calls()):
            check(index, outcome)
            told.append(index)
            if len(told) == CALLS // 4:
                running.apiserver.kill()
                restarting = asyncio.create_task(running.apiserver.start())
        assert restarting is not None
        await restarting
        assert sorted(told) == list(range(CALLS))
        single = asyncio.create_task(
            client.fncall(opendsec.DSecFnCallArgs(language="sh", code="sleep 0.5; echo again"))
        )
        await asyncio.sleep(0.2)
        running.apiserver.kill()
        await running.apiserver.start()
        assert (await single).stdout == "again\n"
    await stopped_early(running)


async def stopped_early(running: Cluster) -> None:
    """Whoever stops iterating ends what runs; the rest is not begun."""
    endless = [opendsec.DSecFnCallArgs(language="sh", code="echo first" if n == 0 else "sleep 20") for n in range(300)]
    async with opendsec.DSecClient(running.apiserver.url, running.apiserver.key) as client, asyncio.timeout(30):
        outcomes = client.fncall_many(endless)
        index, outcome = await anext(outcomes)
        assert index == 0
        assert isinstance(outcome, opendsec.FnCallResult)
        await outcomes.aclose()
        while True:
            reports = [(await edge.client.get("/v1/node")).json() for edge in running.edges.values()]
            if not any(report["backends"]["fncall"]["live"] for report in reports):
                break
            await asyncio.sleep(0.02)
