"""The chunks a start reads, compressed and in the order they lie in the data; and the layer's metadata, compressed.

    <store>/profiles/<hex of the layer>.meta     a zlib stream
    <store>/profiles/<hex of the layer>.pack
    "ODSPACK1", count (4 bytes), then for each chunk its number and compressed size (4 bytes each),
    then for each a zlib stream

A start that is waited for is bound by the bytes it has to bring: code and text compress to two fifths, metadata to a
sixth. 64 KiB at a time lose nothing against all at once. zlib, because it is everywhere Python is.

Both are advice as a profile is: sizes are bounded here, and whoever uses them checks every chunk against the table,
and metadata against its digest. Beside a profile, and gone with it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opendsec.model.image import Layer
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.profiles import MOST_CHUNKS
from opendsec.store.loading.sources import StoreFiles
from opendsec.store.manifest import hex_of

LEAST_METADATA_BYTES = 256 << 10
"""Of less the round trip costs more than it saves."""
MOST_METADATA_BYTES = 64 << 20
"""Of more the memory."""
GROUP_BYTES = 256 << 10
"""Of one request, about: small enough that what is needed first is there soon."""
_MAGIC = b"ODSPACK1"
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<II")
_HEAD_BYTES = len(_MAGIC) + _COUNT.size
_MOST_CHUNK_BYTES = CHUNK_BYTES + 1024
_LEVEL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One chunk of a pack."""

    number: int
    offset: int
    size: int


def pack_name(layer_digest: str) -> str:
    """Of the file, relative to the store."""
    return f"profiles/{hex_of(layer_digest)}.pack"


def metadata_name(layer_digest: str) -> str:
    """Of the file, relative to the store."""
    return f"profiles/{hex_of(layer_digest)}.meta"


def is_metadata_packed(layer: Layer) -> bool:
    """Whether it pays to have a layer's metadata compressed as well."""
    return layer.data is not None and LEAST_METADATA_BYTES <= layer.mounted.size_bytes <= MOST_METADATA_BYTES


def encode_metadata(content: bytes) -> bytes:
    """The bytes of that file."""
    return zlib.compress(content, _LEVEL)


def read_metadata(files: StoreFiles, layer: Layer) -> bytes | None:
    """The layer's metadata, **not checked**; None when the store has it not compressed, or it is none of that size.

    OSError when the store does not answer.
    """
    size = layer.mounted.size_bytes
    if not is_metadata_packed(layer):
        return None
    try:
        stream = files.read_whole(metadata_name(layer.digest), most=size)
    except FileNotFoundError:
        return None
    content = _inflated(stream, size)
    return content if content is not None and len(content) == size else None


def encode_pack(chunks: Iterable[tuple[int, bytes]]) -> bytes:
    """The bytes of the file."""
    packed = [(number, zlib.compress(content, _LEVEL)) for number, content in chunks]
    index = b"".join(_ENTRY.pack(number, len(stream)) for number, stream in packed)
    return _MAGIC + _COUNT.pack(len(packed)) + index + b"".join(stream for _, stream in packed)


def decode_index(head: bytes, layer: Layer) -> tuple[Entry, ...]:
    """What is in a pack, of its first bytes; nothing when they are none, or say what cannot be."""
    if layer.data is None or len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
        return ()
    (count,) = _COUNT.unpack_from(head, len(_MAGIC))
    offset = _HEAD_BYTES + count * _ENTRY.size
    if count > MOST_CHUNKS or len(head) < offset:
        return ()
    found = []
    for number, size in _ENTRY.iter_unpack(head[_HEAD_BYTES:offset]):
        if number >= chunk_count(layer.data.size_bytes) or size > _MOST_CHUNK_BYTES:
            return ()
        found.append(Entry(number=number, offset=offset, size=size))
        offset += size
    return tuple(found)


MOST_HEAD_BYTES = _HEAD_BYTES + MOST_CHUNKS * _ENTRY.size
"""Of a pack, what says what is in it."""


def read_head(files: StoreFiles, layer: Layer) -> bytes:
    """The first bytes of the layer's pack, what says what is in it and maybe more; none when the store has none, or
    does not answer.
    """
    try:
        return files.read(pack_name(layer.digest), 0, MOST_HEAD_BYTES)
    except OSError:
        return b""


def groups(entries: Iterable[Entry]) -> list[tuple[Entry, ...]]:
    """Neighbours in the file that are read with one request."""
    found: list[list[Entry]] = []
    for entry in entries:
        if found and entry.offset + entry.size - found[-1][0].offset <= GROUP_BYTES:
            found[-1].append(entry)
        else:
            found.append([entry])
    return [tuple(group) for group in found]


def read_group(files: StoreFiles, layer_digest: str, group: Sequence[Entry]) -> bytes:
    """The bytes of one group, as many as could be had, **not checked**. OSError."""
    first, end = group[0].offset, group[-1].offset + group[-1].size
    return files.read(pack_name(layer_digest), first, end - first)


def chunks_of(group: Sequence[Entry], content: bytes) -> Mapping[int, bytes]:
    """Chunks in the bytes of a group, **not checked**."""
    first = group[0].offset
    found = {}
    for entry in group:
        chunk = inflated(content[entry.offset - first : entry.offset - first + entry.size])
        if chunk is not None:
            found[entry.number] = chunk
    return found


def inflated(stream: bytes) -> bytes | None:
    """At most a chunk, whatever the stream says; None when it is none."""
    return _inflated(stream, CHUNK_BYTES)


def _inflated(stream: bytes, most: int) -> bytes | None:
    try:
        return zlib.decompressobj().decompress(stream, most)
    except zlib.error:
        return None
