"""Whether a directory lies on a file system that another machine, or a process, serves: reads there may take long, or
never come back.
"""

from __future__ import annotations

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
    status = directory.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        words = line.split()
        if words[2] == device:
            return words[words.index("-") + 1] not in LOCAL
    return True  # btrfs shows subvolumes under devices of their own
