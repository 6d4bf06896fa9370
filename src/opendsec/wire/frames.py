"""Length-prefixed frames over any byte stream, for the guest channel and for HTTP bodies that stream.

One frame is a 12-byte little-endian header and a payload:

    u32 length   bytes of payload, 0 … MAX_PAYLOAD
    u32 id       the conversation this frame belongs to (0 in HTTP bodies)
    u8  type     meaning depends on the channel
    u8  flags    meaning depends on the type
    u16 zero     must be 0; a stream that lost its place is noticed here

Standard library only: nothing here knows what a payload means. A parser that has raised stays unusable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("<IIBBH")
MAX_PAYLOAD = 4 * 1024 * 1024
"""A START frame holds up to 3 MiB of script and 1 MiB of environment."""


class FrameError(ValueError):
    """The bytes are not frames."""


class Frame(NamedTuple):
    """One frame; `payload` may be a view of a buffer the reader owns."""

    type: int
    id: int
    flags: int
    payload: bytes | memoryview


def pack_frame(frame_type: int, frame_id: int, payload: bytes | memoryview = b"", *, flags: int = 0) -> bytes:
    """The frame as bytes. Raises FrameError when the payload is larger than MAX_PAYLOAD."""
    return pack_header(frame_type, frame_id, len(payload), flags=flags) + bytes(payload)


def pack_header(frame_type: int, frame_id: int, length: int, *, flags: int = 0) -> bytes:
    """Only the header, for callers that send header and payload as two buffers (no copy)."""
    if length > MAX_PAYLOAD:
        raise FrameError(f"payload of {length} bytes, at most {MAX_PAYLOAD}")
    return HEADER.pack(length, frame_id, frame_type, flags, 0)


class FrameParser:
    """Turns chunks of a stream into frames, holding at most one incomplete frame.

    `max_payload` may be lowered where large frames make no sense. `pending` says how many bytes wait for the rest of a
    frame: a stream that ends with `pending > 0` was cut.
    """

    def __init__(self, max_payload: int = MAX_PAYLOAD) -> None:
        self._buffer = bytearray()
        self._max_payload = max_payload

    @property
    def pending(self) -> int:
        return len(self._buffer)

    def feed(self, chunk: bytes | memoryview) -> Iterator[Frame]:
        """All frames that are complete now. Consume the iterator before the next call. Raises FrameError."""
        self._buffer += chunk
        position = 0
        try:
            while len(self._buffer) - position >= HEADER.size:
                length, frame_id, frame_type, flags, zero = HEADER.unpack_from(self._buffer, position)
                if zero != 0:
                    raise FrameError("reserved header bytes are not zero: the stream lost its place")
                if length > self._max_payload:
                    raise FrameError(f"frame announces {length} bytes, at most {self._max_payload}")
                end = position + HEADER.size + length
                if len(self._buffer) < end:
                    break
                payload = bytes(memoryview(self._buffer)[position + HEADER.size : end])
                position = end
                yield Frame(frame_type, frame_id, flags, payload)
        finally:
            if position:
                del self._buffer[:position]
