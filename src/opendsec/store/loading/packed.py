"""A layer's pack as it comes to this node: group by group, each once, and kept here as it came.

    <cache>/data/<hex of the layer>.pack     sparse: the bytes of the store's pack that were had, and zeros

What is kept compressed takes two fifths of the disk, and of the time to write it. Nothing of it is believed: a chunk
counts when its bytes, inflated, have the digest in the table, at each read; so eviction, damage or another pack in its
place make it one that is not here. It is counted in the cache's slots, and given back as they are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from opendsec.model.image import Layer
from opendsec.store.chunks import check_chunk
from opendsec.store.loading.cache import SLOT_BYTES, ChunkCache, data_parts
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fetching import Given
from opendsec.store.loading.packs import (
    MOST_HEAD_BYTES,
    Entry,
    chunks_of,
    decode_index,
    groups,
    inflated,
    pack_name,
    read_head,
)
from opendsec.store.manifest import hex_of

log = logging.getLogger(__name__)


class KeptPack:
    """The part of one pack that is on this node's disk. Threads may share it."""

    def __init__(self, cache: ChunkCache, layer_digest: str) -> None:
        self._cache = cache
        self._name = f"{hex_of(layer_digest)}.pack"

    def write(self, offset: int, content: bytes) -> bool:
        """Keep these bytes; False when there is no room for them, or the disk does not take them."""
        with self._using(offset, len(content)) as slots:
            for slot in slots:
                if not self._cache.claim(self._name, slot):
                    return False
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                fd = os.open(self._cache.root / self._name, flags, 0o600)
                try:
                    return os.pwrite(fd, content, offset) == len(content)
                finally:
                    os.close(fd)
            except OSError as error:
                log.info("pack_not_kept", extra={"fields": {"file": self._name, "why": str(error)}})
                return False

    def read(self, offset: int, size: int) -> bytes:
        """What is there of it: maybe zeros, maybe nothing. A disk in trouble is one more way of not being here."""
        with self._using(offset, size):
            try:
                fd = self._open()
                try:
                    return os.pread(fd, size, offset)
                finally:
                    os.close(fd)
            except OSError:
                return b""

    def holds(self, entries: Iterable[Entry]) -> set[int]:
        """Numbers of those that may be here whole."""
        try:
            fd = self._open()
            try:
                parts = list(data_parts(fd))
            finally:
                os.close(fd)
        except OSError:
            return set()
        return {
            entry.number
            for entry in entries
            if any(start <= entry.offset and entry.offset + entry.size <= end for start, end in parts)
        }

    def _open(self) -> int:
        return os.open(self._cache.root / self._name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    @contextmanager
    def _using(self, offset: int, size: int) -> Iterator[range]:
        slots = range(offset // SLOT_BYTES, -(-(offset + size) // SLOT_BYTES))
        with ExitStack() as stack:
            for slot in slots:
                stack.enter_context(self._cache.using(self._name, slot))
            yield slots


class Packed:
    """Chunks of one layer that its pack has. Threads may share it.

    `kept` is None where the kernel reads the cached file itself, and so only what is there inflated is of use.
    """

    def __init__(
        self, source: ChunkSource, layer: Layer, table: bytes, entries: Sequence[Entry], kept: KeptPack | None
    ) -> None:
        self._source = source
        self._name = pack_name(layer.digest)
        self._table = table
        self._kept = kept
        self._entries = {entry.number: entry for entry in entries}
        self._groups = groups(entries)
        self._group_of = {entry.number: index for index, group in enumerate(self._groups) for entry in group}
        self._here = kept.holds(entries) if kept is not None else set()
        self._spoilt: set[int] = set()
        self._lock = threading.Lock()

    def has(self, number: int) -> bool:
        """Whether that chunk may be on this node, compressed."""
        return number in self._here

    def count(self) -> int:
        """Of chunks that may be."""
        return len(self._here)

    def read(self, number: int) -> bytes | None:
        """A chunk whose bytes are right, from this node; None when it is not here."""
        entry = self._entries.get(number)
        if entry is None or self._kept is None or number not in self._here:
            return None
        content = inflated(self._kept.read(entry.offset, entry.size))
        if content is not None and check_chunk(self._table, number, content):
            return content
        with self._lock:
            self._here.discard(number)
        return None

    def all(self) -> list[Given]:
        """Everything, a group at a time, in the pack's order."""
        return [self._given(index) for index in range(len(self._groups))]

    def with_chunks(self, numbers: Iterable[int]) -> list[Given]:
        """The groups that have these chunks, as far as they are worth asking for."""
        wanted = dict.fromkeys(self._group_of[number] for number in numbers if number in self._group_of)
        return [self._given(index) for index in wanted if index not in self._spoilt]

    def _given(self, index: int) -> Given:
        return [entry.number for entry in self._groups[index]], partial(self._bring, index)

    def _bring(self, index: int) -> Mapping[int, bytes]:
        """Chunks of a group that are right, from the store. What it has wrong it is not asked for again."""
        group = self._groups[index]
        first, size = group[0].offset, group[-1].offset + group[-1].size - group[0].offset
        try:
            content = self._source.part(self._name, first, size)
        except OSError:
            content = b""
        found = chunks_of(group, content)
        right = {number: chunk for number, chunk in found.items() if check_chunk(self._table, number, chunk)}
        with self._lock:
            if len(right) < len(group):
                self._spoilt.add(index)
        if right and self._kept is not None and self._kept.write(first, content):
            with self._lock:
                self._here.update(right)
        return right


def kept_pack(source: ChunkSource, layer: Layer, table: bytes, cache: ChunkCache) -> Packed | None:
    """The pack of a layer as this node has kept it; None when it has not. Waits for no store."""
    kept = KeptPack(cache, layer.digest)
    entries = decode_index(kept.read(0, MOST_HEAD_BYTES), layer)
    return Packed(source, layer, table, entries, kept) if entries else None


def open_pack(source: ChunkSource, layer: Layer, table: bytes, cache: ChunkCache | None) -> Packed | None:
    """The pack of a layer as the store has it; None when it has none, or does not answer.

    `cache`: where it is kept; None: nowhere.
    """
    head = read_head(source.files, layer)
    entries = decode_index(head, layer)
    if not entries:
        return None
    kept = KeptPack(cache, layer.digest) if cache is not None else None
    if kept is not None:
        kept.write(0, head[: entries[0].offset])
    return Packed(source, layer, table, entries, kept)
