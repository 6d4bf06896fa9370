"""WebSockets of our servers: accept, refuse with one of our errors, and carry a stream of bytes through one.

Bytes travel in binary messages, as they come; where one message ends says nothing. Each side is read no faster than the
other takes it. Either side's end ends both: whoever watches a display has no use for half of one.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Protocol

from opendsec import errors
from opendsec.server.asgi import Receive, Scope, Send, request_id
from opendsec.server.streams import first_failure
from opendsec.wire import codec

METHOD = "WEBSOCKET"
"""What a WebSocket's handshake has instead of a method, where routes are looked up."""
NORMAL = 1000
"""RFC 6455: the purpose of the connection has been fulfilled."""


class ByteStream(Protocol):
    """What is carried."""

    @abstractmethod
    async def read(self) -> bytes:
        """b"" at the end."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Waits while the other side takes nothing. Raises OSError when it is gone."""


async def refuse(scope: Scope, send: Send, error: errors.OpenDSecError) -> None:
    """Answer a handshake as a request would be."""
    error.request_id = error.request_id or request_id(scope)
    body = codec.encode_error(error)
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": body})


async def accept(receive: Receive, send: Send, *, subprotocol: str | None = None) -> None:
    """Take the handshake."""
    await receive()  # websocket.connect
    await send({"type": "websocket.accept", "subprotocol": subprotocol, "headers": []})


Message = bytes | str


async def carry(stream: ByteStream, receive: Receive, send: Send) -> None:
    """Both directions, until one of them ends; then the socket is closed."""

    async def read() -> Message | None:
        return await stream.read() or None

    async def write(message: Message) -> None:
        await stream.write(message.encode("utf-8") if isinstance(message, str) else message)

    await pass_messages(read, write, receive, send)


async def pass_messages(
    read: Callable[[], Awaitable[Message | None]],
    write: Callable[[Message], Awaitable[None]],
    receive: Receive,
    send: Send,
) -> None:
    """Messages both ways, as they are, until one side ends; then the socket is closed. `read` gives None at its end;
    an OSError of `read` or `write` is as good as an end.
    """
    over, gone = asyncio.Event(), asyncio.Event()

    async def down() -> None:
        with contextlib.suppress(OSError):  # also how the server says that the client has gone
            while (message := await read()) is not None:
                await send({"type": "websocket.send", "bytes" if isinstance(message, bytes) else "text": message})
        over.set()

    async def up() -> None:
        with contextlib.suppress(OSError):
            while (message := await receive())["type"] != "websocket.disconnect":
                data = message.get("bytes")
                await write(message.get("text") or "" if data is None else data)
            gone.set()
        over.set()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(down()), group.create_task(up())]
            await over.wait()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    if not gone.is_set():
        await close(send)


async def close(send: Send) -> None:
    """Say that it is over; whoever has gone already need not be told."""
    with contextlib.suppress(OSError):
        await send({"type": "websocket.close", "code": NORMAL})
