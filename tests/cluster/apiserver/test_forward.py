"""The data path: bytes pass as they are, at the reader's pace, and nothing that was cut looks whole."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.apiserver.conftest import Start, alone, client_for, edge_process, seed, settings_for

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


async def until(check: Callable[[], Any], *, timeout_s: float = 10.0) -> None:
    """Return when `check` is true."""
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


async def make(client: httpx.AsyncClient) -> str:
    """A running sandbox."""
    sandbox_id: str = (await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}})).json()["sandbox_id"]
    return sandbox_id


async def test_path_query_headers_and_status_pass_byte_for_byte(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        target = f"/v1/sandboxes/{sandbox_id}/files/nowhere?path=%2Fa%20b%0A%F0%9F%98%80%FF&x=%2525&y="
        custom = [(b"x-custom", b"v\xe9")]
        assert (await platform.client.get(target, headers=custom)).status_code == 404
        assert platform.edges["local"].missed[-1] == (target, "v\xe9")
        echoed = await platform.client.post(f"/v1/sandboxes/{sandbox_id}/commands?detach=%74rue", content=b"\x00\xff\n")
        assert (echoed.content, echoed.headers["x-double"]) == (b"\x00\xff\n", "yes")
        method, seen, headers = platform.edges["local"].requests[-1]
        assert (method, seen) == ("POST", f"/v1/sandboxes/{sandbox_id}/commands?detach=%74rue")
        assert headers["x-opendsec-project"] == "default"
        assert headers["authorization"].endswith("edges")
        assert "odk_" not in str(headers)


async def test_a_download_of_any_size_arrives_whole(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        for length in (0, 1, 65_535, 65_536, 262_144, 5 * MIB + 7):
            answer = await platform.client.get(f"/v1/sandboxes/{sandbox_id}/files/content?length={length}")
            assert len(answer.content) == length
            assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upload_arrives_whole_with_and_without_a_length(start: Start, *, chunked: bool) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        data = bytes(range(256)) * 4096 * 8

        async def pieces() -> AsyncIterator[bytes]:
            for offset in range(0, len(data), 100_003):
                yield data[offset : offset + 100_003]

        headers = {} if chunked else {"Content-Length": str(len(data))}
        target = f"/v1/sandboxes/{sandbox_id}/files/content"
        answer = await platform.client.put(target, content=pieces(), headers=headers)
        assert answer.json().get("bytes") == len(data), answer.text


async def test_both_directions_flow_at_once(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        reader, writer = await asyncio.open_unix_connection(str(platform.folder / "api.sock"))
        head = f"POST /v1/sandboxes/{sandbox_id}/commands HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        writer.write(f"{head}Authorization: Bearer {platform.keys['default']}\r\n\r\n5\r\nfirst\r\n".encode())
        async with asyncio.timeout(60):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readuntil(b"first\r\n")  # back before the request is whole
            writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"6\r\nsecond")
        writer.close()
        await writer.wait_closed()


async def test_a_slow_reader_holds_the_edge_back_and_memory_stays_flat(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        double = platform.edges["local"]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        target = f"/v1/sandboxes/{sandbox_id}/files/content?length={1024 * MIB}"
        async with platform.client.stream("GET", target) as answer:
            reading = answer.aiter_raw()
            await anext(reading)
            await asyncio.sleep(0.3)  # what would pile up, piles up now
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown_kib < 48 * 1024
            assert double.streaming == 1
        await until(lambda: double.streaming == 0)
        assert double.gone == 1


async def test_a_client_that_leaves_ends_the_request_at_the_edge(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        double = platform.edges["local"]
        async with platform.client.stream(
            "GET", f"/v1/sandboxes/{sandbox_id}/files/content?length={1024 * MIB}"
        ) as answer:
            assert answer.status_code == 200
            await until(lambda: double.streaming == 1)
        await until(lambda: double.gone == 1)


async def test_an_early_refusal_of_an_upload_is_told(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        target = f"/v1/sandboxes/{sandbox_id}/files/content?refuse_after={MIB}"
        answer = await platform.client.put(target, content=b"x" * (4 * MIB))
        assert answer.json()["error"]["code"] == "file"
        # The connection to the edge is in no state to be used again; the next request must not notice.
        assert (await platform.client.get(f"/v1/sandboxes/{sandbox_id}")).status_code == 200


async def test_a_stream_the_edge_cuts_never_ends_properly(start: Start) -> None:
    async with start("local") as platform:
        sandbox_id = await make(platform.client)
        platform.edges["local"].cut_after = 3 * MIB
        target = f"/v1/sandboxes/{sandbox_id}/files/content?length={8 * MIB}"
        got = 0

        async def read() -> None:
            nonlocal got
            async with platform.client.stream("GET", target) as answer:
                async for chunk in answer.aiter_raw():
                    got += len(chunk)

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        assert 0 < got <= 3 * MIB + 256 * 1024


async def test_kill_9_of_the_edge_cuts_streams_and_is_typed_before_the_answer(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "local")
    key = seed(settings)["default"]
    async with alone(settings, tmp_path, patience_s=0.3), client_for(tmp_path, key) as client:
        async with edge_process("local", tmp_path) as process:
            sandbox_id = await make(client)
            target = f"/v1/sandboxes/{sandbox_id}/files/content?length={1024 * MIB}"

            async def read() -> None:
                async with client.stream("GET", target) as answer:
                    process.kill()
                    async for _ in answer.aiter_raw():
                        pass

            with pytest.raises(httpx.RemoteProtocolError):
                await read()
        for method, path in (("GET", ""), ("POST", "/commands"), ("DELETE", "")):
            answer = await client.request(method, f"/v1/sandboxes/{sandbox_id}{path}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["retryable"]) == (502, "sandbox_lost", True)
            assert error["sandbox_id"] == sandbox_id
        refused = await client.post("/v1/sandboxes", json={"spec": {"image": "debian"}})
        assert refused.json()["error"]["code"] == "unschedulable"
        assert "local" in refused.json()["error"]["detail"]["reasons"]
        listed = await client.get("/v1/sandboxes")
        assert listed.json()["error"]["code"] == "connect"


async def test_an_edge_that_is_restarting_is_waited_for(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "local")
    key = seed(settings)["default"]
    async with (
        alone(settings, tmp_path, patience_s=20),
        client_for(tmp_path, key) as client,
        asyncio.TaskGroup() as group,
    ):
        async with edge_process("local", tmp_path):
            await make(client)
        waiting = [group.create_task(make(client)) for _ in range(20)]
        async with edge_process("local", tmp_path):
            made = {await task for task in waiting}
            assert len(made) == 20
