"""Chunks of data kept on this node's disk, so that a store is asked for each of them once.

    <root>/<hex>     one sparse file for each data blob, of its full size; what is not here yet is a hole
    <root>/.lock     held by the one process that uses the cache

There is no list of what is here that a crash could make a liar: the file system's own map of holes says what may be
there, and a chunk counts only after its bytes were checked against the table, at each read. So after a kill, a power
loss, a damaged disk or an eviction in between, a chunk is either right or not here; zeros are never taken for data.
(Who gives the kernel the file itself, as the fanotify loader does, calls `check_all` first and keeps it from eviction.)

Space is counted and given back in slots of 256 KiB, least recently used first, never one that is being read or
written. A full disk or a full cache is no error: `write` says False and the caller serves what it has in its hands.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from opendsec.errors import ConflictError
from opendsec.linux.libc import FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, fallocate
from opendsec.model.image import Blob
from opendsec.store.chunks import CHUNK_BYTES, check_chunk, chunk_count
from opendsec.store.durable import disk_full_named
from opendsec.store.manifest import hex_of

SLOT_CHUNKS = 4
SLOT_BYTES = SLOT_CHUNKS * CHUNK_BYTES
RESERVE_BYTES = 512 << 20
"""Left free on the disk: sandboxes write there too."""
_AT_ONCE = 16
"""Slots given back when the disk is full: more than one, or every write would find it full again."""

_Slot = tuple[str, int]
"""Hex digest of a blob, and which of its slots."""


@dataclass(slots=True)
class CacheCounts:
    """Since the process started."""

    hits: int = 0
    damaged: int = 0
    """Chunks that were not what the table says when they were read."""
    evicted_bytes: int = 0
    refused: int = 0
    """Writes for which there was no room."""


class ChunkCache:
    """One node's cache below `root`, for one process at a time. A context manager. Threads may share it."""

    def __init__(self, root: Path, *, limit_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.counts = CacheCounts()
        self._reserve = reserve_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[_Slot, None] = OrderedDict()
        self._busy: Counter[_Slot] = Counter()
        self._kept: set[str] = set()
        self._blobs: dict[str, CachedBlob] = {}
        self._lock_fd = -1

    def __enter__(self) -> Self:
        """ConflictError when another process uses it; DiskFullError."""
        with disk_full_named(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise ConflictError(
                f"another process uses the cache {self.root}", detail={"path": str(self.root)}
            ) from error
        self._find_slots()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for blob in self._blobs.values():
            os.close(blob.fd)
        self._blobs.clear()
        os.close(self._lock_fd)

    @property
    def used_bytes(self) -> int:
        """Of the disk, by slots that hold anything."""
        return len(self._slots) * SLOT_BYTES

    def open(self, data: Blob, table: bytes, *, evictable: bool = True) -> CachedBlob:
        """The cached part of a blob. `table` was checked. DiskFullError when not even an empty file can be made."""
        name = hex_of(data.digest)
        with self._lock:
            if not evictable:
                self._kept.add(name)
            blob = self._blobs.get(name)
            if blob is None:
                with disk_full_named(self.root):
                    fd = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    if os.fstat(fd).st_size != data.size_bytes:
                        os.ftruncate(fd, data.size_bytes)
                blob = CachedBlob(
                    cache=self,
                    name=name,
                    size_bytes=data.size_bytes,
                    table=table,
                    fd=fd,
                    is_read_directly=not evictable,
                )
                blob.find_present()
                self._blobs[name] = blob
        return blob

    def keep(self, name: str) -> None:
        """Give nothing of this file back, whether or not it is ever opened."""
        with self._lock:
            self._kept.add(name)

    def evict(self, bytes_wanted: int) -> int:
        """Give back at least so many bytes where that is possible; how many it were."""
        with self._lock:
            return self._evict(bytes_wanted)

    def claim(self, name: str, slot: int) -> bool:
        """Room for a slot somebody is `using`, after eviction if need be; it counts from now on."""
        with self._lock:
            new = (name, slot) not in self._slots
            surplus = self.used_bytes + (SLOT_BYTES if new else 0) - self.limit_bytes
            if surplus > 0 and self._evict(surplus) < surplus:
                return False
            free = os.statvfs(self.root)
            lacking = self._reserve - free.f_bavail * free.f_frsize
            if lacking > 0 and self._evict(max(lacking, SLOT_BYTES)) < lacking:
                return False
            self._slots[name, slot] = None
            self._slots.move_to_end((name, slot))
            return True

    def _evict(self, bytes_wanted: int) -> int:
        freed = 0
        while freed < bytes_wanted:
            victim = next((one for one in self._slots if not self._busy[one] and one[0] not in self._kept), None)
            if victim is None:
                break
            del self._slots[victim]
            blob = self._blobs.get(victim[0])
            if blob is not None:
                blob.forget_slot(victim[1])
            self._punch(victim, blob)
            freed += SLOT_BYTES
        self.counts.evicted_bytes += freed
        return freed

    @contextmanager
    def using(self, name: str, slot: int) -> Iterator[None]:
        """Keep a slot from eviction, and count it as just used."""
        key = (name, slot)
        with self._lock:
            self._busy[key] += 1
            if key in self._slots:
                self._slots.move_to_end(key)
        try:
            yield
        finally:
            with self._lock:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]

    def unclaim(self, name: str, slot: int) -> None:
        """Nothing of that slot is here after all, if nobody else is using it."""
        with self._lock:
            if self._busy[name, slot] == 1:
                self._slots.pop((name, slot), None)

    def _punch(self, victim: _Slot, blob: CachedBlob | None) -> None:
        name, slot = victim
        if blob is not None:
            _punch_hole(blob.fd, slot * SLOT_BYTES, SLOT_BYTES)
            return
        path = self.root / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            _punch_hole(fd, slot * SLOT_BYTES, SLOT_BYTES)
            if os.fstat(fd).st_blocks == 0:
                path.unlink()
        finally:
            os.close(fd)

    def _find_slots(self) -> None:
        """What earlier processes left, the file that was written to last as the most recently used."""
        files = [path for path in self.root.iterdir() if not path.name.startswith(".")]
        for path in sorted(files, key=lambda one: one.stat().st_mtime):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                for start, end in data_parts(fd):
                    self._slots.update(
                        ((path.name, slot), None) for slot in range(start // SLOT_BYTES, -(-end // SLOT_BYTES))
                    )
            finally:
                os.close(fd)


@dataclass(slots=True, kw_only=True)
class CachedBlob:
    """The part of one blob that is on this node."""

    cache: ChunkCache
    name: str
    size_bytes: int
    table: bytes
    fd: int
    is_read_directly: bool = False
    """By the kernel, which may just have been allowed to: nothing becomes a hole, which would be zeros to it."""
    _present: set[int] = field(default_factory=set)
    """Chunks that may be here: whether they are, their bytes say."""

    @property
    def path(self) -> Path:
        """The sparse file."""
        return self.cache.root / self.name

    @property
    def present_bytes(self) -> int:
        """About as many bytes are here."""
        return min(len(self._present) * CHUNK_BYTES, self.size_bytes)

    def missing(self, first: int, count: int) -> list[int]:
        """Which of these chunks are certainly not here."""
        present = self._present
        return [n for n in range(first, min(first + count, chunk_count(self.size_bytes))) if n not in present]

    def read(self, number: int) -> bytes | None:
        """A chunk whose bytes are right, or None: it is not here. A damaged one is forgotten."""
        with self.cache.using(self.name, number // SLOT_CHUNKS):
            if number not in self._present:
                return None
            try:
                content = os.pread(self.fd, CHUNK_BYTES, number * CHUNK_BYTES)
            except OSError as error:
                if error.errno != errno.EIO:  # a bad sector is one more way of not being here
                    raise
                content = b""
            if check_chunk(self.table, number, content):
                self.cache.counts.hits += 1
                return content
            self.cache.counts.damaged += 1
            self._forget(number)
        return None

    def write(self, number: int, content: bytes, *, fd: int | None = None) -> bool:
        """Keep a chunk that was checked; False when there is no room for it.

        `fd`: another descriptor of the same file to write through.
        """
        slot = number // SLOT_CHUNKS
        with self.cache.using(self.name, slot):
            if self._written(self.fd if fd is None else fd, number, content):
                self._present.add(number)
                return True
            if self._present.isdisjoint(range(slot * SLOT_CHUNKS, (slot + 1) * SLOT_CHUNKS)):
                self.cache.unclaim(self.name, slot)
        self.cache.counts.refused += 1
        return False

    def _written(self, fd: int, number: int, content: bytes) -> bool:
        """Whether it was; a full disk gets a second try after an eviction."""
        for evictable in (_AT_ONCE * SLOT_BYTES, 0):
            if not self.cache.claim(self.name, number // SLOT_CHUNKS):
                return False
            try:
                _write_all(fd, content, number * CHUNK_BYTES)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not (evictable and self.cache.evict(evictable)):
                    return False
                continue
            return True
        return False

    def check_all(self) -> set[int]:
        """Read and check everything that may be here; the chunks that are. What is wrong is not here from then on."""
        return {number for number in sorted(self._present) if self.read(number) is not None}

    def find_present(self) -> None:
        """Ask the file system which chunks may be here. A chunk with a hole in it is none."""
        present = self._present
        for start, end in data_parts(self.fd):
            last = end == self.size_bytes
            present.update(range(-(-start // CHUNK_BYTES), -(-end // CHUNK_BYTES) if last else end // CHUNK_BYTES))

    def forget_slot(self, slot: int) -> None:
        """Of the cache: these chunks are about to go."""
        self._present.difference_update(range(slot * SLOT_CHUNKS, (slot + 1) * SLOT_CHUNKS))

    def _forget(self, number: int) -> None:
        self._present.discard(number)
        if not self.is_read_directly:
            _punch_hole(self.fd, number * CHUNK_BYTES, CHUNK_BYTES)


def _write_all(fd: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _punch_hole(fd: int, offset: int, length: int) -> None:
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length)


def data_parts(fd: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are no holes (lseek(2) SEEK_DATA), as offsets of beginning and end."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end
