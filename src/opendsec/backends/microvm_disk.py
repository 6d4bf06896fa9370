"""Disks of microVMs as files: an empty ext4 file system of a size.

A guest's disk is never mounted on the host: its content is the guest's, and a file system made by somebody hostile is
no thing to give to the host's kernel.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.linux.process import run
from opendsec.store.durable import disk_full_named

MKFS_TIMEOUT_S = 60.0


async def make_ext4(path: Path, *, size_bytes: int) -> None:
    """A new sparse file with an empty ext4 file system. Raises OSError (ProgramError), DiskFullError."""
    with disk_full_named(path.parent), path.open("xb") as file:
        file.truncate(size_bytes)
    features, extended = "^resize_inode,^metadata_csum", "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4", "-O", features, "-E", extended]
    await run([*argv, str(path)], timeout_s=MKFS_TIMEOUT_S)
