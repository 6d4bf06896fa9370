"""The raw tree stream that `pack_upper` sends, taken apart. Pure, and distrustful: any bytes in, checked events out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from opendsec.guest import protocol
from opendsec.guest.protocol import FILE_KINDS, FieldError, Fields, unsigned

MAX_ENTRY: Final = 64 * 1024
MAX_PIECE: Final = 64 * 1024
_PIECE_HEAD = 12
_MAX_MODE, _MAX_ID = 0o7777, (1 << 32) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEntry:
    """One entry; names are bytes, relative to the root of the tree, which is the first entry and has none."""

    name: bytes
    kind: str
    hard_link: bytes | None = None
    """The name of an earlier entry that is this file; nothing else counts then."""
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    uid: int = 0
    gid: int = 0
    link: bytes = b""
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class RawPiece:
    """Content of the entry before, at this offset; none of no bytes."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RawContentEnd:
    """The entry before has all its content: what no piece has brought is holes."""


RawEvent = RawEntry | RawPiece | RawContentEnd


class RawTreeReader:
    """Feed it what arrives. At the end `finished` must be true, or the stream was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size: int | None = None
        self._next = 0
        self.finished = False

    def feed(self, chunk: bytes) -> Iterator[RawEvent]:
        """What is complete. Raises FieldError for bytes that cannot be."""
        self._buffer += chunk
        position = 0
        while True:
            event, used = self._piece(position) if self._size is not None else self._entry(position)
            position += used
            if not used:
                break
            if event is not None:
                yield event
        del self._buffer[:position]
        if self.finished and self._buffer:
            raise FieldError("bytes after the end of the tree")

    def _entry(self, at: int) -> tuple[RawEntry | None, int]:
        have = len(self._buffer) - at
        if have < 4 or self.finished:
            return None, 0
        length = int.from_bytes(self._buffer[at : at + 4], "little")
        if length > MAX_ENTRY:
            raise FieldError(f"an entry of {length} bytes")
        if have - 4 < length:
            return None, 0
        if length == 0:
            self.finished = True
            return None, 4
        entry = decode_raw_entry(bytes(self._buffer[at + 4 : at + 4 + length]))
        if entry.kind == "file" and entry.hard_link is None:
            self._size, self._next = entry.size, 0
        return entry, 4 + length

    def _piece(self, at: int) -> tuple[RawPiece | RawContentEnd | None, int]:
        assert self._size is not None
        have = len(self._buffer) - at
        if have < _PIECE_HEAD:
            return None, 0
        offset = int.from_bytes(self._buffer[at : at + 8], "little")
        length = int.from_bytes(self._buffer[at + 8 : at + _PIECE_HEAD], "little")
        if length > MAX_PIECE or (length and (offset < self._next or offset + length > self._size)):
            raise FieldError(f"{length} bytes of content at {offset}, of a file of {self._size}")
        if have - _PIECE_HEAD < length:
            return None, 0
        if not length:
            self._size = None
            return RawContentEnd(), _PIECE_HEAD
        start = at + _PIECE_HEAD
        self._next = offset + length
        return RawPiece(offset, bytes(self._buffer[start : start + length])), _PIECE_HEAD + length


def decode_raw_entry(payload: bytes) -> RawEntry:
    """One entry's fields. Raises FieldError."""
    xattrs: list[tuple[bytes, bytes]] = []
    fields: Fields = {}
    for tag, data in protocol.iter_fields(payload):
        fields[tag] = data
        if tag == protocol.T_XATTR:
            name, found, value = data.partition(b"\0")
            if not found or not name:
                raise FieldError("an attribute without a name")
            xattrs.append((name, value))
    kind = protocol.text(fields, protocol.T_KIND)
    name = fields.get(protocol.T_NAME, b"")
    if kind not in FILE_KINDS or b"\0" in name:
        raise FieldError(f"an entry of kind {kind[:40]!r}, or with a NUL in its name")
    if protocol.T_HARD_LINK in fields:
        return RawEntry(name=name, kind=kind, hard_link=fields[protocol.T_HARD_LINK])
    return _whole(fields, name, kind, tuple(xattrs))


def _whole(fields: Fields, name: bytes, kind: str, xattrs: tuple[tuple[bytes, bytes], ...]) -> RawEntry:
    device = unsigned(fields, protocol.T_DEVICE, 0)
    mtime = unsigned(fields, protocol.T_MTIME_NS)
    entry = RawEntry(
        name=name,
        kind=kind,
        mode=unsigned(fields, protocol.T_MODE),
        mtime_ns=mtime - (1 << 64) if mtime >> 63 else mtime,
        size=unsigned(fields, protocol.T_SIZE),
        uid=unsigned(fields, protocol.T_UID),
        gid=unsigned(fields, protocol.T_GID),
        link=fields.get(protocol.T_LINK, b""),
        device=(device >> 32, device & 0xFFFFFFFF),
        xattrs=xattrs,
    )
    if entry.mode > _MAX_MODE or max(entry.uid, entry.gid) > _MAX_ID:
        raise FieldError("an impossible mode or owner")
    if (kind == "symlink") != bool(entry.link) or b"\0" in entry.link:
        raise FieldError("a symbolic link to nothing, or a target of something else")
    return entry
