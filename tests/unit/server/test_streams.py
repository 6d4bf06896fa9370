"""Streams: early failures are errors, late ones cut, and a client that has gone ends the source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from opendsec import errors
from opendsec.server.asgi import ClientGoneError
from opendsec.server.streams import ndjson, send_stream, while_connected
from opendsec.wire.contracts import Empty

pytestmark = pytest.mark.anyio


class Client:
    """Stays until it is told to leave."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.paused = asyncio.Event()
        self.paused.set()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.paused.wait()
        if not self.gone.is_set():
            self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_chunks_and_a_proper_end() -> None:
    client = Client()

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"
        yield b"b"

    await send_stream(client.receive, client.send, chunks(), status=207, media_type="x/y", headers=[(b"k", b"v")])
    assert client.sent[0] == {
        "type": "http.response.start", "status": 207, "headers": [(b"content-type", b"x/y"), (b"k", b"v")],
    }  # fmt: skip
    assert client.body == b"ab"
    assert client.sent[-1] == {"type": "http.response.body", "body": b""}


async def test_a_source_that_fails_at_once_has_sent_nothing() -> None:
    client = Client()

    async def chunks() -> AsyncGenerator[bytes]:
        if client.sent == []:
            raise errors.NotFoundError("no such command")
        yield b""

    with pytest.raises(errors.NotFoundError):
        await send_stream(client.receive, client.send, chunks(), media_type="x/y")
    assert client.sent == []


async def test_a_source_that_fails_later_does_not_end_properly() -> None:
    client = Client()

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"
        raise errors.NodeError("disk")

    with pytest.raises(errors.NodeError):
        await send_stream(client.receive, client.send, chunks(), media_type="x/y")
    assert client.sent[-1]["more_body"] is True


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_client_that_leaves_closes_the_source(*, waiting: bool) -> None:
    """Also one that never waits: a server drops what is sent after the client has left without waiting itself."""
    client = Client()
    closed = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"x"
                if waiting:
                    await asyncio.Event().wait()
        finally:
            closed.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(_gone(send_stream(client.receive, client.send, chunks(), media_type="x/y")))
        async with asyncio.timeout(30):
            while len(client.sent) < 2:
                await asyncio.sleep(0)
            client.gone.set()
            assert await task
    assert closed.is_set()


async def test_a_source_with_a_task_group_is_closed_without_a_failure() -> None:
    """What it yields inside of the group is where it is closed."""
    client = Client()
    ended = []

    async def chunks() -> AsyncGenerator[bytes]:
        async with asyncio.TaskGroup() as group:
            helper = group.create_task(asyncio.sleep(3600))
            try:
                yield b"a"
                client.paused.clear()
                yield b"b"
            finally:
                helper.cancel()
                ended.append("closed")

    sending = asyncio.create_task(send_stream(client.receive, client.send, chunks(), media_type="x/y"))
    while client.paused.is_set():
        await asyncio.sleep(0)
    client.gone.set()
    with pytest.raises(ClientGoneError):
        await sending
    assert ended == ["closed"]


async def _gone(work: Any) -> bool:
    try:
        await work
    except ClientGoneError:
        return True
    return False


async def test_a_slow_client_is_waited_for() -> None:
    client = Client()
    made = 0

    async def chunks() -> AsyncGenerator[bytes]:
        nonlocal made
        for _ in range(100):
            made += 1
            yield b"x"

    client.paused.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(send_stream(client.receive, client.send, chunks(), media_type="x/y"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert made == 1
        client.paused.set()
    assert client.body == b"x" * 100


async def test_work_ends_with_the_client() -> None:
    client = Client()

    async def work() -> str:
        return "done"

    assert await while_connected(client.receive, work()) == "done"
    with pytest.raises(errors.StartError):
        await while_connected(client.receive, _fail())
    client.gone.set()
    with pytest.raises(ClientGoneError):
        await while_connected(client.receive, asyncio.sleep(60))


async def _fail() -> None:
    raise errors.StartError("no")


async def test_ndjson_is_one_line_a_value() -> None:
    async def values() -> AsyncGenerator[object]:
        yield Empty()
        yield {"a": "b\nc"}

    assert [chunk async for chunk in ndjson(values())] == [b'{"ok":true}\n', b'{"a":"b\\nc"}\n']
