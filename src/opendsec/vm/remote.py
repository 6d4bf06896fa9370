"""Whether a directory lies on a file system that another machine, or a process, serves: reads there may take long, or
never come back.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
LOCAL: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "erofs", "f2fs", "zfs", "bcachefs"}
)
"""Everything else is taken for remote: that costs memory, the other error costs a machine that hangs."""


def is_remote(directory: Path) -> bool:
    """By the type of the file system in /proc/self/mountinfo. Blocking, but for a look at the directory no longer than
    that takes. Raises OSError.
    """
    number = directory.stat().st_dev
    return _of_disk(number) if os.major(number) else _look(number)


@functools.lru_cache(maxsize=64)
def _of_disk(number: int) -> bool:
    """Numbers of disks stay; those of file systems without one are used again."""
    return _look(number)


def _look(number: int) -> bool:
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        words = line.split()
        if words[2] == device:
            return words[words.index("-") + 1] not in LOCAL
    return True  # btrfs shows subvolumes under devices of their own
