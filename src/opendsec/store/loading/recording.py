"""What a start has read of a mounted layer: found in the page cache some time later, and kept as a profile.

    <store>/profiles/<hex of the layer>.meta, .pack, .json     in this order: who sees the profile sees the others

Only for a layer that nobody had mounted before on this node: all of it that is in memory was read since. So nothing
is between a start and its reads while they are recorded, and it is the same for all loaders. A scan opens each file of
the layer once; 10,000 files cost 0.1 to 0.4 s of CPU, once for a layer and all nodes.

Files whose names are no UTF-8 are left out, and so are files that no longer fit in what a profile may hold. Needs
Linux 6.5 (cachestat(2)); without, nothing is recorded, which is logged.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux.page_cache import extents, resident_parts
from opendsec.model.image import Layer
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.packs import encode_metadata, encode_pack, is_metadata_packed, metadata_name, pack_name
from opendsec.store.loading.profiles import MOST_CHUNKS, MOST_PARTS, FileRead, Profile, encode_profile, profile_name
from opendsec.store.loading.sources import StoreFiles

log = logging.getLogger(__name__)

RECORD_S = 5.0
"""From the first start that a layer without a profile is mounted for."""
_REST_EVERY, _REST_S = 256, 0.002
"""Files, and how long others may have the CPU then."""
_EXTENT_BYTES = 1 << 20
"""EROFS tells of no longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One file with pages in memory."""

    read: FileRead
    at: int
    """Where it begins in the layer's data."""
    chunks: frozenset[int]


def found_in_memory(directory_fd: int) -> list[Found]:
    """Of the files below a directory of one mounted layer, those with pages in memory, as they lie in its data.

    OSError where the kernel cannot tell.
    """
    found = []
    seen: set[int] = set()
    rest = threading.Event()
    for number, (path, fd, status) in enumerate(_files(directory_fd, "")):
        if status.st_ino not in seen:
            seen.add(status.st_ino)
            parts = resident_parts(fd, status.st_size)
            if parts:
                found.append(_found(path, fd, status.st_size, parts))
        if number % _REST_EVERY == 0:
            rest.wait(_REST_S)
    return sorted(found, key=lambda one: one.at)


def _files(directory_fd: int, prefix: str) -> Iterator[tuple[str, int, os.stat_result]]:
    """Regular files: path, a descriptor that is good until the next one, and status."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    here = os.open(".", flags | os.O_DIRECTORY, dir_fd=directory_fd)
    try:
        with os.scandir(here) as entries:
            kinds = {one.name: one.is_dir(follow_symlinks=False) for one in entries if _is_to_be_looked_at(one)}
        for name, is_directory in sorted(kinds.items()):
            fd = os.open(name, flags | (os.O_DIRECTORY if is_directory else 0), dir_fd=here)
            try:
                if is_directory:
                    yield from _files(fd, f"{prefix}{name}/")
                else:
                    yield f"{prefix}{name}", fd, os.fstat(fd)
            finally:
                os.close(fd)
    finally:
        os.close(here)


def _is_to_be_looked_at(entry: os.DirEntry[str]) -> bool:
    is_text = not any("\ud800" <= letter <= "\udfff" for letter in entry.name)
    return is_text and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))


def _found(path: str, fd: int, size_bytes: int, parts: Sequence[tuple[int, int]]) -> Found:
    chunks: set[int] = set()
    lies = extents(fd, most=size_bytes // _EXTENT_BYTES + 2)
    for offset, length in parts:
        for start, at, span in lies:
            low, high = max(offset, start), min(offset + length, start + span)
            if low < high:
                chunks.update(range((at + low - start) // CHUNK_BYTES, -(-(at + high - start) // CHUNK_BYTES)))
    return Found(read=FileRead(path=path, parts=tuple(parts)), at=lies[0][1] if lies else 0, chunks=frozenset(chunks))


def profile_of(layer: Layer, found: Sequence[Found], *, command: str = "", now: float) -> Profile | None:
    """What was found as a profile, no more than one may hold; None when nothing was. Pure."""
    if layer.data is None:
        return None
    count = chunk_count(layer.data.size_bytes)
    chunks: set[int] = set()
    reads: list[FileRead] = []
    parts = 0
    for one in found:
        more = chunks | {number for number in one.chunks if number < count}
        if len(more) <= MOST_CHUNKS and parts + len(one.read.parts) <= MOST_PARTS:
            chunks, parts = more, parts + len(one.read.parts)
            reads.append(one.read)
    if not chunks:
        return None
    return Profile(
        layer=layer.digest,
        data=layer.data.digest,
        chunks=tuple(sorted(chunks)),
        recorded_at=now,
        reads=tuple(reads),
        command=command,
    )


def keep_profile(
    profile: Profile, layer: Layer, meta: Path, data: Path, *, store: StoreFiles, local: StoreFiles
) -> StoreFiles:
    """Write a layer's profile, its pack and metadata, compressed, to the store; the profile alone to this node
    where the store takes no writes. Returns which of them has it.

    `meta`, `data`: what the layer is mounted from. OSError when they cannot be read, or nothing can be written.
    """
    try:
        if is_metadata_packed(layer):
            store.write(metadata_name(profile.layer), encode_metadata(meta.read_bytes()))
        store.write(pack_name(profile.layer), _pack(profile, data))
        store.write(profile_name(profile.layer), encode_profile(profile))
    except OSError as error:  # read-only, full or gone: advice can wait
        log.info("profile_not_kept", extra={"fields": {"store": store.address, "why": str(error)}})
        local.write(profile_name(profile.layer), encode_profile(profile))
        return local
    return store


def _pack(profile: Profile, data: Path) -> bytes:
    with data.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # not a page beyond
        pack = encode_pack(
            (number, os.pread(file.fileno(), CHUNK_BYTES, number * CHUNK_BYTES)) for number in profile.chunks
        )
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return pack
