"""The edge's HTTP contract, against a real process with the dummy backend."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.cluster.edge.processes import EdgeProcess, edge_process

from opendsec.wire.contracts import EXEC_STARTED, MAX_JSON_BODY
from opendsec.wire.frames import FrameParser

pytestmark = pytest.mark.anyio
DUMMY = {"image": "debian", "backend": "dummy"}


@pytest.fixture(scope="module")
async def process() -> AsyncIterator[EdgeProcess]:
    root = Path(tempfile.mkdtemp(prefix="edge-"))
    try:
        async with edge_process(root, root / "run") as one:
            await one.client.aclose()
            yield one
    finally:
        shutil.rmtree(root)


@pytest.fixture
async def edge(process: EdgeProcess) -> AsyncIterator[EdgeProcess]:
    process.client = process.fresh_client()
    async with process.client:
        yield process


def refused(answer: httpx.Response, status: int, code: str, field: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["request_id"] == answer.headers["x-request-id"]
    if field is not None:
        assert error["detail"]["field"] == field


async def test_create_run_stop(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    done = await edge.run(sandbox_id, "echo out; echo err >&2; exit 3")
    assert (bytes(done.stdout), bytes(done.stderr)) == (b"out\n", b"err\n")
    assert done.result is not None
    assert (done.result["exit_code"], done.result["end_reason"]) == (3, "exited")
    ended = await edge.delete(sandbox_id)
    assert (ended["state"], ended["end_reason"]) == ("stopped", "stopped")
    assert await edge.delete(sandbox_id) == ended
    answer = await edge.client.post(f"/v1/sandboxes/{sandbox_id}/commands", json={"script": "true"})
    refused(answer, 410, "sandbox_exited")


async def test_output_can_be_asked_for_again_from_an_offset(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    await edge.run(sandbox_id, "echo 0123456789; echo abc >&2")
    again = await edge.output(sandbox_id, "cmd-1", stdout=4, stderr=100)
    assert (bytes(again.stdout), bytes(again.stderr)) == (b"456789\n", b"")
    listed = (await edge.client.get(f"/v1/sandboxes/{sandbox_id}/commands")).json()["items"]
    assert [(one["command_id"], one["running"], one["stdout_bytes"]) for one in listed] == [("cmd-1", False, 11)]


async def test_large_output_is_whole_whatever_its_size(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    for lines in (1, 32_767, 32_768, 32_769, 131_072, 131_073, 2_000_000):
        done = await edge.run(sandbox_id, f"yes {lines}")
        assert bytes(done.stdout) == b"y\n" * lines
        assert done.result is not None
        assert not done.result["truncated"]


async def test_client_that_leaves_ends_nothing(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    request = edge.client.build_request(
        "POST", f"/v1/sandboxes/{sandbox_id}/commands", json={"script": "echo begun; sleep 0.3; echo over"}
    )
    answer = await edge.client.send(request, stream=True)
    first = await anext(answer.aiter_raw())
    assert next(FrameParser().feed(first)).type == EXEC_STARTED
    await answer.aclose()
    done = await edge.output(sandbox_id, "cmd-1")
    assert bytes(done.stdout) == b"begun\nover\n"
    assert done.result is not None
    assert done.result["exit_code"] == 0


async def test_slow_reader_blocks_nobody(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    request = edge.client.build_request(
        "POST", f"/v1/sandboxes/{sandbox_id}/commands", json={"script": "yes 20000000", "max_output_bytes": 50_000_000}
    )
    slow = await edge.client.send(request, stream=True)
    try:
        quick = await asyncio.wait_for(edge.run(sandbox_id, "echo quick"), 30)
        assert bytes(quick.stdout) == b"quick\n"
        async with asyncio.timeout(60):
            while (await edge.client.get(f"/v1/sandboxes/{sandbox_id}/commands/cmd-1")).json()["running"]:
                await asyncio.sleep(0.05)
    finally:
        await slow.aclose()


async def test_command_that_cannot_start_is_an_http_error(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    answer = await edge.client.post(f"/v1/sandboxes/{sandbox_id}/commands", json={"script": "true", "cwd": "/missing"})
    refused(answer, 400, "exec_failed")
    assert answer.json()["error"]["sandbox_id"] == sandbox_id


async def test_stdin_by_offsets(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    command_id = await edge.begin(sandbox_id, "cat", stdin=True)
    url = f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/stdin"
    assert (await edge.client.post(f"{url}?offset=0", content=b"hello ")).json() == {"accepted": 6, "closed": False}
    assert (await edge.client.post(f"{url}?offset=3", content=b"lo world")).json()["accepted"] == 11
    gap = await edge.client.post(f"{url}?offset=50", content=b"x")
    refused(gap, 409, "conflict", "offset")
    assert gap.json()["error"]["detail"]["accepted"] == 11
    assert (await edge.client.post(f"{url}?offset=11&eof=true")).json() == {"accepted": 11, "closed": True}
    assert bytes((await edge.output(sandbox_id, command_id)).stdout) == b"hello world"


async def test_ending_a_command(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    command_id = await edge.begin(sandbox_id, "trap '' TERM; sleep 1000")
    answer = await edge.client.delete(f"/v1/sandboxes/{sandbox_id}/commands/{command_id}?grace=0.05")
    assert answer.status_code == 200
    result = (await edge.output(sandbox_id, command_id)).result
    assert result is not None
    assert (result["end_reason"], result["exit_code"]) == ("cancelled", 137)
    again = await edge.client.delete(f"/v1/sandboxes/{sandbox_id}/commands/{command_id}")
    assert again.json()["result"]["end_reason"] == "cancelled"


async def test_signal(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    command_id = await edge.begin(sandbox_id, "sleep 1000")
    url = f"/v1/sandboxes/{sandbox_id}/commands/{command_id}/signal"
    refused(await edge.client.post(url, json={"signal": 65}), 422, "invalid_spec", "signal")
    assert (await edge.client.post(url, json={"signal": 15})).status_code == 200
    result = (await edge.output(sandbox_id, command_id)).result
    assert result is not None
    assert (result["end_reason"], result["signal"], result["exit_code"]) == ("signaled", 15, 143)
    refused(await edge.client.post(url, json={"signal": 15}), 409, "conflict")


async def test_operation_id_over_http(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    script, key = "echo x >> /count; cat /count", "one"
    both = await asyncio.gather(*(edge.run(sandbox_id, script, operation_id=key) for _ in range(5)))
    assert {bytes(one.stdout) for one in both} == {b"x\n"}
    answer = await edge.client.post(
        f"/v1/sandboxes/{sandbox_id}/commands", json={"script": "other", "operation_id": key}
    )
    refused(answer, 409, "conflict", "operation_id")


async def test_projects_do_not_see_each_other(edge: EdgeProcess) -> None:
    mine, theirs = {"X-OpenDSec-Project": "mine"}, {"X-OpenDSec-Project": "theirs"}
    created = await edge.client.post("/v1/sandboxes", json={"spec": DUMMY}, headers=mine)
    sandbox_id = created.json()["sandbox_id"]
    url = f"/v1/sandboxes/{sandbox_id}"
    for method, path in (
        ("GET", ""),
        ("PATCH", ""),
        ("DELETE", ""),
        ("POST", "/pause"),
        ("GET", "/commands"),
        ("GET", "/commands/cmd-1"),
        ("GET", "/files/content?path=/x"),
        ("GET", "/files/tree?path=/x"),
    ):
        json_body: dict[str, str] | None = {} if method == "PATCH" else None
        refused(await edge.client.request(method, url + path, json=json_body, headers=theirs), 404, "not_found")
    refused(await edge.client.post(f"{url}/commands", json={"script": "true"}, headers=theirs), 404, "not_found")
    listed = (await edge.client.get("/v1/sandboxes", headers=theirs)).json()["items"]
    assert sandbox_id not in {one["sandbox_id"] for one in listed}
    assert (await edge.client.get(url, headers=mine)).json()["project"] == "mine"


async def test_idempotency_key_names_the_same_sandbox(edge: EdgeProcess) -> None:
    headers = {"Idempotency-Key": "once"}
    both = await asyncio.gather(
        *(edge.client.post("/v1/sandboxes", json={"spec": DUMMY}, headers=headers) for _ in range(3))
    )
    assert len({one.json()["sandbox_id"] for one in both}) == 1
    other = await edge.client.post("/v1/sandboxes", json={"spec": {**DUMMY, "image": "other"}}, headers=headers)
    refused(other, 409, "conflict")


async def test_batch_is_answered_line_by_line(edge: EdgeProcess) -> None:
    answer = await edge.client.post("/v1/sandbox-batches", json={"spec": DUMMY, "count": 200})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"]
    assert sorted(line["index"] for line in lines[:-1]) == list(range(200))
    assert all(line["status"]["state"] == "running" and line["error"] is None for line in lines[:-1])


async def test_batch_tells_each_failure_by_itself(edge: EdgeProcess) -> None:
    taken = (await edge.client.post("/v1/sandboxes", json={"spec": {**DUMMY, "image": "other"}})).json()["sandbox_id"]
    free = "sbx-local-" + "b" * 16
    answer = await edge.client.post(
        "/v1/sandbox-batches", json={"spec": DUMMY, "count": 2, "sandbox_ids": [taken, free]}
    )
    lines = {line["index"]: line for line in map(json.loads, answer.text.splitlines())}
    assert lines[0]["error"]["code"] == "conflict"
    assert lines[0]["error"]["sandbox_id"] == taken
    assert lines[1]["status"]["sandbox_id"] == free


async def test_listing_by_label_and_cursor(edge: EdgeProcess) -> None:
    ids = sorted([await edge.create(**DUMMY, labels={"job": "listing", "n": str(n)}) for n in range(5)])
    found: list[str] = []
    cursor = ""
    while True:
        page = (await edge.client.get(f"/v1/sandboxes?label=job=listing&limit=2&cursor={cursor}")).json()
        found += [one["sandbox_id"] for one in page["items"]]
        cursor = page["cursor"]
        if not cursor:
            break
    assert found == ids
    await edge.delete(ids[0])
    live = (await edge.client.get("/v1/sandboxes?label=job=listing")).json()["items"]
    stopped = (await edge.client.get("/v1/sandboxes?label=job=listing&state=stopped")).json()["items"]
    assert (len(live), [one["sandbox_id"] for one in stopped]) == (4, ids[:1])
    refused(await edge.client.get("/v1/sandboxes?state=odd"), 422, "invalid_spec", "state")
    assert all(one["memory_bytes"] is None for one in live)
    used = (await edge.client.get("/v1/sandboxes?label=job=listing&state=all&usage=true")).json()["items"]
    assert {one["sandbox_id"]: one["memory_bytes"] is None for one in used} == {one: one == ids[0] for one in ids}
    refused(await edge.client.get("/v1/sandboxes?usage=odd"), 422, "invalid_spec", "usage")


async def test_update_and_pause(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    url = f"/v1/sandboxes/{sandbox_id}"
    changed = (await edge.client.patch(url, json={"labels": {"a": "b"}})).json()
    assert changed["spec"]["labels"] == {"a": "b"}
    assert changed["spec"]["lifetime"]["ttl_running_stop"] == 300.0
    refused(
        await edge.client.patch(url, json={"lifetime": {"ttl_running_stop": 0}}),
        422,
        "invalid_spec",
        "ttl_running_stop",
    )
    assert (await edge.client.post(f"{url}/pause")).json()["state"] == "paused"
    assert (await edge.client.post(f"{url}/resume")).json()["state"] == "running"


async def test_files(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    url = f"/v1/sandboxes/{sandbox_id}/files"
    content = bytes(range(256)) * 5000
    put = await edge.client.put(f"{url}/content", params={"path": "/a/ü 1%2F", "parents": "true"}, content=content)
    assert (put.status_code, put.json()["size_bytes"]) == (200, len(content))
    got = await edge.client.get(f"{url}/content", params={"path": "/a/ü 1%2F", "offset": "5", "length": "100000"})
    assert got.content == content[5:100_005]
    assert got.headers["content-length"] == "100000"
    listed = (await edge.client.post(f"{url}/list", json={"path": "/a"})).json()["items"]
    assert [one["path"] for one in listed] == ["/a/ü 1%2F"]
    moved = await edge.client.post(f"{url}/move", json={"path": "/a/ü 1%2F", "target": "/b"})
    assert moved.json()["path"] == "/b"
    missing = await edge.client.post(f"{url}/stat", json={"path": "/a/ü 1%2F"})
    refused(missing, 400, "file")
    assert missing.json()["error"]["detail"]["errno"] == "ENOENT"
    refused(await edge.client.post(f"{url}/stat", json={"path": "/b", "mode": 1}), 422, "invalid_spec", "mode")
    refused(await edge.client.get(f"{url}/content?path=b"), 422, "invalid_spec", "path")
    tree = await edge.client.get(f"{url}/tree?path=/a")
    assert tree.headers["content-type"] == "application/vnd.opendsec.tree"
    packed = await edge.client.get(f"{url}/tree?path=/")
    assert (await edge.client.put(f"{url}/tree?path=/copy", content=packed.content)).json()["files"] >= 1
    assert (await edge.client.get(f"{url}/content?path=/copy/b")).content == content


async def test_watch(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY)
    url = f"/v1/sandboxes/{sandbox_id}/files"
    await edge.client.post(f"{url}/mkdir", json={"path": "/w"})

    async def first_event() -> dict[str, str]:
        async with edge.client.stream("GET", f"{url}/watch?path=/w") as answer:
            async for line in answer.aiter_lines():
                return dict(json.loads(line))
        raise AssertionError("no event")

    async with asyncio.timeout(60):
        watching = asyncio.ensure_future(first_event())
        while not watching.done():
            await edge.client.put(f"{url}/content?path=/w/x", content=b"1")
            await asyncio.sleep(0.02)
        assert (await watching)["path"].endswith("x")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "field"),
    [
        ("POST", "/v1/sandboxes", b"{", 422, "invalid_spec", "body"),
        ("POST", "/v1/sandboxes", b'{"spec":{"image":"debian","backnd":"dummy"}}', 422, "invalid_spec", "spec.backnd"),
        ("POST", "/v1/sandboxes", b'{"spec":{"image":"a b","backend":"dummy"}}', 422, "invalid_spec", "image"),
        ("POST", "/v1/sandboxes", b'{"spec":{"image":"debian","backend":"microvm"}}', 501, "unsupported", "backend"),
        (
            "POST",
            "/v1/sandboxes",
            b'{"spec":{"image":"debian","backend":"dummy","network_rules":{"*":true}}}',
            501,
            "unsupported",
            "network_rules",
        ),
        (
            "POST",
            "/v1/sandboxes",
            b'{"spec":{"image":"debian","backend":"dummy"},"sandbox_id":"sbx-other-aaaaaaaaaaaaaaaa"}',
            422,
            "invalid_spec",
            "sandbox_id",
        ),
        (
            "POST",
            "/v1/sandbox-batches",
            b'{"spec":{"image":"debian","backend":"dummy"},"count":0}',
            422,
            "invalid_spec",
            "count",
        ),
        ("GET", "/v1/sandboxes/sbx-local-aaaaaaaaaaaaaaaa", b"", 404, "not_found", None),
        ("GET", "/v1/sandboxes/%2e%2e", b"", 404, "not_found", None),
        ("GET", "/v1/nothing", b"", 404, "not_found", None),
    ],
)
async def test_bad_requests_name_the_field(
    edge: EdgeProcess, method: str, path: str, body: bytes, status: int, code: str, field: str | None
) -> None:
    before = (await edge.client.get("/v1/node")).json()["live"]
    refused(await edge.client.request(method, path, content=body), status, code, field)
    assert (await edge.client.get("/v1/node")).json()["live"] == before


async def test_oversized_body_is_413(edge: EdgeProcess) -> None:
    answer = await edge.client.post("/v1/sandboxes", content=b" " * (MAX_JSON_BODY + 1))
    refused(answer, 413, "invalid_spec", "body")


async def test_deadline_of_a_create_is_the_callers(edge: EdgeProcess) -> None:
    answer = await edge.client.post("/v1/sandboxes", json={"spec": DUMMY}, headers={"X-OpenDSec-Timeout": "soon"})
    refused(answer, 422, "invalid_spec", "X-OpenDSec-Timeout")


async def test_500_commands_at_once(edge: EdgeProcess) -> None:
    sandbox_id = await edge.create(**DUMMY, resources={"pids_limit": 100_000})
    done = await asyncio.gather(*(edge.run(sandbox_id, f"echo {n}; exit {n % 100}") for n in range(500)))
    assert [bytes(one.stdout) for one in done] == [f"{n}\n".encode() for n in range(500)]
    assert [one.result["exit_code"] for one in done if one.result] == [n % 100 for n in range(500)]


async def test_node_report(edge: EdgeProcess) -> None:
    report = (await edge.client.get("/v1/node")).json()
    assert (report["edge"], report["accepting"]) == ("local", True)
    assert report["backends"]["dummy"]["available"]
    assert report["memory_total_mb"] > 0
    again = (await edge.client.post("/v1/node/backends")).json()
    assert again["backends"]["dummy"]["available"]


async def test_sigterm_stops_cleanly_and_frees_the_socket(tmp_path: Path) -> None:
    async with edge_process(tmp_path, tmp_path / "run") as one:
        await one.create(**DUMMY)
        assert one.stop() == 0
    async with edge_process(tmp_path, tmp_path / "run") as again:
        assert (await again.client.get("/v1/node")).json()["live"] == 0


async def test_edge_on_a_port_wants_its_token(tmp_path: Path) -> None:
    edge = EdgeProcess(tmp_path, tmp_path / "run", OPENDSEC_EDGE_LISTEN="127.0.0.1:0")
    with pytest.raises(AssertionError, match="OPENDSEC_EDGE_TOKEN"):
        await edge.start()
    await edge.close()
