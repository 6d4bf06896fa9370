"""A connection to a port inside a sandbox: `POST /v1/sandboxes/{id}/ports/{port}`, one request for each connection.

The request's body is what goes in, as it comes; its end is the end of that direction. The answer is frames
(`wire.frames`, id 0): PORT_DATA, PORT_EOF (the other side has ended its direction), PORT_ERROR (JSON error, last) and,
in silence, PORT_KEEPALIVE. It begins when the connection is made, so a port nobody listens on is a plain error, and
ends when both directions have. An answer that ends before PORT_EOF or PORT_ERROR was cut.

Each side is read no faster than the other takes it. While a connection is open the sandbox is not idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.edge import outcome
from opendsec.edge.node import Node
from opendsec.edge.requests import nothing_else, project_of
from opendsec.guest.base import CHUNK_BYTES, Guest, GuestError, GuestLostError, GuestStream
from opendsec.server.asgi import Receive, Scope, Send, body_chunks, query
from opendsec.server.streams import first_failure, raise_when_gone
from opendsec.wire import codec
from opendsec.wire.contracts import KEEPALIVE_S, PORT_DATA, PORT_EOF, PORT_ERROR, PORT_KEEPALIVE, PORT_MEDIA_TYPE
from opendsec.wire.frames import pack_frame

_HEAD = [(b"content-type", PORT_MEDIA_TYPE.encode("ascii"))]
_NOBODY = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})


class PortRoutes:
    """One per edge."""

    def __init__(self, node: Node, *, keepalive_s: float = KEEPALIVE_S) -> None:
        self._node = node
        self._keepalive_s = keepalive_s

    async def connect(self, sandbox_id: str, port: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST ports/{port}"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        number = check_port(port)
        nothing_else(query(scope))
        sandbox.require(Capability.PORTS)
        async with sandbox.working() as guest, dialled(guest, number) as stream:
            await relay(stream, receive, send, keepalive_s=self._keepalive_s)


def check_port(text: str) -> int:
    """Raises InvalidSpecError."""
    if text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536:
        return int(text)
    raise errors.InvalidSpecError(f"port: {text[:20]!r} is not between 1 and 65535", detail={"field": "port"})


@contextlib.asynccontextmanager
async def dialled(guest: Guest, port: int) -> AsyncIterator[GuestStream]:
    """A connection to a port inside, closed afterwards. Raises ConflictError when nobody listens there."""
    try:
        stream = await guest.dial(port)
    except GuestError as exc:
        if exc.errno in _NOBODY:
            raise errors.ConflictError(
                f"port {port}: {os.strerror(exc.errno)} inside the sandbox",
                detail={"port": port, "errno": errno.errorcode.get(exc.errno, "")},
                remedy="start what listens there first, on 127.0.0.1 or on all addresses",
                retryable=True,
            ) from exc
        raise outcome.refusal(exc) from exc
    try:
        yield stream
    finally:
        with contextlib.suppress(GuestLostError, GuestError):
            await stream.aclose()


async def relay(stream: GuestStream, receive: Receive, send: Send, *, keepalive_s: float = KEEPALIVE_S) -> None:
    """Both directions, until both have ended. For whatever else is a stream of bytes (a display, a console), too.

    Raises GuestLostError only before anything was answered; ClientGoneError.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    down = _Down(send, keepalive_s)
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_up(stream, receive, down))
            beat = group.create_task(down.beat())
            await down.carry(stream)
            await down.nothing_more_up.wait()
            watch.cancel()
            beat.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    await down.end()


class _Down:
    """The direction to the caller."""

    def __init__(self, send: Send, keepalive_s: float) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._turn = asyncio.Lock()
        self._said_at = asyncio.get_running_loop().time()
        self.nothing_more_up = asyncio.Event()
        """The other direction has ended, or nobody takes it any more."""

    async def carry(self, stream: GuestStream) -> None:
        """What comes out of the sandbox, to its end."""
        try:
            while data := await stream.read():
                for start in range(0, len(data), CHUNK_BYTES):
                    await self._say(PORT_DATA, data[start : start + CHUNK_BYTES])
        except (GuestError, GuestLostError) as exc:
            lost = errors.SandboxLostError(f"the connection ended inside the sandbox: {exc}", retryable=False)
            await self._say(PORT_ERROR, codec.encode_error(lost))
            self.nothing_more_up.set()
            return
        await self._say(PORT_EOF)

    async def beat(self) -> None:
        """Something now and then, so that both ends notice when the way between them is cut."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._said_at + self._keepalive_s - loop.time()))
            if loop.time() >= self._said_at + self._keepalive_s:
                await self._say(PORT_KEEPALIVE)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _say(self, kind: int, payload: bytes = b"") -> None:
        async with self._turn:
            self._said_at = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": pack_frame(kind, 0, payload), "more_body": True})


async def _up(stream: GuestStream, receive: Receive, down: _Down) -> None:
    """What goes into the sandbox, then the caller's leaving. What it does not take any more is dropped."""
    taken = True
    async for chunk in body_chunks(receive):
        if taken:
            taken = await _put(stream, chunk)
    if taken:
        with contextlib.suppress(GuestError, GuestLostError):
            await stream.write_eof()
    down.nothing_more_up.set()
    await raise_when_gone(receive)


async def _put(stream: GuestStream, data: bytes) -> bool:
    """False: nobody reads there any more."""
    try:
        await stream.write(data)
    except (GuestError, GuestLostError):
        return False
    return True
