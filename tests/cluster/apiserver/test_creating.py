"""Creates happen once: with a key, across repeats, races and kill -9; what nobody was told about goes away again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.apiserver.conftest import TOKEN, Start, client_for, edge_process, seed, settings_for

from opendsec.apiserver import reclaim

pytestmark = pytest.mark.anyio

SPEC: dict[str, Any] = {"spec": {"image": "debian"}}
KEY = {"Idempotency-Key": "one-and-only"}


async def until(check: Callable[[], Any], *, timeout_s: float = 10.0) -> None:
    """Return when `check` is true."""
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


async def lines_of(client: httpx.AsyncClient, body: Any, headers: dict[str, str] | None = None) -> list[Any]:
    """A whole batch answer."""
    answer = await client.post("/v1/sandbox-batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"]
    assert not any(line["done"] for line in lines[:-1])
    return lines[:-1]


async def test_one_key_starts_one_sandbox_however_often_and_at_once(start: Start) -> None:
    async with start("a", "b") as platform:
        for double in platform.edges.values():
            double.start_s = 0.05
        asked = [platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY) for _ in range(20)]
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.json()["sandbox_id"] for answer in answers}) == 1
        assert sum(len(double.starts) for double in platform.edges.values()) == 1
        reordered = {"sandbox_id": None, **SPEC}
        again = await platform.client.post("/v1/sandboxes", json=reordered, headers=KEY)
        assert again.json()["sandbox_id"] == answers[0].json()["sandbox_id"]


async def test_one_key_with_another_body_is_a_conflict_and_other_projects_have_their_own(start: Start) -> None:
    async with start("local") as platform:
        first = await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)
        other = {"spec": {"image": "debian", "labels": {"a": "b"}}}
        answer = await platform.client.post("/v1/sandboxes", json=other, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        foreign = await platform.client.post(
            "/v1/sandboxes", json=SPEC, headers={**KEY, **platform.as_project("other")}
        )
        assert foreign.json()["sandbox_id"] != first.json()["sandbox_id"]


async def test_a_failed_create_frees_its_key(start: Start) -> None:
    async with start("local") as platform:
        platform.edges["local"].capacity = 0
        full = await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)
        assert full.json()["error"]["code"] == "unschedulable"
        platform.edges["local"].capacity = 1
        assert (await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)).status_code == 201


async def test_a_key_whose_sandbox_is_forgotten_starts_no_second_one(start: Start) -> None:
    async with start("local") as platform:
        await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)
        platform.edges["local"].sandboxes.clear()
        answer = await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "sandbox_exited")
        assert len(platform.edges["local"].starts) == 1


async def test_a_batch_whose_sandboxes_are_forgotten_starts_no_second_ones(start: Start) -> None:
    async with start("a", "b") as platform:
        platform.edges["a"].capacity = 3
        body = {**SPEC, "count": 20}
        first = await lines_of(platform.client, body, KEY)
        assert [line["error"] for line in first] == [None] * 20
        begun = sum(len(double.starts) for double in platform.edges.values())
        for double in platform.edges.values():
            double.sandboxes.clear()
            double.capacity = 1000
        again = await lines_of(platform.client, body, KEY)
        assert {line["error"]["code"] for line in again} == {"sandbox_exited"}
        assert sum(len(double.starts) for double in platform.edges.values()) == begun


async def test_a_client_that_leaves_without_a_key_leaves_no_sandbox(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "RETRY_S", 0.05)
    async with start("local") as platform:
        double = platform.edges["local"]
        double.start_s = 0.3
        with pytest.raises(httpx.ReadTimeout):
            await platform.client.post("/v1/sandboxes", json=SPEC, timeout=0.1)
        await until(lambda: double.starts)
        await until(lambda: double.live == 0)
        with pytest.raises(httpx.ReadTimeout):
            await platform.client.post("/v1/sandboxes", json=SPEC, timeout=0.1, headers=KEY)
        await until(lambda: len(double.starts) == 2)
        again = await platform.client.post("/v1/sandboxes", json=SPEC, headers=KEY)
        assert again.json()["sandbox_id"] == double.starts[-1]
        assert len(double.starts) == 2


async def test_a_removal_that_never_ends_keeps_no_other_waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "RETRY_S", 0.05)
    monkeypatch.setattr(reclaim, "DELETE_S", 0.1)
    async with start("local") as platform:
        double = platform.edges["local"]
        double.start_s = 0.3
        for live in (1, 2):
            with pytest.raises(httpx.ReadTimeout):
                await platform.client.post("/v1/sandboxes", json=SPEC, timeout=0.1)
            if live == 1:
                await until(lambda: double.starts)
                double.stuck = double.starts[0]
        await until(lambda: len(double.starts) == 2 and double.live == 1)
        assert double.sandboxes[double.starts[0]].state == "running"


async def test_a_batch_is_split_and_every_index_is_told_once(start: Start) -> None:
    async with start("a", "b", "c") as platform:
        platform.edges["c"].capacity = 5
        lines = await lines_of(platform.client, {**SPEC, "count": 90})
        assert sorted(line["index"] for line in lines) == list(range(90))
        assert all(line["error"] is None for line in lines)
        assert platform.edges["c"].live == 5
        assert sum(double.live for double in platform.edges.values()) == 90
        assert len({line["status"]["sandbox_id"] for line in lines}) == 90


async def test_a_batch_that_is_too_large_for_all_edges_fails_in_part_and_typed(start: Start) -> None:
    async with start("a", "b") as platform:
        for double in platform.edges.values():
            double.capacity = 10
        lines = await lines_of(platform.client, {**SPEC, "count": 30})
        failed = [line["error"] for line in lines if line["error"]]
        assert len(failed) == 10
        assert {(error["code"], error["retryable"]) for error in failed} == {("unschedulable", True)}


async def test_an_edge_that_is_away_costs_no_sandbox(start: Start) -> None:
    async with start("a", "b", patience_s=0.2, away=frozenset({"b"})) as platform:
        lines = await lines_of(platform.client, {**SPEC, "count": 20})
        assert all(line["error"] is None for line in lines)
        assert platform.edges["a"].live == 20
        made = [await platform.client.post("/v1/sandboxes", json=SPEC) for _ in range(5)]
        assert {answer.status_code for answer in made} == {201}


async def test_with_every_edge_away_each_index_fails_typed(start: Start) -> None:
    async with start("a", "b", patience_s=0.2, away=frozenset({"a", "b"})) as platform:
        lines = await lines_of(platform.client, {**SPEC, "count": 20})
        assert sorted(line["index"] for line in lines) == list(range(20))
        assert {(line["error"]["code"], line["error"]["retryable"]) for line in lines} == {("unschedulable", True)}


async def test_a_wrong_batch_is_refused_before_it_starts(start: Start) -> None:
    async with start("local") as platform:
        for body, field in (
            ({**SPEC, "count": 0}, "count"),
            ({**SPEC, "count": 32_769}, "count"),
            ({**SPEC, "count": "5"}, "count"),
            (SPEC, "count"),
            ({**SPEC, "count": 1, "sandbox_ids": ["sbx-local-aaaaaaaaaaaaaaaa"]}, "sandbox_ids"),
            ({"spec": {"image": ""}, "count": 1}, "image"),
        ):
            answer = await platform.client.post("/v1/sandbox-batches", json=body)
            assert (answer.status_code, answer.json()["error"]["detail"]["field"]) == (422, field)
        assert platform.edges["local"].starts == []


async def test_the_largest_batch(start: Start) -> None:
    async with start("local") as platform:
        lines = await lines_of(platform.client, {**SPEC, "count": 32_768})
        assert len(lines) == platform.edges["local"].live == 32_768


async def test_a_batch_with_a_key_is_told_again_and_starts_nothing_more(start: Start) -> None:
    async with start("a", "b") as platform:
        body = {**SPEC, "count": 40}
        first = await lines_of(platform.client, body, KEY)
        again = await lines_of(platform.client, body, KEY)
        ids = {line["index"]: line["status"]["sandbox_id"] for line in first}
        assert ids == {line["index"]: line["status"]["sandbox_id"] for line in again}
        assert sum(len(double.starts) for double in platform.edges.values()) == 40
        other = await platform.client.post("/v1/sandbox-batches", json={**SPEC, "count": 41}, headers=KEY)
        assert other.json()["error"]["code"] == "conflict"


async def test_a_batch_that_failed_in_part_is_completed_by_the_same_request(start: Start) -> None:
    async with start("a") as platform:
        double, body = platform.edges["a"], {**SPEC, "count": 5}
        double.capacity = 3
        first = await lines_of(platform.client, body, KEY)
        assert sum(line["error"] is not None for line in first) == 2
        double.capacity = 5
        again = {line["index"]: line for line in await lines_of(platform.client, body, KEY)}
        assert all(line["error"] is None for line in again.values())
        for line in first:
            if line["error"] is None:
                assert again[line["index"]]["status"]["sandbox_id"] == line["status"]["sandbox_id"]
        assert double.live == 5


@pytest.mark.parametrize("cut", [False, True])
async def test_a_repeat_starts_what_failed_and_never_what_was_told_and_is_forgotten(start: Start, *, cut: bool) -> None:
    async with start("a") as platform:
        double, body = platform.edges["a"], {**SPEC, "count": 500}
        told: dict[int, str] = {}
        if cut:
            double.start_s = 0.002
            async with platform.client.stream("POST", "/v1/sandbox-batches", json=body, headers=KEY) as answer:
                async for text in answer.aiter_lines():
                    line = json.loads(text)
                    told[line["index"]] = line["status"]["sandbox_id"]
                    if len(told) == 20:
                        break
        else:
            double.capacity = 300
            lines = await lines_of(platform.client, body, KEY)
            told = {line["index"]: line["status"]["sandbox_id"] for line in lines if not line["error"]}
            assert len(told) == 300
        double.sandboxes.clear()
        double.start_s, double.capacity, before = 0, 10_000, set(double.starts)
        again = {line["index"]: line for line in await lines_of(platform.client, body, KEY)}
        assert sorted(again) == list(range(500))
        assert {again[index]["error"]["code"] for index in told} == {"sandbox_exited"}
        assert told == {index: again[index]["error"]["sandbox_id"] for index in told}
        fresh = [line["status"]["sandbox_id"] for line in again.values() if not line["error"]]
        assert fresh
        assert set(told.values()).isdisjoint(double.starts[len(before) :])
        third = {line["index"]: line for line in await lines_of(platform.client, body, KEY)}
        assert sorted(fresh) == sorted(line["status"]["sandbox_id"] for line in third.values() if not line["error"])


async def test_an_abandoned_batch_keeps_what_it_is_told_to_and_starts_nothing_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "RETRY_S", 0.05)
    async with start("local") as platform:
        double, body, kept = platform.edges["local"], {**SPEC, "count": 2000}, {}
        double.start_s = 0.002
        async with platform.client.stream("POST", "/v1/sandbox-batches", json=body, headers=KEY) as answer:
            async for text in answer.aiter_lines():
                line = json.loads(text)
                kept[line["index"]] = line["status"]["sandbox_id"]
                if len(kept) == 20:
                    break
        for _ in range(2):
            answer = await platform.client.post("/v1/sandbox-batches/abandon", json={"keep": list(kept)}, headers=KEY)
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
        await until(lambda: double.live == 20)
        running = {one for one, status in double.sandboxes.items() if status.state == "running"}
        assert running == set(kept.values())
        begun = len(double.starts)
        assert begun < 2000
        await lines_of(platform.client, body, KEY)
        assert len(double.starts) == begun
        missing = await platform.client.post("/v1/sandbox-batches/abandon", json={}, headers={"Idempotency-Key": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        unnamed = await platform.client.post("/v1/sandbox-batches/abandon", json={})
        assert unnamed.json()["error"]["detail"]["field"] == "Idempotency-Key"


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_client_that_leaves_a_batch_keeps_what_it_was_told_of(
    start: Start, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    monkeypatch.setattr(reclaim, "RETRY_S", 0.05)
    async with start("local") as platform:
        double = platform.edges["local"]
        double.start_s = 0.002
        headers = KEY if keyed else {}
        told: set[str] = set()
        body = {**SPEC, "count": 2000}
        async with platform.client.stream("POST", "/v1/sandbox-batches", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                told.add(json.loads(line)["status"]["sandbox_id"])
                if len(told) == 20:
                    break
        if keyed:
            lines = await lines_of(platform.client, body, headers)
            assert told <= {line["status"]["sandbox_id"] for line in lines}
            assert double.live == len(double.starts) == 2000
        else:
            # Lines on their way when the client left count as told; everything else goes.
            await until(lambda: len(double.starts) > 20 and double.live < 60)
            assert told <= {one for one, status in double.sandboxes.items() if status.state == "running"}


@asynccontextmanager
async def apiserver_process(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A real apiserver in front of the edge `local` in `folder`, killed with -9 on the way out."""
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}/src",
        "OPENDSEC_LISTEN": f"unix:{folder}/api.sock",
        "OPENDSEC_EDGES": f"local=unix:{folder}/local.sock",
        "OPENDSEC_EDGE_TOKEN": TOKEN,
        "OPENDSEC_DATABASE_URL": f"sqlite:///{folder}/iam.sqlite3",
        "OPENDSEC_LOG_LEVEL": "warning",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "opendsec.apiserver", env=environment)
    try:
        async with asyncio.timeout(60), client_for(folder, "") as client:
            while True:
                with suppress(httpx.TransportError):
                    await client.get("/healthz")
                    break
                await asyncio.sleep(0.02)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_kill_9_of_the_apiserver_in_the_middle_starts_nothing_twice(tmp_path: Path) -> None:
    key = seed(settings_for(tmp_path, "local"))["default"]
    body = {**SPEC, "count": 3000}
    async with edge_process("local", tmp_path):
        async with (
            apiserver_process(tmp_path) as process,
            client_for(tmp_path, key) as client,
            client.stream("POST", "/v1/sandbox-batches", json=body, headers=KEY) as answer,
        ):
            first = json.loads(await anext(answer.aiter_lines()))
            process.kill()
        async with apiserver_process(tmp_path), client_for(tmp_path, key) as client:
            lines = await lines_of(client, body, KEY)
            ids = {line["index"]: line["status"]["sandbox_id"] for line in lines}
            assert ids[first["index"]] == first["status"]["sandbox_id"]
            listed = 0
            cursor = ""
            while True:
                page = (await client.get("/v1/sandboxes", params={"limit": "1000", "cursor": cursor})).json()
                listed += len(page["items"])
                cursor = page["cursor"]
                if not cursor:
                    break
            assert listed == len(set(ids.values())) == 3000
