"""Disks of microVMs as files: an empty ext4 file system of a size, and copies that stay sparse.

A guest's disk is never mounted on the host: its content is the guest's, and a file system made by somebody hostile is
no thing to give to the host's kernel.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from opendsec.linux.process import run
from opendsec.store.durable import disk_full_named
from opendsec.vm.sparse import data_extents

MKFS_TIMEOUT_S = 60.0
_FICLONE = 0x40049409
"""linux/fs.h"""
_CHUNK = 1024 * 1024
_CANNOT_CLONE = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV})


async def make_ext4(path: Path, *, size_bytes: int) -> None:
    """A new sparse file with an empty ext4 file system. Raises OSError (ProgramError), DiskFullError."""
    with disk_full_named(path.parent), path.open("xb") as file:
        file.truncate(size_bytes)
    features, extended = "^resize_inode,^metadata_csum", "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4", "-O", features, "-E", extended]
    await run([*argv, str(path)], timeout_s=MKFS_TIMEOUT_S)


def copy_sparse(source: Path, target: Path) -> None:
    """A file like it: shared blocks where the file system can (reflink), else its data and none of its holes.

    Raises OSError, FileExistsError, DiskFullError.
    """
    with disk_full_named(target.parent), source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        else:
            return
        new.truncate(os.fstat(old.fileno()).st_size)
        for start, length in data_extents(old.fileno()):
            _copy(old.fileno(), new.fileno(), start, start + length)


def _copy(old: int, new: int, start: int, end: int) -> None:
    at = start
    while at < end:
        data = os.pread(old, min(_CHUNK, end - at), at)
        if not data:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        at += os.pwrite(new, data, at)
