"""Calls through the apiserver to edges: one and many, spread, refused, cut off, slow to read, hostile."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.cluster.apiserver.conftest import client_for
from tests.cluster.fncall.conftest import Platform, Start

from opendsec.apiserver import calls, edges
from opendsec.edge import fncall_routes
from opendsec.model.fncall_check import edge_of_artifact

pytestmark = pytest.mark.anyio


def sh(code: str, **fields: Any) -> dict[str, Any]:
    return {"language": "sh", "code": code, **fields}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def many(platform: Platform, calls: list[Any], **headers: str) -> list[dict[str, Any]]:
    """The results of a batch, by index."""
    answer = await platform.client.post("/v1/fncall-batches", content=json.dumps({"calls": calls}), headers=headers)
    assert answer.status_code == 200, answer.text
    *lines, done = [json.loads(line) for line in answer.text.splitlines()]
    assert done["done"]
    lines = sorted((line for line in lines if tells_a_result(line)), key=lambda line: int(line["index"]))
    assert [line["index"] for line in lines] == list(range(len(calls)))
    return lines


def tells_a_result(line: dict[str, Any]) -> bool:
    """Others only tell that the batch goes on, and may come at any time."""
    return bool(line["index"] != -1)


async def test_one_call(start: Start) -> None:
    async with start("a") as platform:
        post = platform.client.post
        answer = (await post("/v1/fncalls", json=sh("cat; exit 3", stdin=b64(b"in")))).json()
        assert (answer["status"], answer["run"]["exit_code"]) == ("runtime_error", 3)
        assert base64.b64decode(answer["run"]["stdout"]) == b"in"
        files = {"d/x": b64(b"file")}
        answer = (await post("/v1/fncalls", json=sh("cat d/x > y", files=files, fetch=["y", "none"]))).json()
        assert answer["files"] == {"y": b64(b"file")}
        cases = [{"stdin": b64(b"1"), "expected": b64(b"1"), "name": "one"}, {"expected": b64(b"2")}]
        answer = (await post("/v1/fncalls", json=sh("cat", task_type="judge", cases=cases))).json()
        assert [case["verdict"] for case in answer["cases"]] == ["AC", "WA"]
        slow = await post("/v1/fncalls", json=sh("sleep 9"), headers={"X-OpenDSec-Timeout": "0.1"})
        assert slow.json()["error"]["code"] == "deadline"
        assert platform.engines["a"].report().live == 0


async def test_a_burst_of_short_calls_does_not_all_go_to_the_edge_that_was_emptiest(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "VIEW_AGE_S", 3600.0)
    async with start("a", "b") as platform:
        busy = replace(platform.engines["a"].report(), live=6)
        monkeypatch.setattr(platform.engines["a"], "report", lambda: busy)
        made = [
            (await platform.client.post("/v1/fncalls", json=sh("echo", task_type="compile"))).json() for _ in range(20)
        ]
        where = Counter(edge_of_artifact(one["artifact"]) for one in made)
        assert abs(6 + where["a"] - where["b"]) <= 1, where
        assert sum(where.values()) == 20


async def test_an_artifact_is_run_where_it_lies_and_for_its_project_alone(start: Start) -> None:
    async with start("a", "b") as platform:
        made = [(await platform.client.post("/v1/fncalls", json=sh("echo hi", task_type="compile"))).json()]
        made += [line["result"] for line in await many(platform, [sh("echo hi", task_type="compile")] * 7)]
        names = [one["artifact"] for one in made]
        assert {name.split("-")[1] for name in names} == {"a", "b"}
        runs = [{"language": "sh", "artifact": name} for name in names]
        for line in await many(platform, runs):
            assert base64.b64decode(line["result"]["run"]["stdout"]) == b"hi\n"
        for run in runs:
            assert (await platform.client.post("/v1/fncalls", json=run)).json()["status"] == "ok"
        async with client_for(platform.folder, platform.keys["other"]) as other:
            refused = await other.post("/v1/fncalls", json=runs[0])
            assert (refused.status_code, refused.json()["error"]["detail"]["field"]) == (404, "artifact")
        lost = {"language": "sh", "artifact": "art-elsewhere-" + "a" * 16}
        assert (await platform.client.post("/v1/fncalls", json=lost)).status_code == 404
        assert (await many(platform, [lost]))[0]["error"]["code"] == "not_found"


async def test_a_batch_is_spread_and_every_index_told_once(start: Start) -> None:
    async with start("a", "b", capacity=4) as platform:
        calls = [sh(f"echo {index}; exit {index % 5}") for index in range(2000)]
        for index, line in enumerate(await many(platform, calls)):
            assert base64.b64decode(line["result"]["run"]["stdout"]) == b"%d\n" % index
            assert line["result"]["run"]["exit_code"] == index % 5
        shares = {name: engine.begun for name, engine in platform.engines.items()}
        assert sum(shares.values()) == 2000
        assert min(shares.values()) > 500, shares


async def test_a_wrong_call_fails_alone(start: Start) -> None:
    async with start("a") as platform:
        wrong = [
            (sh("true", files={"../x": ""}), "calls[0].files"),
            (sh("true", files={"a\0b": ""}), "calls[1].files"),
            (sh("true", files={"/etc/passwd": ""}), "calls[2].files"),
            (sh("true", files={f"f{n}": "" for n in range(1025)}), "calls[3].files"),
            (sh("true", files={"a": "", "a/b": ""}), "calls[4].files"),
            (sh("true", cpu_time_s="long"), "calls[5].cpu_time_s"),
            (sh("true", wall_time_s=1e300), "calls[6].wall_time_s"),
            (sh("true", memory_mb=2**60), "calls[7].memory_mb"),
            (sh("true", output_kb=0), "calls[8].output_kb"),
            (sh("true", colour="red"), "calls[9].colour"),
            (sh(""), "calls[10].code"),
            (sh("true", task_type="judge"), "calls[11].cases"),
            (sh("true", task_type="divine"), "calls[12].task_type"),
            (sh("true", stdin="no base64!"), "calls[13].stdin"),
            (sh("\ud800"), "calls[14].code"),
            (sh("true", fetch=["a/../../b"]), "calls[15].fetch"),
            (sh("true", args=["a\0"]), "calls[16].args"),
            (sh("true", env={"A=B": "c"}), "calls[17].env"),
            (sh("true", gpu={"mode": "shared"}), "gpu"),
            ({"language": "cobol", "code": "x"}, "language"),
            ([], "calls[20].body"),
            (7, "calls[21].body"),
        ]
        good = sh("echo good")
        lines = await many(platform, [*(call for call, _ in wrong), good])
        assert [line["error"]["detail"]["field"] for line in lines[:-1]] == [field for _, field in wrong]
        assert lines[-1]["result"]["status"] == "ok"
        assert platform.engines["a"].begun == 1
        for call, field in wrong:
            single = await platform.client.post("/v1/fncalls", content=json.dumps(call))
            assert single.json()["error"]["detail"]["field"] == field.rpartition(".")[2]
            assert single.status_code in (422, 501)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b'{"calls": []}', 422, "calls"),
        (b'{"calls": ' + json.dumps([7] * 32_769).encode() + b"}", 422, "calls"),
        (b'{"calls": 3}', 422, "calls"),
        (b'{"calls": {}}', 422, "calls"),
        (b'{"calls": [{}], "indexes": [1]}', 422, "indexes"),
        (b'{"calls": [{}], "other": 1}', 422, "other"),
        (b'{"calls": [{}', 422, "body"),
        (b"", 422, "body"),
        (b"[]", 422, "body"),
        (b"x" * (64 * 1024 * 1024 + 1), 413, "body"),
    ],
    ids=["none", "too-many", "number", "object", "indexes", "unknown", "cut", "empty", "list", "huge"],
)
async def test_a_batch_that_is_none(start: Start, body: bytes, status: int, field: str) -> None:
    async with start("a") as platform:
        answer = await platform.client.post("/v1/fncall-batches", content=body)
        assert (answer.status_code, answer.json()["error"]["detail"]["field"]) == (status, field)


async def test_a_body_too_large(start: Start) -> None:
    async with start("a") as platform:
        answer = await platform.client.post("/v1/fncalls", content=b"x" * (8 * 1024 * 1024 + 1))
        assert (answer.status_code, answer.json()["error"]["detail"]["field"]) == (413, "body")


async def test_who_may_call(start: Start) -> None:
    async with start("a") as platform:
        assert (await platform.client.get("/v1/fncalls")).status_code == 405
        async with client_for(platform.folder, "") as nobody:
            assert (await nobody.post("/v1/fncalls", json=sh("true"))).status_code == 401
            assert (await nobody.post("/run_code", json={"code": "", "language": "bash"})).status_code == 401
        made = await platform.client.post("/v1/keys", json={"role": "runner"})
        async with client_for(platform.folder, made.json()["key"]) as runner:
            assert (await runner.post("/v1/fncalls", json=sh("true"))).status_code == 200


async def test_an_edge_without_calls_is_passed_over(start: Start) -> None:
    async with start("a", "b", without=frozenset({"a"})) as platform:
        for _ in range(5):
            assert (await platform.client.post("/v1/fncalls", json=sh("true"))).status_code == 200
        lines = await many(platform, [sh("true")] * 50)
        assert all(line["result"] for line in lines)
    async with start("c", without=frozenset({"c"})) as platform:
        assert (await platform.client.post("/v1/fncalls", json=sh("true"))).json()["error"]["code"] == (
            "backend_unavailable"
        )
        assert (await many(platform, [sh("true")]))[0]["error"]["code"] == "backend_unavailable"


async def test_a_full_edge_is_waited_for_by_a_batch_and_told_to_a_single_call(start: Start) -> None:
    async with start("a", capacity=1, queue=0) as platform:
        busy = asyncio.create_task(platform.client.post("/v1/fncalls", json=sh("sleep 0.3")))
        await until_begun(platform, 1)
        refused = await platform.client.post("/v1/fncalls", json=sh("true"))
        assert refused.json()["error"]["code"] in ("capacity", "unschedulable")
        assert refused.json()["error"]["retryable"]
        assert all(line["result"] for line in await many(platform, [sh("true")] * 20))
        await busy
        told = await many(platform, [sh("sleep 5"), sh("true")], **{"X-OpenDSec-Timeout": "0.3"})
        assert next(line["error"]["code"] for line in told if line["error"]) in ("deadline", "capacity")


async def until_begun(platform: Platform, count: int) -> None:
    async with asyncio.timeout(60):
        while sum(engine.begun for engine in platform.engines.values()) < count:
            await asyncio.sleep(0.005)


async def test_the_client_s_leaving_ends_what_runs_and_begins_no_more(start: Start) -> None:
    async with start("a", "b", capacity=2) as platform:
        calls = [sh("sleep 30")] * 500
        leaving = asyncio.create_task(platform.client.post("/v1/fncall-batches", json={"calls": calls}))
        await until_begun(platform, 4)
        leaving.cancel()
        async with asyncio.timeout(60):
            while any(engine.report().live for engine in platform.engines.values()):
                await asyncio.sleep(0.01)
        assert sum(engine.begun for engine in platform.engines.values()) == 4
        single = asyncio.create_task(platform.client.post("/v1/fncalls", json=sh("sleep 30")))
        await until_begun(platform, 5)
        single.cancel()
        async with asyncio.timeout(60):
            while any(engine.report().live for engine in platform.engines.values()):
                await asyncio.sleep(0.01)


async def at_rest(count: Callable[[], int]) -> int:
    """What stays the same for half a second."""
    async with asyncio.timeout(60):
        while True:
            before = count()
            await asyncio.sleep(0.5)
            if count() == before:
                return before


async def test_a_slow_reader_slows_the_batch(start: Start) -> None:
    async with start("a", capacity=8) as platform:
        calls = [sh("yes 100000", output_kb=1024)] * 400  # 200 kB of answer each
        request = platform.client.build_request("POST", "/v1/fncall-batches", json={"calls": calls})
        answer = await platform.client.send(request, stream=True)
        lines = answer.aiter_lines()
        first = await anext(lines)
        assert await at_rest(lambda: platform.engines["a"].begun) < 300
        told = [line.startswith('{"index":-1') for line in [first, *[line async for line in lines]]]
        assert told.count(False) == 400
        await answer.aclose()


async def test_an_edge_that_stays_away_is_told_for_every_call(start: Start) -> None:
    async with start("a", patience_s=0.5) as alone:
        (alone.folder / "a.sock").unlink()
        fresh = httpx.AsyncHTTPTransport(uds=str(alone.folder / "api.sock"))
        async with httpx.AsyncClient(
            transport=fresh, base_url="http://api", headers={"Authorization": f"Bearer {alone.keys['default']}"}
        ) as client:
            gone = await client.post("/v1/fncalls", json=sh("true"), timeout=10)
            assert gone.json()["error"]["code"] in ("connect", "unschedulable")
            answer = await client.post("/v1/fncall-batches", json={"calls": [sh("true")] * 3}, timeout=10)
            *told, _ = [json.loads(line) for line in answer.text.splitlines()]
            assert [line["error"]["code"] for line in told if tells_a_result(line)] == ["connect"] * 3


async def test_silence_is_a_lost_edge_and_one_that_has_nothing_to_tell_is_not_silent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FNCALL_SILENCE_S", 1.0)
    for module in (calls, fncall_routes):
        monkeypatch.setattr(module, "FNCALL_TELL_EVERY_S", 0.1)
    body = json.dumps({"calls": [sh("sleep 2")]})

    def read(answer: httpx.Response) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(what only tells that it goes on, which may still come after the result; the one result)"""
        *lines, done = [json.loads(line) for line in answer.text.splitlines()]
        assert done["done"]
        told = [line for line in lines if not tells_a_result(line)]
        (result,) = [line for line in lines if tells_a_result(line)]
        assert not any(line["done"] for line in told)
        return told, result

    async with start("a", patience_s=0.5) as platform:
        answer = await platform.client.post("/v1/fncall-batches", content=body)
        told, result = read(answer)
        assert (result["index"], result["result"]["status"]) == (0, "ok")
        assert len(told) >= 2
        assert platform.engines["a"].begun == 1
        monkeypatch.setattr(fncall_routes, "FNCALL_TELL_EVERY_S", 100.0)
        answer = await platform.client.post("/v1/fncall-batches", content=body)
        _, result = read(answer)
        assert (result["index"], result["error"]["code"]) == (0, "transport")
        assert "said nothing for 1 s" in json.dumps(result["error"])
