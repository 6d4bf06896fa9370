"""The hint is set where the file system knows it, and is no error elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.linux.mount import mountinfo
from opendsec.linux.spread import is_spread, spread_subdirectories


def _fstype(path: Path) -> str:
    entries = sorted(mountinfo(), key=lambda entry: len(entry.target))
    return [entry.fstype for entry in entries if path.resolve().is_relative_to(entry.target)][-1]


def test_the_hint_is_set_once_and_stays(tmp_path: Path) -> None:
    assert not is_spread(tmp_path)
    known = spread_subdirectories(tmp_path)
    assert known == is_spread(tmp_path)
    assert spread_subdirectories(tmp_path) == known
    assert known or _fstype(tmp_path) != "ext4"


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        spread_subdirectories(tmp_path / "missing")
    assert os.listdir("/proc/self/fd") == before
