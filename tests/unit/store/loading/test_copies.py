"""Copies of metadata do not pile up, and none goes that somebody needs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from opendsec.store.loading.copies import Copy, is_used, surplus, trim


def copies(*sizes: int) -> list[Copy]:
    """The first was used longest ago."""
    return [Copy(name=f"f{n}", size_bytes=size, used_at=float(n)) for n, size in enumerate(sizes)]


def test_the_longest_unused_go_until_the_rest_fits() -> None:
    found = copies(10, 20, 30, 40)
    assert surplus(reversed(found), mounted=(), keep_bytes=100, now=10_000) == []
    assert surplus(found, mounted=(), keep_bytes=99, now=10_000) == ["f0"]
    assert surplus(found, mounted=(), keep_bytes=70, now=10_000) == ["f0", "f1"]
    assert surplus(found, mounted=("f0",), keep_bytes=70, now=10_000) == ["f1", "f2"]
    assert surplus(found, mounted=("f0", "f1", "f2", "f3"), keep_bytes=0, now=10_000) == []


def test_what_may_just_be_being_mounted_stays() -> None:
    assert surplus(copies(10, 20, 30, 40), mounted=(), keep_bytes=0, now=602, recent_s=600) == ["f0", "f1"]


def test_a_directory_is_trimmed(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / f"f{number}"
        path.write_bytes(bytes(1000))
        os.utime(path, (0, time.time() - 10_000 + number))
    (tmp_path / ".generation").write_text("3")
    assert trim(tmp_path, keep=tmp_path / "f0", keep_bytes=5000) == 0
    assert is_used(tmp_path / "f1")
    assert not is_used(tmp_path / "f9")
    assert trim(tmp_path, keep=tmp_path / "f0", keep_bytes=3500) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".generation", "f0", "f1", "f4", "f5"]
