"""Frames on one asyncio connection: the fast and distrustful part of the channel.

Reads go into one scratch buffer per thread, so a thousand idle channels cost nothing and a busy one copies its payload
once. A peer that breaks the framing, or does not read what it is sent, loses the connection; nothing here can grow
beyond one frame in and `MAX_UNSENT_BYTES` out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, cast

from opendsec.guest import protocol
from opendsec.guest.base import GuestError, GuestLostError
from opendsec.wire.frames import HEADER

FrameSink = Callable[[int, int, int, memoryview], None]
"""(type, id, flags, payload); the payload is valid during the call only. Raises FieldError for what does not fit."""

SCRATCH_BYTES: Final = 768 * 1024
MAX_UNSENT_BYTES: Final = 32 * 1024 * 1024


class _Scratch(threading.local):
    """The thread's read buffer: used between `get_buffer` and `buffer_updated`, which the event loop calls in a row."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(SCRATCH_BYTES))


_scratch = _Scratch()


class FrameLink(asyncio.BufferedProtocol):
    """One connection. `sink` gets every frame, `lost` is called once at the end with the reason."""

    def __init__(self, sink: FrameSink, lost: Callable[[GuestLostError], None]) -> None:
        self._sink = sink
        self._on_lost = lost
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._reason: str | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def pause_writing(self) -> None:
        self.fail("the guest agent does not read what it is sent")

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        view = _scratch.view
        length = len(self._rest)
        if length:
            view[:length] = self._rest
            return view[length:]
        return view

    def buffer_updated(self, nbytes: int) -> None:
        view = _scratch.view
        end = len(self._rest) + nbytes
        try:
            position = self._parse(view, end)
        except protocol.FieldError as exc:
            self.fail(f"the guest agent broke the protocol: {exc}")
            return
        except GuestError as exc:
            self.fail(f"the guest agent ended the connection: {exc.code}: {exc}")
            return
        self._rest = bytes(view[position:end]) if position < end else b""

    def _parse(self, view: memoryview, end: int) -> int:
        position = 0
        sink, size, unpack = self._sink, HEADER.size, HEADER.unpack_from
        while end - position >= size:
            length, frame_id, frame_type, flags, zero = unpack(view, position)
            if zero or length > protocol.MAX_FROM_GUEST:
                raise protocol.FieldError(f"a frame of {length} bytes" if not zero else "no frame where one must be")
            stop = position + size + length
            if stop > end:
                break
            sink(frame_type, frame_id, flags, view[position + size : stop])
            if self._reason is not None:
                return end
            position = stop
        return position

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reason is None:
            cut = " in the middle of a frame" if self._rest else ""
            self._reason = f"the connection to the guest agent ended{cut}" + (f": {exc}" if exc else "")
        self._rest = b""
        self._transport = None
        self.closed.set()
        self._on_lost(GuestLostError(self._reason))

    def send(self, frame_type: int, frame_id: int, payload: bytes | memoryview = b"", *, flags: int = 0) -> None:
        """Hand one frame to the transport. Raises GuestLostError."""
        if self._transport is None or self._reason is not None:
            raise GuestLostError(self._reason or "not connected")
        header = HEADER.pack(len(payload), frame_id, frame_type, flags, 0)
        if len(payload) < 4096:
            self._transport.write(header + payload)
        else:
            self._transport.writelines((header, payload))

    def fail(self, reason: str) -> None:
        """Give the connection up at once, for this reason (the first one counts)."""
        if self._reason is None:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after what was sent has gone out."""
        if self._reason is None:
            self._reason = "the channel was closed"
        if self._transport is not None:
            self._transport.close()

    @property
    def reason(self) -> str | None:
        """Why nothing more can be sent; None while the connection is good."""
        return self._reason if self._transport is None or self._reason else None
