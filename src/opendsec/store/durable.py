"""Files that are either there whole or not there at all, and trees that go away whole.

A name appears by link(2) or rename(2) of a file whose bytes are already on the disk, then the directory is synced; so
a crash at any point leaves the old state or the new one. It refuses to overwrite content-addressed files: the first
publisher wins, because the second has the same bytes. File systems without hard links get names by rename(2) instead.
Removal never crosses into another file system, so a forgotten mount is not emptied.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.errors import DiskFullError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""How file systems say that they have no hard links, or no more for this file."""


@contextmanager
def disk_full_named(place: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into DiskFullError that names the place; every other OSError passes."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(place) from error
        raise


def disk_full(place: Path) -> DiskFullError:
    """The error itself, for those who learn of it from a program's output."""
    return DiskFullError(
        f"no space left on the disk of {place}",
        detail={"path": str(place)},
        remedy="remove images with `opendsec image rm` and then `opendsec image gc`, or give it more room",
    )


def sync_directory(directory: Path) -> None:
    """fsync(2) of a directory: the names in it survive a crash."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """fsync(2) of a file's bytes and metadata."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, content: bytes, *, mode: int = 0o444) -> None:
    """Create a new file with this content, on the disk when the call returns. FileExistsError when it is there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(content)
        file.flush()
        os.fsync(fd)


def link_into(source: Path, target: Path) -> bool:
    """Give a synced file its content-addressed name. False when another publisher was first (same name, same bytes).

    The name is on the disk once the caller has synced the directory: also one that was there, for whoever made it may
    have died before it did so. Without hard links `source` is moved. Two publishers of the same new bytes may then both
    move theirs: readers of the first see the same bytes to the end.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if target.exists():
            return False
        source.rename(target)
    return True


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A hidden name beside `target` for the body to write to; it becomes `target` if the body ends well, else it goes.

    Whole or not at all for readers, but not synced: for what a crash of the machine may take away.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def rename_onto(source: Path, target: Path) -> None:
    """Replace `target` by a synced file of the same file system, in one step."""
    source.rename(target)
    sync_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a file or a whole tree; nothing there is fine. OSError EXDEV when a file system is mounted below."""
    try:
        root = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(root.st_mode):
        path.unlink()
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        empty_directory(fd, root.st_dev)
    finally:
        os.close(fd)
    path.rmdir()


def empty_directory(directory_fd: int, device: int) -> None:
    """Remove everything below an open directory of file system `device`, by descriptor, following no link.

    Iterative with one descriptor per level, so neither deep trees nor names that are no text stop it.
    """
    stack = [(os.dup(directory_fd), b"", _remove_files(directory_fd))]
    try:
        while stack:
            fd, name, subdirectories = stack[-1]
            if subdirectories:
                below = subdirectories.pop()
                child = _enter(below, fd, device)
                remaining: list[bytes] = []
                stack.append((child, below, remaining))
                remaining.extend(_remove_files(child))
                continue
            stack.pop()
            os.close(fd)
            if stack:
                os.rmdir(name, dir_fd=stack[-1][0])
    finally:
        for fd, _, _ in stack:
            os.close(fd)


def _enter(name: bytes, parent_fd: int, device: int) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    if os.fstat(fd).st_dev != device:
        os.close(fd)
        raise OSError(errno.EXDEV, "another file system is mounted there", os.fsdecode(name))
    return fd


def _remove_files(fd: int) -> list[bytes]:
    """Unlink what is no directory; the names of the directories."""
    subdirectories = []
    for text in os.listdir(fd):
        name = os.fsencode(text)
        if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            subdirectories.append(name)
        else:
            os.unlink(name, dir_fd=fd)
    return subdirectories
