"""Memory files with holes: which pages a file really holds, and files of pages laid over each other.

A page that was not written is a hole, and what a hole means depends on the file: zero in a whole memory file, "as
below" in one that holds changes. So nothing here believes a file system that does not report holes exactly.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from opendsec.store.sparse import data_extents

PAGE: Final = 4096
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""How a file system says that it has no room."""
_PROBED_PAGE: Final = 33
_COPY_BYTES: Final = 8 * 1024 * 1024


def reports_holes(directory: Path) -> bool:
    """Whether files there have holes of single pages, and say so exactly. Tried with one that is gone afterwards."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(4 * _PROBED_PAGE * PAGE)
        os.pwrite(file.fileno(), b"\x01" * PAGE, _PROBED_PAGE * PAGE)
        return list(data_extents(file.fileno())) == [(_PROBED_PAGE * PAGE, PAGE)]


def page_map(fd: int) -> bytes:
    """One bit for each page, lowest first: set where the file holds it. Raises OSError."""
    bits = bytearray((os.fstat(fd).st_size // PAGE + 7) // 8)
    for start, length in data_extents(fd):
        for page in range(start // PAGE, (start + length) // PAGE):
            bits[page >> 3] |= 1 << (page & 7)
    return bytes(bits)


def is_mapped(bits: bytes, page: int) -> bool:
    """Whether that bit is set."""
    return bool(bits[page >> 3] >> (page & 7) & 1)


def mapped_extents(bits: bytes) -> Iterator[tuple[int, int]]:
    """(offset, length) of the pages whose bit is set, ascending."""
    start = None
    for page in range(len(bits) * 8):
        if is_mapped(bits, page):
            start = page if start is None else start
        elif start is not None:
            yield start * PAGE, (page - start) * PAGE
            start = None
    if start is not None:
        yield start * PAGE, (len(bits) * 8 - start) * PAGE


def lay_under(lower: int, extents: Iterable[tuple[int, int]], target: int) -> None:
    """Write these parts of `lower`, where `target` holds nothing yet, into `target`. Raises OSError."""
    held = list(data_extents(target))
    for start, length in extents:
        for part_start, part_length in _without(start, length, held):
            copy_range(lower, target, part_start, part_length)


def _without(start: int, length: int, held: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    position, end = start, start + length
    for held_start, held_length in held:
        held_end = held_start + held_length
        if held_end <= position:
            continue
        if held_start >= end:
            break
        if held_start > position:
            yield position, held_start - position
        position = held_end
    if position < end:
        yield position, end - position


def copy_range(source: int, target: int, start: int, length: int) -> None:
    """The same bytes at the same place of another file. Raises OSError, also when `source` ends before."""
    while length:
        done = os.copy_file_range(source, target, min(length, _COPY_BYTES), start, start)
        if not done:
            raise OSError(errno.EIO, "a memory file ended while it was read")
        start += done
        length -= done
