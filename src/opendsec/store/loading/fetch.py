"""Chunks of data from a store, whatever the store says: every one is checked against the table before it is given on.

    source = ChunkSource(open_files(address))
    table = source.table(blob)
    got = source.fetch(blob, table, first, count)      # got.chunks: number → bytes that are right

It believes neither length nor content nor the order of answers. What is wrong or missing is asked for again, with
pauses that grow, until `patience_s` has passed since the call; wrong bytes at most WRONG_TRIES times, since a store
that holds them will not change its mind; so is a server that knows no ranges. A file that is not there and a store
that refuses are told at once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from opendsec.errors import DigestMismatchError, DiskFullError, ImageInvalidError, NodeError, OpenDSecError
from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import CHUNK_BYTES, DIGEST_BYTES, check_chunk, check_table, chunk_count
from opendsec.store.durable import disk_full_named
from opendsec.store.loading.packs import read_metadata
from opendsec.store.loading.sources import StoreFiles, blob_name, data_name, table_name

PATIENCE_S = 30.0
"""For one read, all attempts together."""
WRONG_TRIES = 3
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
MOST_METADATA_BYTES = 4 << 30
"""Of a layer whose data lies apart: some 50 million files."""
_PIECE_BYTES = 4 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a fetch got. `error` says why the chunks that are not in `chunks` are not."""

    chunks: Mapping[int, bytes]
    error: OpenDSecError | None = None


@dataclass(slots=True)
class SourceCounts:
    """What was asked of the store since the process started."""

    requests: int = 0
    bytes_read: int = 0
    failures: int = 0
    """Requests that failed or brought wrong bytes."""


