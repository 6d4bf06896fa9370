"""A file is hashed while it grows, and the result is what hashing it afterwards gives."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from opendsec.store.chunks import CHUNK_BYTES, make_table
from opendsec.store.following import Following


def grow(path: Path, pieces: list[int], *, pause_s: float = 0.0) -> None:
    with path.open("xb", buffering=0) as file:
        for size in pieces:
            file.write(os.urandom(size))
            time.sleep(pause_s)


@pytest.mark.parametrize(
    "pieces",
    [
        [1],
        [CHUNK_BYTES],
        [CHUNK_BYTES - 1, 1, 1],
        [100, CHUNK_BYTES * 3, 7],
        [CHUNK_BYTES * 200 + 5] * 3,
        [1 << 20] * 40,
    ],
)
def test_the_table_is_that_of_the_finished_file(tmp_path: Path, pieces: list[int]) -> None:
    path = tmp_path / "data"
    with Following(path) as following:
        writer = threading.Thread(target=grow, args=(path, pieces), kwargs={"pause_s": 0.02})
        writer.start()
        writer.join()
        table = following.finish()
    assert table == make_table(path)


def test_a_file_that_is_there_only_at_the_end_is_hashed_then(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with Following(path) as following:
        time.sleep(0.05)
        grow(path, [CHUNK_BYTES * 5 + 1])
        assert following.finish() == make_table(path)


def test_leaving_early_waits_for_nothing_but_the_thread(tmp_path: Path) -> None:
    path = tmp_path / "data"
    grow(path, [1 << 20])
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="mkfs"), Following(path):
        raise RuntimeError("mkfs failed")
    assert threading.active_count() == before
    assert not [one for one in os.listdir("/proc/self/fd") if _leads_to(one, path)]


def test_no_file_at_all_is_an_error_and_no_empty_table(tmp_path: Path) -> None:
    with Following(tmp_path / "none") as following, pytest.raises(FileNotFoundError):
        following.finish()


def test_a_file_that_shrinks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    grow(path, [1 << 20])
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with Following(path) as following, pytest.raises(OSError, match="shorter"):
        following.finish()


def _leads_to(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except FileNotFoundError:
        return False
