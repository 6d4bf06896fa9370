"""Saved guest memory by offset: one file, or changes over a base, believed only when the checksums agree.

Standard library only: the process that serves memory stays small. Files are descriptors, so nothing here depends on
paths or rights. A read that comes short is an error, never zeros; a hole of a whole file is zeros.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from opendsec.vm.sparse import PAGE, is_mapped

CHUNK: Final = 64 * 1024
SUM_BYTES: Final = 16


class SourceError(Exception):
    """The saved memory cannot be had, or is not what was saved."""


class PageSource:
    """Owns its descriptors: memory files, topmost first (one, or changes and their base), and the table of the first:
    of one file its checksums, if there are any; of changes which pages they are.
    """

    def __init__(self, layers: tuple[int, ...], table: int | None = None) -> None:
        if not 1 <= len(layers) <= 2 or (len(layers) == 2 and table is None):
            raise SourceError(f"{len(layers)} memory files without a table of pages do not make a machine's memory")
        self._layers = layers
        self._table = table
        self._changed = os.pread(table, os.fstat(table).st_size, 0) if table is not None and len(layers) == 2 else b""
        if len(layers) == 2 and len(self._changed) * 8 * PAGE < os.fstat(layers[0]).st_size:
            raise SourceError("the table of changed pages is too short")

    def read(self, offset: int, length: int) -> bytes:
        """Whole pages within one chunk. Raises SourceError."""
        if len(self._layers) == 2:
            return self._mixed(offset, length)
        if self._table is None:
            return _whole(self._layers[0], offset, length)
        start = offset - offset % CHUNK
        chunk = _whole(self._layers[0], start, CHUNK)
        self._verify(self._table, start, chunk)
        return chunk[offset - start : offset - start + length]

    def _mixed(self, offset: int, length: int) -> bytes:
        pages = range(offset // PAGE, (offset + length) // PAGE)
        changed = [is_mapped(self._changed, page) for page in pages]
        upper = _whole(self._layers[0], offset, length) if any(changed) else b""
        lower = _whole(self._layers[1], offset, length) if not all(changed) else b""
        return b"".join(
            (upper if is_changed else lower)[index * PAGE : (index + 1) * PAGE]
            for index, is_changed in enumerate(changed)
        )

    def _verify(self, table: int, start: int, chunk: bytes) -> None:
        wanted = _whole(table, start // CHUNK * SUM_BYTES, SUM_BYTES)
        if hashlib.blake2b(chunk, digest_size=SUM_BYTES).digest() != wanted:
            raise SourceError(f"damaged: the {CHUNK // 1024} KiB at byte {start} are not what was saved")

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (*self._layers, *(() if self._table is None else (self._table,))):
            os.close(fd)


def _whole(fd: int, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length:
        try:
            part = os.pread(fd, length, offset)
        except OSError as error:
            raise SourceError(f"{error.strerror} at byte {offset}") from error
        if not part:
            raise SourceError(f"the file ends at byte {offset}")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
