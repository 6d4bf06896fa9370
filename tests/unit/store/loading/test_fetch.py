"""Nothing of a store is believed: lengths, bytes, tables, metadata. What can be had is had, what cannot is named."""

from __future__ import annotations

import errno
import hashlib
import random
import time
from pathlib import Path

import pytest
from tests.unit.store.loading.faulty import FaultyFiles, blob_of, pieces_of

from opendsec.errors import DigestMismatchError, DiskFullError, ImageInvalidError, NodeError
from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import CHUNK_BYTES
from opendsec.store.loading.fetch import WRONG_TRIES, ChunkSource
from opendsec.store.loading.packs import encode_metadata, metadata_name
from opendsec.store.loading.sources import DirectoryFiles, data_name

CONTENT = random.Random(7).randbytes(5 * CHUNK_BYTES + 1234)
BLOB, TABLE = blob_of(CONTENT)


def source_of(files: FaultyFiles, *, patience_s: float = 5.0) -> ChunkSource:
    return ChunkSource(files, patience_s=patience_s)


def test_a_run_is_one_request() -> None:
    files = FaultyFiles(CONTENT)
    got = source_of(files).fetch(BLOB, TABLE, 1, 99)
    assert got.error is None
    assert got.chunks == dict(enumerate(pieces_of(CONTENT)[1:], 1))
    assert files.reads == [(data_name(BLOB.digest), CHUNK_BYTES, len(CONTENT) - CHUNK_BYTES)]


@pytest.mark.parametrize("lie", [b"", b"\0" * len(CONTENT), CONTENT[:-1], CONTENT + b"more", CONTENT[1:]])
def test_what_the_store_says_once_is_asked_again(lie: bytes) -> None:
    said: list[bytes] = []

    def fault(name: str, offset: int, content: bytes) -> bytes:
        said.append(content)
        return lie if len(said) == 1 else content

    got = source_of(FaultyFiles(CONTENT, fault=fault)).fetch(BLOB, TABLE, 0, 99)
    assert got.error is None
    assert b"".join(got.chunks[n] for n in sorted(got.chunks)) == CONTENT


def test_one_bad_chunk_costs_only_itself() -> None:
    def fault(name: str, offset: int, content: bytes) -> bytes:
        place = 2 * CHUNK_BYTES - offset
        return content[:place] + b"\xff" + content[place + 1 :] if 0 <= place < len(content) else content

    files = FaultyFiles(CONTENT, fault=fault)
    got = source_of(files).fetch(BLOB, TABLE, 0, 99)
    assert sorted(got.chunks) == [0, 1, 3, 4, 5]
    assert isinstance(got.error, DigestMismatchError)
    assert "chunk 2" in str(got.error)
    assert len(files.reads) == WRONG_TRIES
    assert files.reads[-1][1:] == (2 * CHUNK_BYTES, CHUNK_BYTES)


def test_a_store_that_fails_is_asked_until_the_time_is_up() -> None:
    def fault(name: str, offset: int, content: bytes) -> bytes:
        raise OSError(errno.EIO, "server says 500")

    begun = time.monotonic()
    got = source_of(FaultyFiles(CONTENT, fault=fault), patience_s=0.6).fetch(BLOB, TABLE, 0, 1)
    assert isinstance(got.error, NodeError)
    assert got.error.retryable
    assert "server says 500" in str(got.error)
    assert time.monotonic() - begun > 0.5


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(FileNotFoundError(errno.ENOENT, "gone"), ImageInvalidError), (PermissionError(errno.EACCES, "no"), NodeError)],
)
def test_what_will_not_change_is_told_at_once(failure: OSError, kind: type[Exception]) -> None:
    def fault(name: str, offset: int, content: bytes) -> bytes:
        raise failure

    files = FaultyFiles(CONTENT, fault=fault)
    got = source_of(files, patience_s=60).fetch(BLOB, TABLE, 0, 1)
    assert type(got.error) is kind
    assert not got.error.retryable
    assert len(files.reads) == 1


