"""What is in the page cache of a file is found exactly, and where it lies where the file system tells."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.linux.page_cache import PAGE_BYTES, extents, resident_parts

PAGES = 100


@pytest.fixture
def file() -> Iterator[int]:
    """On a disk, all of it written, nothing of it in memory."""
    fd, path = tempfile.mkstemp(dir="/var/tmp")
    try:
        os.write(fd, os.urandom(PAGES * PAGE_BYTES - 5))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        yield fd
    finally:
        os.close(fd)
        Path(path).unlink()


def test_the_parts_that_were_read(file: int) -> None:
    size = PAGES * PAGE_BYTES - 5
    if resident_parts(file, size):
        pytest.skip("this file system keeps its files in memory")
    for page in (0, 3, 4, 5, 98, 99):
        os.pread(file, 1, page * PAGE_BYTES)
    assert resident_parts(file, size) == [
        (first * PAGE_BYTES, count * PAGE_BYTES) for first, count in ((0, 1), (3, 3), (98, 2))
    ]
    for page in range(PAGES):
        os.pread(file, 1, page * PAGE_BYTES)
    assert resident_parts(file, size) == [(0, PAGES * PAGE_BYTES)]
    assert resident_parts(file, 0) == []


def test_where_a_file_lies(file: int) -> None:
    found = extents(file)
    assert found[0][0] == 0
    assert all(length > 0 and at > 0 for _, at, length in found)
