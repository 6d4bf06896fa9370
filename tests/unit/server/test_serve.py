"""A server that is told to end: requests that are not over in time are cut off, never answered with something false."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from opendsec.server.runner import Address, listen, serve

pytestmark = pytest.mark.anyio

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def endless(_scope: Any, receive: Any, _send: Send) -> None:
    """Never answers."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def endless_stream(scope: Any, receive: Any, send: Send) -> None:
    """Never ends."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await endless(scope, receive, send)


@pytest.mark.parametrize(("app", "begun"), [(endless, b""), (endless_stream, b"begun")])
async def test_a_request_that_is_not_over_is_cut_off_without_an_answer(tmp_path: Path, app: Any, begun: bytes) -> None:
    path = tmp_path / "socket"
    listening = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        server = group.create_task(
            serve(app, listen(Address(path=path)), grace_s=0.2, on_listening=listening.set), name="server"
        )
        await listening.wait()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        if begun:
            await reader.readuntil(begun)
        server.cancel()
        async with asyncio.timeout(30):
            try:
                rest = await reader.read()
            except ConnectionResetError:
                rest = b""
        assert b"500" not in rest
        assert b"0\r\n\r\n" not in rest
        writer.close()