@dataclass(slots=True)
class ChunkSource:
    """Verified reading from one store. Threads may share it."""

    files: StoreFiles
    patience_s: float = PATIENCE_S
    clock: Callable[[], float] = time.monotonic
    counts: SourceCounts = field(default_factory=SourceCounts)
    closing: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def table(self, data: Blob) -> bytes:
        """The chunk table of a blob, checked.

        Raises ImageInvalidError (the store has not got it), DigestMismatchError, NodeError (retryable).
        """
        most = chunk_count(data.size_bytes) * DIGEST_BYTES
        name = table_name(data.digest)

        def attempt() -> bytes:
            content = self._counted(lambda: self.files.read_whole(name, most=most))
            check_table(content, data.digest, data.size_bytes)
            return content

        return self._again(attempt, what=f"the chunk table of {data.digest}")

    def small(self, name: str, *, most: int) -> bytes:
        """A file nothing is known about but its name; not checked. FileNotFoundError, NodeError."""
        return self._again(
            lambda: self._counted(lambda: self.files.read_whole(name, most=most)), what=name, mapped=False
        )

    def part(self, name: str, offset: int, size: int) -> bytes:
        """Part of a file nothing is known about but its name; asked for once, not checked. OSError."""
        return self._counted(lambda: self.files.read(name, offset, size))

    def listed(self, folder: str) -> list[str] | None:
        """The names in a folder; None when this kind of store cannot tell. NodeError."""
        return self._again(lambda: self.files.listed(folder), what=folder)

    def metadata(self, layer: Layer, target: Path) -> None:
        """Write a layer's whole metadata to a new file that must not exist, checked; on an error what is there is no
        good. It comes compressed where the store has it so.

        Raises as `table` does, and DiskFullError, also for what says it is larger than the disk has room for.
        """
        blob = layer.mounted
        _check_size(layer, target.parent)

        def attempt() -> None:
            with disk_full_named(target.parent), target.open("wb") as file:
                content = read_metadata(self.files, layer)
                if content is not None and f"sha256:{hashlib.sha256(content).hexdigest()}" == blob.digest:
                    file.write(content)
                    return
                digest = hashlib.sha256()
                for offset in range(0, blob.size_bytes, _PIECE_BYTES):
                    piece = self._piece(blob, offset)
                    digest.update(piece)
                    file.write(piece)
            if f"sha256:{digest.hexdigest()}" != blob.digest:
                raise _wrong(blob.digest, "metadata")

        self._again(attempt, what=f"the metadata {blob.digest}")

    def _piece(self, blob: Blob, offset: int) -> bytes:
        size = min(_PIECE_BYTES, blob.size_bytes - offset)
        piece = self._counted(lambda: self.files.read(blob_name(blob.digest), offset, size))
        if len(piece) != size:  # whoever says it is larger than it is gets no further
            raise _wrong(blob.digest, f"metadata from byte {offset} on")
        return piece

    def fetch(self, data: Blob, table: bytes, first: int, count: int) -> Fetched:
        """Chunks `first` to `first + count - 1`, as many as could be had. Never raises for what the store does."""
        wanted = set(range(first, min(first + count, chunk_count(data.size_bytes))))
        got: dict[int, bytes] = {}

        def attempt() -> None:
            for low, high in _runs(wanted - got.keys()):
                got.update(self._run(data, table, low, high))
            if wanted - got.keys():
                raise _wrong(data.digest, f"chunk {min(wanted - got.keys())}")

        try:
            self._again(attempt, what=f"the data {data.digest}")
        except OpenDSecError as error:
            return Fetched(chunks=got, error=error)
        return Fetched(chunks=got)

    def _run(self, data: Blob, table: bytes, low: int, high: int) -> dict[int, bytes]:
        """The right ones among chunks `low` to `high`, with one request."""
        start = low * CHUNK_BYTES
        size = min((high + 1) * CHUNK_BYTES, data.size_bytes) - start
        content = self._counted(lambda: self.files.read(data_name(data.digest), start, size))[:size]
        view = memoryview(content)
        pieces = {n: bytes(view[(n - low) * CHUNK_BYTES : (n - low + 1) * CHUNK_BYTES]) for n in range(low, high + 1)}
        return {number: piece for number, piece in pieces.items() if check_chunk(table, number, piece)}

    def _counted(self, read: Callable[[], bytes]) -> bytes:
        content = b""
        try:
            content = read()
        finally:
            with self._lock:
                self.counts.requests += 1
                self.counts.bytes_read += len(content)
        return content

    def _again(self, attempt: Callable[[], _T], *, what: str, mapped: bool = True) -> _T:
        """Call until it works, or there is no point, or no time, in trying again."""
        end = self.clock() + self.patience_s
        pause, wrong = FIRST_PAUSE_S, 0
        while True:
            try:
                return attempt()
            except FileNotFoundError as error:
                if not mapped:
                    raise
                raise ImageInvalidError(
                    f"{what} is not in the store {self.files.address}", detail={"store": self.files.address}
                ) from error
            except PermissionError as error:
                raise _unreachable(what, self.files.address, error, retryable=False) from error
            except DigestMismatchError as error:
                failure: OpenDSecError = error
                wrong += 1
            except OSError as error:
                unable = error.errno == errno.EOPNOTSUPP
                wrong += unable
                failure = _unreachable(what, self.files.address, error, retryable=not unable)
            with self._lock:
                self.counts.failures += 1
            left = end - self.clock()
            wait = min(left, random.uniform(0.5, 1) * pause)  # noqa: S311
            if wrong >= WRONG_TRIES or left <= 0 or self.closing.wait(wait):
                raise failure
            pause = min(pause * 2, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Nobody waits any longer for a store that does not answer."""
        self.closing.set()
        self.files.close()


def _runs(numbers: set[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, last), in order."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _check_size(layer: Layer, directory: Path) -> None:
    """A manifest may say anything: nothing is begun that cannot be finished."""
    size = layer.mounted.size_bytes
    if layer.data is not None and size > MOST_METADATA_BYTES:
        raise ImageInvalidError(
            f"layer {layer.digest} says it has {size} bytes of metadata, at most {MOST_METADATA_BYTES} are read",
            detail={"layer": layer.digest},
        )
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if size > free:
        raise DiskFullError(
            f"layer {layer.digest} needs {size} bytes in {directory}, where {free} are free",
            detail={"layer": layer.digest, "path": str(directory)},
        )


def _wrong(digest: str, part: str) -> DigestMismatchError:
    return DigestMismatchError(
        f"the store gives wrong bytes for {part} of {digest}",
        detail={"digest": digest},
        remedy="opendsec image fsck, on a machine that can write to the store",
    )


def _unreachable(what: str, address: str, error: OSError, *, retryable: bool = True) -> NodeError:
    return NodeError(
        f"{what} cannot be read from the store {address}: {error.strerror or error}",
        detail={"store": address, "errno": error.errno or 0},
        retryable=retryable,
    )
