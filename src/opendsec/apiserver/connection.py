"""One HTTP/1.1 connection to an edge, as a protocol on the event loop.

Small on purpose: one request at a time, no redirects, no cookies, no decompression. Bodies flow both ways with
back-pressure (reading stops above HIGH_WATER waiting bytes, writing waits for the kernel). A body is over only when
the peer ended it properly; anything else raises ConnectionLostError.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import httptools

from opendsec.server.runner import WRITE_BUFFER

HIGH_WATER = 1024 * 1024
LOW_WATER = 256 * 1024


class ConnectionLostError(Exception):
    """The edge closed the connection, or broke HTTP; `started` says whether any of the answer had arrived."""

    def __init__(self, reason: str, *, started: bool) -> None:
        super().__init__(reason)
        self.started = started


class EdgeConnection(asyncio.Protocol):
    """Use: `send_head`, `send_body`…, `head`, then `chunks` to its end; `reusable` says whether it may serve again."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._lost = ""
        self._keep_alive = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.complete = True
        self.request_sent = True

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(f"broken HTTP: {exc}")
            self.abort()
        if self._waiting_bytes > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "the edge closed the connection")
        self.resume_writing()

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # --- httptools callbacks ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        self.started = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._waiting_bytes += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        self.complete = True
        self._wake()

    # --- what the link uses ---

    @property
    def reusable(self) -> bool:
        """Request and answer are whole, nothing is left over, and the edge keeps the connection open."""
        settled = self.complete and self.request_sent and not self._chunks and not self._paused
        return settled and self._keep_alive and not self._lost

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    @property
    def drained(self) -> bool:
        """The answer is whole and all of it has been handed out."""
        return self.complete and not self._chunks

    def begin(self, head: bytes, *, whole: bool) -> None:
        """Forget the last exchange and send the head of a request; `whole`: its body is in there too.

        Otherwise set `request_sent` once the rest is sent.
        """
        self.status = 0
        self.headers = []
        self.started = self.complete = False
        self.request_sent = whole
        self._write(head)

    async def send_body(self, *parts: bytes) -> None:
        """Send more, waiting while the kernel has no room."""
        self._check_open()
        assert self._transport is not None
        self._transport.writelines(parts)
        if self._writable is not None:
            await self._writable
            self._check_open()

    def _write(self, data: bytes) -> None:
        self._check_open()
        assert self._transport is not None
        self._transport.write(data)

    async def head(self) -> int:
        """The status, once the answer's head is there."""
        while not self.started:
            await self._wait()
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer's body. Ends only at its proper end."""
        while True:
            while self._chunks:
                yield self._taken(self._chunks.popleft())
            if self.complete:
                return
            await self._wait()

    def at_hand(self) -> bytes:
        """What of the body has come and was not taken yet; b"" when there is nothing."""
        parts = list(self._chunks)
        self._chunks.clear()
        return self._taken(b"".join(parts))

    def _taken(self, data: bytes) -> bytes:
        self._waiting_bytes -= len(data)
        if self._paused and self._waiting_bytes < LOW_WATER and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """Close at once; what is not sent yet is dropped."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._check_open()
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_open(self) -> None:
        if self._lost:
            raise ConnectionLostError(self._lost, started=self.started)

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._wake()
