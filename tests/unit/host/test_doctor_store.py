"""What doctor says about the file system an image store lies on."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from opendsec.host.doctor import image_store


def test_a_good_one(tmp_path: Path) -> None:
    assert image_store("", tmp_path) is None
    (tmp_path / "store/staging").mkdir(parents=True)
    answer = image_store("", tmp_path)
    assert answer is not None
    assert answer.ok
    assert list((tmp_path / "store/staging").iterdir()) == []


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    (tmp_path / "staging").mkdir()
    answer = image_store(str(tmp_path), tmp_path)
    assert answer is not None
    assert not answer.ok
    assert "knows no file locks" in answer.sentence


def test_what_is_no_directory(tmp_path: Path) -> None:
    answer = image_store("somewhere", tmp_path)
    assert answer is not None
    assert "OPENDSEC_STORE: 'somewhere' is no absolute path" in answer.sentence
    assert image_store("s3://bucket/x", tmp_path) is None
