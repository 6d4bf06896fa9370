"""Removing what a sandbox has written: trees made by somebody hostile, of any depth and size, without following a link.

Every step works on directory descriptors. Below `DEEP` levels a directory is first moved to the top, so that neither
the stack nor the descriptor table grows with what was inside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

DEEP = 64


def remove_contents(directory: int) -> None:
    """Empty the directory behind this descriptor. What is gone meanwhile is no error. Raises OSError."""
    counter = iter(range(1 << 62))
    while _empty(directory, directory, 0, counter):
        pass


def empty(*directories: Path) -> None:
    """Remove what is in them; one that is not there is empty. Blocking: a file system that discards what it frees waits
    for the disk each time. Raises OSError.
    """
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                remove_contents(fd)
            finally:
                os.close(fd)


def _empty(top: int, fd: int, depth: int, counter: Iterator[int]) -> bool:
    """Whether something was moved to the top and waits there."""
    moved = False
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in entries:
        with contextlib.suppress(FileNotFoundError):
            if not is_directory:
                os.unlink(name, dir_fd=fd)
            elif depth >= DEEP:
                os.rename(name, f".deep-{next(counter)}", src_dir_fd=fd, dst_dir_fd=top)
                moved = True
            else:
                moved |= _remove_directory(top, fd, name, depth, counter)
    return moved


def _remove_directory(top: int, parent: int, name: str, depth: int, counter: Iterator[int]) -> bool:
    with contextlib.suppress(OSError):  # the usual case, a small tree's end, in one call
        os.rmdir(name, dir_fd=parent)
        return False
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        moved = _empty(top, fd, depth + 1, counter)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
    return moved
