"""Files with holes: what they really hold, and copies that have the same holes.

Disks and memory of machines are mostly holes. The kernel says where data is (lseek(2) SEEK_DATA), and only its ENXIO
means "a hole to the end": every other error is raised, for a copy that took it for a hole would be zeros where the disk
could not be read.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opendsec.store.durable import disk_full_named

_FICLONE: Final = 0x40049409
"""linux/fs.h"""
_CANNOT_CLONE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV})
_PIECE: Final = 16 << 20


class CutShortError(OSError):
    """The file became shorter while it was copied."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EIO, "the file became shorter while it was copied", str(path))


def data_extents(fd: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is no hole, ascending. Raises OSError."""
    end = os.fstat(fd).st_size
    position = 0
    while position < end:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, position - start


def copy_sparse(source: Path, target: Path) -> None:
    """A new file, mode 0600, of the same bytes: shared blocks where the file system can (reflink), else its data and
    none of its holes. A link is not followed.

    Raises OSError (FileExistsError, CutShortError), DiskFullError; a partial target is the caller's to remove.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with disk_full_named(target.parent):
            writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if not _cloned(reader, writer):
                    os.ftruncate(writer, os.fstat(reader).st_size)
                    for start, length in data_extents(reader):
                        _copy(reader, writer, start, start + length, source)
            finally:
                os.close(writer)
    finally:
        os.close(reader)


def make_own(path: Path) -> None:
    """Put a copy in the place of a file that somebody else wrote, who may keep it open: nobody but this process has
    ever had the copy open, and others may start from it. Raises OSError, DiskFullError.
    """
    own = path.with_name(f".{path.name}")
    try:
        copy_sparse(path, own)
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _cloned(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError as error:
        if error.errno not in _CANNOT_CLONE:
            raise
        return False
    return True


def _copy(reader: int, writer: int, at: int, end: int, source: Path) -> None:
    os.lseek(writer, at, os.SEEK_SET)
    while at < end:
        copied = os.sendfile(writer, reader, at, min(end - at, _PIECE))
        if not copied:
            raise CutShortError(source)
        at += copied
