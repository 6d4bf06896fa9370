"""Saved guest memory by offset: one file, or changes over a base, believed only when the checksums agree.

Standard library only: the process that serves memory stays small. Files are descriptors, so nothing here depends on
paths or rights. A read that comes short is an error, never zeros; a hole of a whole file is zeros.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from opendsec.vm.sparse import data_extents

PAGE: Final = 4096
CHUNK: Final = 64 * 1024
SUM_BYTES: Final = 16


class SourceError(Exception):
    """The saved memory cannot be had, or is not what was saved."""


class PageSource:
    """Owns its descriptors: memory files, topmost first (one, or changes and their base), and the checksums of one."""

    def __init__(self, layers: tuple[int, ...], sums: int | None = None) -> None:
        if not 1 <= len(layers) <= 2 or (sums is not None and len(layers) != 1):
            raise SourceError(f"{len(layers)} memory files, one or two make a machine's memory")
        self._layers = layers
        self._sums = sums
        self._changed = _pages_of(layers[0]) if len(layers) == 2 else b""

    def read(self, offset: int, length: int) -> bytes:
        """Whole pages within one chunk. Raises SourceError."""
        if self._sums is not None:
            start = offset - offset % CHUNK
            chunk = self._whole(self._layers[0], start, CHUNK)
            self._verify(start, chunk)
            return chunk[offset - start : offset - start + length]
        if not self._changed:
            return self._whole(self._layers[0], offset, length)
        pages = range(offset // PAGE, (offset + length) // PAGE)
        changed = [bool(self._changed[page >> 3] >> (page & 7) & 1) for page in pages]
        upper = self._whole(self._layers[0], offset, length) if any(changed) else b""
        lower = self._whole(self._layers[1], offset, length) if not all(changed) else b""
        parts = [
            (upper if is_changed else lower)[index * PAGE : (index + 1) * PAGE]
            for index, is_changed in enumerate(changed)
        ]
        return b"".join(parts)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (*self._layers, *(() if self._sums is None else (self._sums,))):
            os.close(fd)

    def _whole(self, fd: int, offset: int, length: int) -> bytes:
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

    def _verify(self, start: int, chunk: bytes) -> None:
        assert self._sums is not None
        wanted = self._whole(self._sums, start // CHUNK * SUM_BYTES, SUM_BYTES)
        if hashlib.blake2b(chunk, digest_size=SUM_BYTES).digest() != wanted:
            raise SourceError(f"damaged: the {CHUNK // 1024} KiB at byte {start} are not what was saved")


def _pages_of(fd: int) -> bytes:
    """One bit for each page the file holds."""
    bits = bytearray((os.fstat(fd).st_size // PAGE + 7) // 8)
    for start, length in data_extents(fd):
        for page in range(start // PAGE, (start + length) // PAGE):
            bits[page >> 3] |= 1 << (page & 7)
    return bytes(bits)
