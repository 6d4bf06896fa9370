"""Limited disks: really full at the limit, and gone without a trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.linux.disk import make_disk, remove_disk
from opendsec.linux.mount import mountinfo
from opendsec.linux.process import ProgramError

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.loop]
MIB = 1024 * 1024


def loops() -> set[str]:
    return {path.parent.parent.name for path in Path("/sys/block").glob("loop*/loop/backing_file")}


def fill(path: Path, size_bytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))


async def test_a_disk_ends_where_it_was_told(tmp_path: Path) -> None:
    before = loops()
    mount = await make_disk(tmp_path, size_bytes=16 * MIB)
    try:
        assert (tmp_path / "disk.img").stat().st_blocks * 512 < 2 * MIB
        with pytest.raises(OSError, match="No space left"):
            fill(mount / "big", 16 * MIB)
        assert 13 * MIB < (mount / "big").stat().st_size < 16 * MIB
    finally:
        remove_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not [entry for entry in mountinfo() if entry.target.startswith(str(tmp_path))]
    assert loops() <= before


async def test_removal_is_idempotent_and_finds_half_made_disks(tmp_path: Path) -> None:
    remove_disk(tmp_path)
    (tmp_path / "disk.img").write_bytes(b"")
    remove_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        await make_disk(tmp_path, size_bytes=16 * MIB)
    assert (tmp_path / "disk.img").read_bytes() == b"somebody's"


async def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        await make_disk(tmp_path, size_bytes=1)
    with pytest.raises((OSError, ProgramError)):
        await make_disk(tmp_path, size_bytes=1 << 62)
    assert list(tmp_path.iterdir()) == []
