"""Copies with holes: same bytes, same holes, and an error of the disk is never taken for a hole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from opendsec.store import sparse
from opendsec.store.sparse import CutShortError, copy_sparse

HERE = 32 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(HERE)
        file.write(b"here")
    return path


@pytest.fixture(autouse=True)
def no_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file system of the tests can."""
    monkeypatch.setattr(sparse, "_cloned", lambda _reader, _writer: False)


def test_a_copy_keeps_holes(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    copy_sparse(source, target)
    assert target.stat().st_size == 64 << 20
    assert target.stat().st_blocks <= source.stat().st_blocks + 256
    with target.open("rb") as file:
        file.seek(HERE)
        assert file.read(4) == b"here"
    (tmp_path / "empty").touch()
    copy_sparse(tmp_path / "empty", tmp_path / "empty2")
    assert (tmp_path / "empty2").stat().st_size == 0


def test_an_error_of_the_disk_is_no_hole(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seek = os.lseek

    def broken(fd: int, at: int, how: int) -> int:
        if how == os.SEEK_DATA:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return seek(fd, at, how)

    monkeypatch.setattr(os, "lseek", broken)
    with pytest.raises(OSError, match="Input/output") as raised:
        copy_sparse(source, tmp_path / "target")
    assert raised.value.errno == errno.EIO


def test_a_file_that_becomes_shorter_is_no_copy(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = os.sendfile

    def cut(writer: int, reader: int, at: int, count: int) -> int:
        os.truncate(source, 0)
        return send(writer, reader, at, count)

    monkeypatch.setattr(os, "sendfile", cut)
    with pytest.raises(CutShortError):
        copy_sparse(source, tmp_path / "target")


def test_a_link_is_not_followed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(OSError, match="symbolic links") as raised:
        copy_sparse(tmp_path / "link", tmp_path / "target")
    assert raised.value.errno == errno.ELOOP
    assert not (tmp_path / "target").exists()