def test_a_server_that_cannot_do_it_is_asked_three_times() -> None:
    def fault(name: str, offset: int, content: bytes) -> bytes:
        raise OSError(errno.EOPNOTSUPP, "no ranges")

    files = FaultyFiles(CONTENT, fault=fault)
    got = source_of(files, patience_s=60).fetch(BLOB, TABLE, 0, 1)
    assert isinstance(got.error, NodeError)
    assert not got.error.retryable
    assert "no ranges" in str(got.error)
    assert len(files.reads) == 3


def test_tables_are_checked() -> None:
    files = FaultyFiles(CONTENT)
    assert source_of(files).table(BLOB) == TABLE
    for bad in (TABLE[:-32], TABLE[:-1] + b"\0", b"", TABLE[32:] + TABLE[:32]):
        files.fault = lambda _name, _offset, _content, bad=bad: bad  # type: ignore[misc]
        with pytest.raises(DigestMismatchError):
            source_of(files).table(BLOB)
    files.fault = lambda _name, _offset, content: content * 1000
    with pytest.raises(NodeError, match="too large"):
        source_of(files, patience_s=0.1).table(BLOB)


def layer_of(content: bytes, size_bytes: int, *, data: Blob | None = BLOB) -> Layer:
    blob = Blob(digest=f"sha256:{hashlib.sha256(content).hexdigest()}", size_bytes=size_bytes)
    return Layer(digest=blob.digest, size_bytes=size_bytes, meta=blob if data else None, data=data)


def test_metadata_is_checked_as_a_whole(tmp_path: Path) -> None:
    files = FaultyFiles(CONTENT)
    layer = layer_of(CONTENT, len(CONTENT))
    source_of(files).metadata(layer, tmp_path / "good")
    assert (tmp_path / "good").read_bytes() == CONTENT
    files.fault = lambda _name, _offset, content: content[:-1] + b"\0"
    with pytest.raises(DigestMismatchError, match="metadata"):
        source_of(files).metadata(layer, tmp_path / "bad")


def test_metadata_comes_compressed_or_as_it_is(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    layer = layer_of(content, len(content))
    files = FaultyFiles(content)
    files.write(metadata_name(layer.digest), encode_metadata(content))
    source_of(files).metadata(layer, tmp_path / "good")
    assert files.reads == []
    assert (tmp_path / "good").read_bytes() == content
    files.write(metadata_name(layer.digest), encode_metadata(bytes(len(content))))
    source_of(files).metadata(layer, tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == content
    assert files.reads


@pytest.mark.parametrize("data", [BLOB, None])
def test_metadata_that_says_it_is_huge_is_not_begun(tmp_path: Path, data: Blob | None) -> None:
    """A manifest may name any size; what is read of it is no more than there is."""
    files = FaultyFiles(CONTENT)
    with pytest.raises((ImageInvalidError, DiskFullError)):
        source_of(files).metadata(layer_of(CONTENT, 1 << 60, data=data), tmp_path / "huge")
    assert files.reads == []
    files = FaultyFiles(CONTENT)
    with pytest.raises(DigestMismatchError, match="metadata"):
        source_of(files).metadata(layer_of(CONTENT, 64 << 20, data=data), tmp_path / "short")
    assert len(files.reads) == WRONG_TRIES, "the first piece is too short"


def test_closing_ends_the_waiting() -> None:
    def fault(name: str, offset: int, content: bytes) -> bytes:
        source.closing.set()
        raise OSError(errno.EIO, "no")

    source = source_of(FaultyFiles(CONTENT, fault=fault), patience_s=600)
    assert source.fetch(BLOB, TABLE, 0, 1).error is not None


def test_a_directory_keeps_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.store.loading.sources.OPEN_FILES", 3)
    files = DirectoryFiles(tmp_path)
    for number in range(9):
        (tmp_path / f"f{number}").write_bytes(str(number).encode() * 10)
    for number in (*range(9), *range(9)):
        assert files.read(f"f{number}", 2, 3) == str(number).encode() * 3
    assert files.listed("nothing") == []
    files.close()
