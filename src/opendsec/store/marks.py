"""How a layer says that something below it is hidden: the marks of overlayfs, and how they are read.

A whiteout (character device 0:0) says that there is nothing; a directory with OPAQUE shows nothing of those below it.
Attributes that begin with PRIVATE are overlayfs' own: no sandbox sees them.
"""

from __future__ import annotations

import errno
import os
import stat

PRIVATE = "trusted.overlay."
OPAQUE = "trusted.overlay.opaque"
ORIGIN = "trusted.overlay.origin"
"""A directory that lies in one layer only shows the names of its whiteouts, though they cannot be opened, unless it has
this attribute (ovl_get_inode in fs/overlayfs/inode.c); an empty one says that it came from nowhere in particular."""
ELSEWHERE = ("trusted.overlay.redirect", "trusted.overlay.metacopy")
"""What such an entry shows lies at another path or in another layer. Overlays of ours never make them."""
WHITEOUT = "trusted.overlay.whiteout"
"""Linux 6.8: an empty file with it is a whiteout too. Overlays of ours make devices."""

_NO_ATTRIBUTE = frozenset({errno.ENODATA, errno.EOPNOTSUPP})


def is_whiteout(status: os.stat_result) -> bool:
    """Whether an entry of a layer says that there is nothing."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(path: str) -> bool:
    """Whether a directory of a layer hides what is below it."""
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in _NO_ATTRIBUTE:
            return False
        raise


def attributes(path: str | bytes) -> dict[str, bytes]:
    """Extended attributes of an entry itself, without those of overlayfs, by name."""
    names = sorted(name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith(PRIVATE))
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
