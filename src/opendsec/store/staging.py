"""A private directory inside the store in which an image is put together, gone afterwards whatever happens.

It lies on the store's own file system, because only there can a finished file be given its final name in one step.
Its owner holds flock(2) on the directory itself, which the kernel drops when the owner dies; so leftovers are
recognised without process ids or ages: a directory whose lock can be taken belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.store.durable import disk_full_named, remove_tree


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold the exclusive flock(2) of a file; waits for other holders, which hold it for milliseconds."""
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def staged(parent: Path, lock_file: Path) -> Iterator[Path]:
    """A fresh directory (mode 0700) below `parent`, removed on leaving. ENOSPC in the body becomes DiskFullError."""
    path = parent / secrets.token_hex(8)
    with disk_full_named(parent), locked(lock_file):
        path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with disk_full_named(parent):
            yield path
    finally:
        try:
            remove_tree(path)
        finally:
            os.close(fd)


def reap_staging(parent: Path, lock_file: Path) -> int:
    """Remove the directories whose owner is dead; how many there were. A live owner's directory is never touched."""
    with locked(lock_file):
        return sum(_reap(path) for path in sorted(parent.iterdir()))


def _reap(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
