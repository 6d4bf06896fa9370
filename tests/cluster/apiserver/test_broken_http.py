"""Bytes that are no HTTP, heads without end: answered in our words, closed, and nobody else notices."""

from __future__ import annotations

import asyncio

import pytest
from tests.cluster.apiserver.conftest import Platform, Start

from opendsec.server import runner
from opendsec.server.runner import MAX_HEAD
from opendsec.wire import codec

pytestmark = pytest.mark.anyio


async def talk(platform: Platform, *pieces: bytes) -> bytes:
    """Everything the server says until it closes the connection."""
    reader, writer = await asyncio.open_unix_connection(str(platform.folder / "api.sock"))
    answer = b""
    try:
        async with asyncio.timeout(60):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            answer = await reader.read(-1)
    except (ConnectionResetError, BrokenPipeError):
        pass
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\x03" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"NOT-A-METHOD / HTTP/1.1\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: ten\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_broken_requests_are_answered_and_closed(start: Start, request_bytes: bytes) -> None:
    async with start("local") as platform:
        answer = await talk(platform, request_bytes)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 "))
        error = codec.decode_error(body)
        assert error.code in ("bad_request", "unauthorized")
        assert (await platform.client.get("/v1/sandboxes")).status_code == 200


async def test_a_head_without_end_is_cut_off(start: Start) -> None:
    async with start("local") as platform:
        endless = [b"GET /healthz HTTP/1.1\r\n", *[b"x-a: " + b"a" * 1000 + b"\r\n"] * 200]
        answer = await talk(platform, *endless)
        assert answer == b"" or (answer.startswith(b"HTTP/1.1 400 ") and str(MAX_HEAD).encode() in answer)
        value_only = [b"GET /healthz HTTP/1.1\r\nx-a: ", *[b"a" * 1000] * 200]
        assert b" 200 " not in await talk(platform, *value_only)
        assert (await platform.client.get("/healthz")).text == "ok"


async def test_a_long_but_reasonable_head_passes(start: Start) -> None:
    async with start("local") as platform:
        answer = await platform.client.get("/healthz", headers={"x-long": "a" * 12_000})
        assert answer.text == "ok"


@pytest.mark.parametrize("requests", [0, 1])
@pytest.mark.parametrize("head", [b"", b"GET /healthz HTTP/1.1\r\nx-a: b"])
async def test_a_head_that_does_not_come_closes_the_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, requests: int, head: bytes
) -> None:
    monkeypatch.setattr(runner, "HEAD_S", 0.3)
    async with start("local") as platform:
        reader, writer = await asyncio.open_unix_connection(str(platform.folder / "api.sock"))
        async with asyncio.timeout(60):
            for _ in range(requests):
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                await reader.readuntil(b"\r\n\r\nok")
            writer.write(head)
            if requests and not head:  # an idle connection is kept
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.6):
                        await reader.read(1)
            else:
                assert await reader.read(-1) == b""
        writer.close()
