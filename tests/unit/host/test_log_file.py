"""The log is cut while others have it open, and they go on at its beginning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opendsec.host import log_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(log_file, "KEEP_BYTES", 1000)
    return tmp_path / "opendsec.log"


def test_a_large_log_is_copied_and_cut_and_its_writers_go_on(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    writers = [os.open(path, flags, 0o600) for _ in range(2)]
    try:
        for number in range(3):
            os.write(writers[0], b"%d" % number * 1000)
            assert not log_file.rotate(path)
            os.write(writers[1], b"!")
            assert log_file.rotate(path)
            assert log_file.older(path).read_bytes() == b"%d" % number * 1000 + b"!"
            assert path.read_bytes() == b""
        os.write(writers[0], b"on")
        os.write(writers[1], b"ward")
        assert path.read_bytes() == b"onward"
        assert log_file.older(path).stat().st_mode & 0o777 == 0o600
        assert len(list(path.parent.iterdir())) == 2
    finally:
        for writer in writers:
            os.close(writer)


def test_a_copy_that_fails_leaves_the_log_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, os.strerror(28))

    path.write_bytes(b"x" * 2000)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        log_file.rotate(path)
    assert path.read_bytes() == b"x" * 2000
    assert list(path.parent.iterdir()) == [path]


def test_only_the_file_one_writes_to_is_ours(path: Path) -> None:
    assert not log_file.is_ours(path)
    words = "import pathlib, sys; from opendsec.host.log_file import is_ours; print(is_ours(pathlib.Path(sys.argv[1])))"
    path.touch()
    for own, expected in ((True, "True"), (False, "False")):
        with path.open("ab") as file:
            run = subprocess.run(
                [sys.executable, "-c", words, str(path)],
                stdout=subprocess.PIPE,
                stderr=file if own else subprocess.DEVNULL,
                text=True,
                timeout=20,
                check=True,
            )
        assert run.stdout.strip() == expected
