"""What of files is in the page cache, and where on its device a file lies. Reads nothing and changes nothing."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator

from opendsec.linux import libc

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIEMAP = 0xC020660B
_FIEMAP_HEAD = struct.Struct("<QQIIII")
_FIEMAP_EXTENT = struct.Struct("<QQQQQIIII")


def resident_parts(fd: int, size_bytes: int) -> list[tuple[int, int]]:
    """The parts of a file whose pages are in memory, in order, as (offset, length) in whole pages.

    By halves, so a file that is there whole, or not at all, costs one call. Needs Linux 6.5; OSError before.
    """
    pages = -(-size_bytes // PAGE_BYTES)
    merged: list[tuple[int, int]] = []
    for first, count in _resident(fd, 0, pages) if pages else ():
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return [(first * PAGE_BYTES, count * PAGE_BYTES) for first, count in merged]


def _resident(fd: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    found = libc.cachestat(fd, first * PAGE_BYTES, count * PAGE_BYTES)
    if found >= count:
        yield first, count
    elif found:
        half = count // 2
        yield from _resident(fd, first, half)
        yield from _resident(fd, first + half, count - half)


def extents(fd: int, *, most: int = 8) -> list[tuple[int, int, int]]:
    """Where the first parts of a file lie: offset in the file, offset on its device, length. OSError where the file
    system does not tell (FIEMAP).
    """
    head = _FIEMAP_HEAD.pack(0, (1 << 63) - 1, 0, 0, most, 0)
    content = bytearray(head + bytes(most * _FIEMAP_EXTENT.size))
    fcntl.ioctl(fd, _FIEMAP, content)
    count = _FIEMAP_HEAD.unpack_from(content)[3]
    parts = (_FIEMAP_EXTENT.unpack_from(content, _FIEMAP_HEAD.size + n * _FIEMAP_EXTENT.size) for n in range(count))
    return [(logical, physical, length) for logical, physical, length, *_ in parts]
