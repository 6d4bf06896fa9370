"""Disks of microVMs as files: an empty ext4 file system of a size.

A guest's disk is never mounted on the host: its content is the guest's, and a file system made by somebody hostile is
no thing to give to the host's kernel.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.linux.process import run
from opendsec.store.durable import disk_full_named

MKFS_TIMEOUT_S = 60.0
_BYTES_OF_AN_INODE = 4096
"""mke2fs makes one for so many bytes at most (mke2fs.conf: small file systems; larger ones get fewer)."""
_ROUNDED_UP = 65_536
"""Inodes more than that, for whole groups."""


def most_inodes(size_bytes: int) -> int:
    """What a disk of `make_ext4` never has more of: files, directories and all else but further names of a file."""
    return size_bytes // _BYTES_OF_AN_INODE + _ROUNDED_UP


async def make_ext4(path: Path, *, size_bytes: int) -> None:
    """A new sparse file with an empty ext4 file system. Raises OSError (ProgramError), DiskFullError."""
    with disk_full_named(path.parent), path.open("xb") as file:
        file.truncate(size_bytes)
    features, extended = "^resize_inode,^metadata_csum", "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4", "-O", features, "-E", extended]
    await run([*argv, str(path)], timeout_s=MKFS_TIMEOUT_S)
