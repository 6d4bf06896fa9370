"""The only file that uses ctypes: prototypes, constants, and errno → OSError. One wrapper per syscall, with the man
page's name.

No wrapper has an opinion: it encodes its arguments, calls, checks, and raises OSError with the path.
"""

from __future__ import annotations

import ctypes
import os

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
"""sys/mount.h"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.mount.restype = ctypes.c_int
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.umount2.restype = ctypes.c_int


def _check(result: int, path: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def mount(source: str, target: str, fstype: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    encoded = (os.fsencode(source), os.fsencode(target), os.fsencode(fstype) or None)
    _check(_libc.mount(*encoded, flags, os.fsencode(options) or None), target)


def umount2(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), target)
