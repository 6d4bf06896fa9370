"""File operations and dials: conversations of their own, with credit in both directions, gone with the connection.

The guest may send what it has credit for and nothing more (else FieldError); the host grants as its reader takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

from opendsec.guest import protocol
from opendsec.guest.base import GuestError, GuestLostError, GuestStream

Send = Callable[[int, int, bytes | memoryview], None]
"""Sends one frame: (type, id, payload)."""

_GRANT_AT: Final = protocol.WINDOW_BYTES // 2
_MAX_CREDIT: Final = 1 << 40
_PIECE: Final = 128 * 1024


class Call:
    """One FS or DIAL conversation, from its first frame to its last. Used as `with`: leaving it early cancels."""

    def __init__(self, call_id: int, send: Send, forget: Callable[[int], None]) -> None:
        self.id = call_id
        self._send = send
        self._forget = forget
        self._answer: bytes | None = None
        self._chunks: deque[bytes] = deque()
        self._ended = False
        self._error: GuestError | GuestLostError | None = None
        self._may_receive = protocol.WINDOW_BYTES
        self._taken = 0
        self._may_send = protocol.WINDOW_BYTES
        self._changed: asyncio.Future[None] | None = None
        self._open = True

    def on_frame(self, frame_type: int, payload: memoryview) -> None:
        """One frame of this conversation."""
        if frame_type == protocol.DATA:
            self._may_receive -= len(payload)
            if self._may_receive < 0 or self._ended or not payload:
                raise protocol.FieldError("DATA beyond its credit, after END, or empty")
            self._chunks.append(bytes(payload))
            if len(self._chunks) > 1024:
                joined = b"".join(self._chunks)
                self._chunks.clear()
                self._chunks.append(joined)
        elif frame_type == protocol.OK and self._answer is None:
            self._answer = bytes(payload)
        elif frame_type == protocol.END:
            self._ended = True
        elif frame_type == protocol.CREDIT and len(payload) == 4:
            self._may_send += int.from_bytes(payload, "little")
            if self._may_send > _MAX_CREDIT:
                raise protocol.FieldError("impossible credit")
        elif frame_type == protocol.ERROR:
            self.fail(protocol.decode_error(payload))
            return
        else:
            raise protocol.FieldError(f"frame type {frame_type} in a call")
        self._wake()

    def fail(self, error: GuestError | GuestLostError) -> None:
        """The conversation is over."""
        if self._error is None:
            self._error = error
        self._open = False
        self._forget(self.id)
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _change(self) -> None:
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    async def answer(self) -> bytes:
        """The fields of OK. Raises GuestError, GuestLostError."""
        while self._answer is None:
            if self._error is not None:
                raise self._error
            await self._change()
        return self._answer

    async def read(self) -> bytes:
        """The next bytes; b"" after END. Raises GuestError, GuestLostError."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._change()
        chunk = self._chunks.popleft()
        self._taken += len(chunk)
        if self._taken >= _GRANT_AT and self._open and not self._ended:
            self._may_receive += self._taken
            self._send(protocol.CREDIT, self.id, self._taken.to_bytes(4, "little"))
            self._taken = 0
        return chunk

    async def write(self, data: bytes | memoryview) -> None:
        """Send as credit allows. Raises GuestError, GuestLostError."""
        view = memoryview(data)
        while view:
            while self._may_send <= 0 and self._error is None:
                await self._change()
            if self._error is not None:
                raise self._error
            piece = view[: min(self._may_send, _PIECE)]
            self._may_send -= len(piece)
            self._send(protocol.DATA, self.id, piece)
            view = view[len(piece) :]

    def write_eof(self) -> None:
        """END in our direction. Raises GuestError, GuestLostError."""
        if self._error is not None:
            raise self._error
        self._send(protocol.END, self.id, b"")

    def done(self) -> None:
        """The agent has sent its last frame: nothing to cancel any more."""
        self._open = False
        self._forget(self.id)

    @property
    def ended(self) -> bool:
        """END has arrived."""
        return self._ended

    def cancel(self) -> None:
        """Abandon it: what still arrives under its id is dropped by the channel."""
        if self._open:
            self.done()
            self._chunks.clear()
            self._send(protocol.CANCEL, self.id, b"")

    @contextmanager
    def cancelled_on_failure(self) -> Iterator[None]:
        """Cancels the call when the block raises, whatever it raises."""
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(GuestLostError):
            self.cancel()


class DialledStream(GuestStream):
    """A connection to a port inside."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> bytes:
        return await self._call.read()

    async def write(self, data: bytes) -> None:
        await self._call.write(data)

    async def write_eof(self) -> None:
        self._call.write_eof()

    async def aclose(self) -> None:
        with self._call:
            pass
