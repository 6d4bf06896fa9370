"""The tree stream as bytes (docs/reference/guest-protocol.md, "Tree stream"): entries out of and into numbers and
names."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from opendsec.errors import ProtocolError
from opendsec.model.file import FileKind

ENTRY_LENGTH = struct.Struct("<I")
END = ENTRY_LENGTH.pack(0)
MAX_ENTRY_BYTES = 64 * 1024
"""A name and a link target have at most 4 KiB each, attributes 12 KiB."""
_FIELD = struct.Struct("<HHI")
_NUMBER = struct.Struct("<Q")
_LATEST_NS = 2**62
"""The year 2116; utime(2) takes nothing much later on every file system."""
_KIND, _NAME, _MODE, _MTIME_NS, _SIZE, _LINK, _UID, _GID, _XATTR = 40, 42, 33, 37, 36, 41, 38, 39, 47


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One file, directory or symbolic link of a tree. `name` is relative to the root of the tree, as bytes."""

    kind: FileKind
    name: bytes
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    link: bytes = b""
    uid: int | None = None
    """None: of whoever unpacks it. Another one needs root's rights there."""
    gid: int | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    """Extended attributes, capabilities among them."""


def pack_entry(entry: TreeEntry) -> bytes:
    """The entry's head; a file's `size` bytes of content follow it."""
    fields = [
        _field(_KIND, entry.kind.value.encode("ascii")),
        _field(_NAME, entry.name),
        _field(_MODE, _NUMBER.pack(entry.mode)),
        _field(_MTIME_NS, _NUMBER.pack(max(0, entry.mtime_ns))),
    ]
    if entry.kind is FileKind.FILE:
        fields.append(_field(_SIZE, _NUMBER.pack(entry.size)))
    if entry.kind is FileKind.SYMLINK:
        fields.append(_field(_LINK, entry.link))
    if entry.uid is not None:
        fields.append(_field(_UID, _NUMBER.pack(entry.uid)))
    if entry.gid is not None:
        fields.append(_field(_GID, _NUMBER.pack(entry.gid)))
    fields += [_field(_XATTR, name + b"\0" + value) for name, value in entry.xattrs]
    body = b"".join(fields)
    return ENTRY_LENGTH.pack(len(body)) + body


def unpack_entry(body: bytes) -> TreeEntry:
    """The fields of one head. Raises ProtocolError when they make no sense; names are not judged here."""
    fields, xattrs = _fields(body)
    try:
        kind = FileKind(fields[_KIND].decode("ascii"))
        name = fields[_NAME]
    except (KeyError, ValueError) as exc:
        raise ProtocolError(f"a tree entry without a known kind or without a name: {exc}") from exc
    return TreeEntry(
        kind=kind,
        name=name,
        mode=_number(fields, _MODE),
        mtime_ns=min(_number(fields, _MTIME_NS), _LATEST_NS),
        size=_number(fields, _SIZE),
        link=fields.get(_LINK, b""),
        uid=_number(fields, _UID) if _UID in fields else None,
        gid=_number(fields, _GID) if _GID in fields else None,
        xattrs=tuple(xattrs),
    )


def _field(tag: int, data: bytes) -> bytes:
    return _FIELD.pack(tag, 0, len(data)) + data


def _fields(body: bytes) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Fields by their number, and the one there may be many of."""
    found: dict[int, bytes] = {}
    xattrs: list[tuple[bytes, bytes]] = []
    position = 0
    while position < len(body):
        if len(body) - position < _FIELD.size:
            raise ProtocolError("a tree entry ends inside a field")
        tag, zero, length = _FIELD.unpack_from(body, position)
        position += _FIELD.size
        if zero != 0 or length > len(body) - position:
            raise ProtocolError("a tree entry has a field that does not fit")
        data = body[position : position + length]
        position += length
        if tag == _XATTR:
            name, _, value = data.partition(b"\0")
            xattrs.append((name, value))
        else:
            found[tag] = data
    return found, xattrs


def _number(fields: dict[int, bytes], tag: int) -> int:
    data = fields.get(tag)
    if data is None:
        return 0
    if len(data) != _NUMBER.size:
        raise ProtocolError(f"number {tag} of a tree entry has {len(data)} bytes")
    return int(_NUMBER.unpack(data)[0])
