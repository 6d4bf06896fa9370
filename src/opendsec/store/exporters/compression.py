"""Compress a stream of pieces while it is made, and hash it on both sides. Pure but for running zstd(1).

One thread each: the same bytes then always compress to the same bytes, as long as it is the same program.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from enum import StrEnum

from opendsec.errors import NodeError
from opendsec.store.programs import filtered, find_program

_READ_BYTES = 1 << 20


class Compression(StrEnum):
    """How layers are compressed in what is exported."""

    GZIP = "gzip"
    """Everybody reads it."""
    ZSTD = "zstd"
    """Several times faster, and smaller; needs readers of the year 2021 or later."""
    NONE = "none"


MEDIA_TYPES = {
    Compression.GZIP: "application/vnd.oci.image.layer.v1.tar+gzip",
    Compression.ZSTD: "application/vnd.oci.image.layer.v1.tar+zstd",
    Compression.NONE: "application/vnd.oci.image.layer.v1.tar",
}


class Hashed:
    """Pieces as they pass, counted and hashed. Read `digest` and `size_bytes` when the end was reached."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._hash.update(piece)
            self.size_bytes += len(piece)
            yield piece

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of what has passed."""
        return f"sha256:{self._hash.hexdigest()}"


def compressed(pieces: Iterator[bytes], compression: Compression) -> Generator[bytes, None, None]:
    """The pieces, compressed. What making a piece raises comes out here. NodeError when zstd fails."""
    match compression:
        case Compression.NONE:
            yield from pieces
        case Compression.GZIP:
            yield from _gzipped(pieces)
        case Compression.ZSTD:
            yield from _through([find_program("zstd"), "-q", "-c", "-3", "--single-thread"], pieces)


def _gzipped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """zlib writes neither name nor time into the header, so nothing but the content counts."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    for piece in pieces:
        if out := packer.compress(piece):
            yield out
    yield packer.flush()


def _through(argv: list[str], pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Through a program; a thread feeds it while its output is read here."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with ThreadPoolExecutor(1, "export-feed") as pool, ExitStack() as ends:
        ends.callback(os.close, reader)
        feeding = pool.submit(_feed, writer, pieces)
        try:
            with filtered(argv, reader) as output:
                ends.close()  # The program alone has it now: when it ends, feeding ends.
                while piece := output.read(_READ_BYTES):
                    yield piece
        except ChildProcessError as error:
            raise NodeError(f"a layer could not be compressed: {error}", retryable=False) from error
        feeding.result()


def _feed(writer: int, pieces: Iterator[bytes]) -> None:
    with os.fdopen(writer, "wb", buffering=0) as pipe, suppress(BrokenPipeError):
        # A broken pipe: the program ended early, and its status says why.
        for piece in pieces:
            _write_all(pipe.fileno(), piece)


def _write_all(fd: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]
