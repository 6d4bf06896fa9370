"""Connections to ports inside a sandbox: one HTTP exchange for each, whose body goes in while its answer comes out.

httpcore sends a request before it looks at the answer, so such an exchange is spoken here, with h11, over a connection
of the pool that is used for nothing else afterwards.
"""

from __future__ import annotations

import math
import secrets
import time
from types import TracebackType
from typing import Self

import h11
import httpcore

from opendsec.client._async.connection import Connection, Lane
from opendsec.client._async.transport import OCTETS, SILENCE_S, Transport, target
from opendsec.client.concurrency import AsyncLock
from opendsec.errors import DeadlineError, InvalidSpecError, OpenDSecError, ProtocolError, TransportError
from opendsec.model.spec import check_seconds
from opendsec.wire import codec
from opendsec.wire.contracts import MAX_JSON_BODY, PORT_DATA, PORT_EOF, PORT_ERROR
from opendsec.wire.frames import FrameError, FrameParser

READ_BYTES = 256 * 1024
_NETWORK = (httpcore.NetworkError, httpcore.TimeoutException, h11.ProtocolError, OSError)


class Ports:
    """The ports of one sandbox; `Sandbox.ports`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def connect(self, port: int, *, timeout: float | None = None) -> PortStream:
        """A connection to a TCP port at 127.0.0.1 inside the sandbox; close it, or use it as `async with`.

        `timeout`: seconds until it is made. While it is open the sandbox is not idle; a pause of a virtual machine, and
        its stop, cut it. Raises ConflictError (retryable) when nobody listens there, InvalidSpecError, DeadlineError,
        SandboxExitedError, UnsupportedError, TransportError.
        """
        check_seconds(timeout, "timeout")
        if type(port) is not int or not 0 < port < 65536:  # also no bool
            raise InvalidSpecError(f"port: {port!r} is not between 1 and 65535", detail={"field": "port"})
        deadline = self._transport.deadline(timeout)
        connection = await self._transport.pool.take(Lane.LONG, deadline=deadline, fresh=True)
        stream = PortStream(self._transport, connection)
        try:
            await stream.begin(target("sandboxes", self._sandbox_id, "ports", str(port)), deadline=deadline)
        except BaseException:
            await stream.aclose()
            raise
        return stream


class PortStream:
    """A stream of bytes both ways. One task may read while another writes. Made by `Ports.connect`."""

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._network = connection.stream.raw
        self._http = h11.Connection(h11.CLIENT)
        self._frames = FrameParser()
        self._data: list[bytes] = []
        self._ended = False
        self._closed = False
        self._request_id = secrets.token_hex(8)
        self._writing = AsyncLock()

    async def begin(self, where: str, *, deadline: float) -> None:
        """Ask, and wait for the connection to be made. Called once, by `Ports.connect`."""
        headers = [*self._transport.headers(self._request_id), (b"Transfer-Encoding", b"chunked")]
        headers.append((b"Content-Type", OCTETS.encode("ascii")))
        path = self._transport.endpoint.prefix + where
        await self._send(h11.Request(method="POST", target=path, headers=headers))
        answer = await self._next_event(deadline)
        if not isinstance(answer, h11.Response):
            raise ProtocolError("the server's answer does not begin as one", request_id=self._request_id)
        if answer.status_code != 200:
            raise await self._refusal(answer.status_code)

    async def read(self) -> bytes:
        """The next bytes; b"" once the other side has ended its direction. Raises TransportError when it was cut,
        SandboxLostError."""
        while not self._data and not self._ended:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                self._take(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                raise TransportError("the connection was cut", request_id=self._request_id)
        return self._data.pop(0) if self._data else b""

    async def write(self, data: bytes) -> None:
        """Send all of it; waits while the other side does not read. Raises TransportError when it was cut."""
        view = memoryview(data)
        while view:
            await self._send(h11.Data(data=bytes(view[:READ_BYTES])))
            view = view[READ_BYTES:]

    async def write_eof(self) -> None:
        """No more is coming; the other direction goes on."""
        await self._send(h11.EndOfMessage())

    async def aclose(self) -> None:
        """End both directions. May be repeated."""
        if not self._closed:
            self._closed = True
            await self._transport.pool.give_back(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _take(self, body: bytes) -> None:
        try:
            for frame in self._frames.feed(body):
                if frame.type == PORT_DATA:
                    self._data.append(bytes(frame.payload))
                elif frame.type == PORT_EOF:
                    self._ended = True
                elif frame.type == PORT_ERROR:
                    raise codec.decode_error(frame.payload)
        except FrameError as exc:
            raise ProtocolError(f"the stream of a port makes no sense: {exc}", request_id=self._request_id) from exc

    async def _send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        if self._closed:
            raise TransportError("this connection is closed", retryable=False)
        try:
            async with self._writing:
                await self._network.write(self._http.send(event) or b"")
        except _NETWORK as exc:
            raise self._cut(exc) from exc

    async def _next_event(self, deadline: float = math.inf) -> type[h11.PAUSED | h11.NEED_DATA] | h11.Event:
        while True:
            patience_s = min(SILENCE_S, max(0.001, deadline - time.monotonic()))
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._network.read(READ_BYTES, timeout=patience_s))
                    continue
            except _NETWORK as exc:
                if isinstance(exc, httpcore.TimeoutException) and patience_s < SILENCE_S:
                    raise DeadlineError("the connection was not made within its time") from exc
                raise self._cut(exc) from exc
            return event

    async def _refusal(self, status: int) -> OpenDSecError:
        body = b""
        while len(body) < MAX_JSON_BODY and isinstance(event := await self._next_event(), h11.Data):
            body += bytes(event.data)
        error = codec.decode_error(body, fallback=f"HTTP {status}")
        error.request_id = error.request_id or self._request_id
        return error

    def _cut(self, exc: Exception) -> TransportError:
        why = "the server went silent" if isinstance(exc, httpcore.TimeoutException) else "the connection was cut"
        return TransportError(f"{why}: {str(exc) or type(exc).__name__}", request_id=self._request_id)
