"""Tables of chunks: the same however a file is read, and a proof of every part of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import DigestMismatchError
from opendsec.store import chunks
from opendsec.store.chunks import (
    CHUNK_BYTES,
    check_chunk,
    check_table,
    chunk_count,
    chunks_of,
    make_table,
    table_digest,
)


def expected(content: bytes) -> bytes:
    starts = range(0, len(content), CHUNK_BYTES)
    return b"".join(hashlib.sha256(content[at : at + CHUNK_BYTES]).digest() for at in starts)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES, 700_001])
@pytest.mark.parametrize("piece", [1, 3, 256])
@pytest.mark.parametrize("most", [1000, 1 << 30])
def test_a_table_is_the_same_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, piece: int, most: int
) -> None:
    """In pieces of any size, from a file system that answers with less than was asked for."""
    content = os.urandom(size)
    (tmp_path / "data").write_bytes(content)
    real = os.pread
    monkeypatch.setattr(chunks, "_PIECE_BYTES", piece * CHUNK_BYTES)
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, min(count, most), offset))
    told: list[int] = []
    table = make_table(tmp_path / "data", on_bytes=told.append)
    assert table == expected(content)
    assert sum(told) == size
    assert len(table) == chunk_count(size) * 32
    check_table(table, table_digest(table), size)


def test_a_file_that_is_cut_meanwhile_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(b"x" * 200_000)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, count, offset) if offset < 9 else b"")
    monkeypatch.setattr(chunks, "_PIECE_BYTES", CHUNK_BYTES)
    with pytest.raises(OSError, match="ended before its size"):
        make_table(tmp_path / "data")


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    with pytest.raises(OSError, match="Too many levels"):
        make_table(tmp_path / "link")


@given(st.binary(max_size=300), st.integers(0, 299), st.integers(0, 255))
def test_every_changed_chunk_is_found(content: bytes, at: int, value: int) -> None:
    table = expected(content)
    assert all(
        check_chunk(table, number, content[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
        for number in range(chunk_count(len(content)))
    )
    if at < len(content) and content[at] != value:
        changed = content[:at] + bytes([value]) + content[at + 1 :]
        assert not check_chunk(table, 0, changed)
    assert not check_chunk(table, chunk_count(len(content)), b"beyond")


@pytest.mark.parametrize(("cut", "size"), [(b"", 3 * CHUNK_BYTES), (b"x", 3 * CHUNK_BYTES), (b"", 2 * CHUNK_BYTES)])
def test_a_table_of_other_data_is_refused(cut: bytes, size: int) -> None:
    content = os.urandom(2 * CHUNK_BYTES + (size == 2 * CHUNK_BYTES))
    table = expected(content) + cut
    with pytest.raises(DigestMismatchError):
        check_table(table, table_digest(expected(content)), size)


@given(st.integers(0, 10 * CHUNK_BYTES), st.integers(0, 10 * CHUNK_BYTES))
def test_the_chunks_that_cover_a_part(offset: int, length: int) -> None:
    found = chunks_of(offset, length)
    covered = {at // CHUNK_BYTES for at in (offset, offset + length - 1)} if length else set()
    assert covered <= set(found)
    assert not found or (found[0] == min(covered) and found[-1] == max(covered))


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 40 * 1024 * 1024 + 5, 64 * 1024 * 1024])
def test_holes_count_as_the_zeros_they_are(tmp_path: Path, size: int) -> None:
    hole, zeros = tmp_path / "hole", tmp_path / "zeros"
    with hole.open("wb") as file:
        file.truncate(size)
    zeros.write_bytes(bytes(size))
    assert make_table(hole) == make_table(zeros)
    if size > 20 * 1024 * 1024:
        for path in (hole, zeros):
            with path.open("r+b") as file:
                file.seek(size - 3)
                file.write(b"end")
        assert make_table(hole) == make_table(zeros)
