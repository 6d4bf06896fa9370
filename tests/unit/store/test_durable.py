"""Trees go away whole, without following links, and never by way of another file system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from opendsec.errors import DiskFullError
from opendsec.store.durable import appearing, disk_full_named, link_into, remove_tree, write_synced


def test_odd_trees_go_away(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    os.mkdir(os.fsencode(root) + b"/\xff")
    (root / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/kept").touch()
    (root / "many").mkdir()
    for number in range(300):
        (root / "many" / str(number)).mkdir()
        (root / "many" / str(number) / "f").touch()
    remove_tree(root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert (tmp_path / "outside/kept").exists()


def test_trees_deeper_than_a_path_can_name(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for name in ["tree", *["d" * 200] * 40]:
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_nothing_there_and_plain_files_are_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    remove_tree(tmp_path / "link")
    assert (tmp_path / "file").exists()
    remove_tree(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_another_file_system_is_not_entered() -> None:
    with pytest.raises(OSError, match="another file system") as caught:
        _empty_from_another_device()
    assert caught.value.errno == errno.EXDEV


def _empty_from_another_device() -> None:
    """/proc/self/fdinfo has no files to lose, and its directories are on a device that is not the one we claim."""
    from opendsec.store.durable import _enter

    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        _enter(b"self/fdinfo", fd, os.lstat("/").st_dev)
    finally:
        os.close(fd)


def test_the_first_publisher_wins(tmp_path: Path) -> None:
    write_synced(tmp_path / "one", b"1")
    write_synced(tmp_path / "two", b"1")
    assert link_into(tmp_path / "one", tmp_path / "name")
    assert not link_into(tmp_path / "two", tmp_path / "name")
    assert (tmp_path / "name").stat().st_ino == (tmp_path / "one").stat().st_ino
    assert (tmp_path / "name").stat().st_mode & 0o777 == 0o444
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "one", b"2")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFullError, match=str(tmp_path)), disk_full_named(tmp_path):
        raise OSError(number, "full")


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_full_named(tmp_path):
        raise PermissionError(errno.EPERM, "no")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with appearing(target) as partial:
        partial.write_text("first")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError):
        _fails_halfway(target)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"target": "first"}


def _fails_halfway(target: Path) -> None:
    with appearing(target) as partial:
        partial.write_text("half of the sec")
        raise ZeroDivisionError
