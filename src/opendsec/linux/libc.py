"""The only ctypes file: Linux calls the standard library of Python 3.11 lacks, under their man pages' names.

Prototypes are declared once, at import. Each wrapper makes one check (the result) and has no opinion; failures are
OSError with the path they are about. Flags are the kernel's, from <linux/mount.h> and <linux/sched.h>. What these
calls are good for is `linux.mount`'s business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from pathlib import Path

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MNT_DETACH = 0x2
MNT_FORCE = 0x1
UMOUNT_NOFOLLOW = 0x8

OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = 0x80000
MOVE_MOUNT_F_EMPTY_PATH = 0x4
FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x100000

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_PRE_CONTENT = 0x8
FAN_UNLIMITED_QUEUE = 0x10
FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_PRE_ACCESS = 0x100000
"""linux/fanotify.h"""

_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_SET_FD = 5
_FSCONFIG_CMD_CREATE = 6

# The same numbers on every architecture since Linux 5.1.
_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_NR_FSOPEN = 430
_NR_FSCONFIG = 431
_NR_FSMOUNT = 432
_NR_OPENAT2 = 437
_NR_PIDFD_GETFD = 438
_NR_MOUNT_SETATTR = 442
_NR_CACHESTAT = 451

RESOLVE_NO_XDEV = 0x1
RESOLVE_NO_MAGICLINKS = 0x2
RESOLVE_NO_SYMLINKS = 0x4
RESOLVE_BENEATH = 0x8
"""linux/openat2.h"""

RENAME_NOREPLACE = 0x1
RENAME_EXCHANGE = 0x2
"""linux/fs.h"""

FALLOC_FL_KEEP_SIZE = 0x1
FALLOC_FL_PUNCH_HOLE = 0x2
"""linux/falloc.h"""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""malloc.h"""

_LOG_BYTES = 1024


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.mount.restype = ctypes.c_int
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.umount2.restype = ctypes.c_int
_libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
_libc.setns.restype = ctypes.c_int
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.unshare.restype = ctypes.c_int
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_libc.renameat2.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long
_libc.fanotify_init.argtypes = (ctypes.c_uint, ctypes.c_uint)
_libc.fanotify_init.restype = ctypes.c_int
_libc.fanotify_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)
_libc.fanotify_mark.restype = ctypes.c_int


def _check(result: int, what: str, path: str | Path | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        text = f"{what}: {os.strerror(number)}"
        raise OSError(number, text, os.fspath(path)) if path is not None else OSError(number, text)
    return result


def _syscall(number: int, *arguments: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def _string(text: str | Path) -> ctypes.c_char_p:
    return ctypes.c_char_p(os.fsencode(text))


def mount(source: str | Path, target: str | Path, fstype: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    encoded = (os.fsencode(source), os.fsencode(target), fstype.encode() or None)
    result = _libc.mount(*encoded, flags, os.fsencode(options) or None)
    _check(result, f"mount {fstype or 'flags'}", target)


def umount2(target: str | Path, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), "umount2", target)


def setns(fd: int, nstype: int = 0) -> None:
    """setns(2): the calling thread only."""
    _check(_libc.setns(fd, nstype), "setns")


def unshare(flags: int) -> None:
    """unshare(2): the calling thread only."""
    _check(_libc.unshare(flags), "unshare")


def open_tree(dirfd: int, path: str | Path, flags: int) -> int:
    """open_tree(2): a new descriptor."""
    result = _syscall(_NR_OPEN_TREE, ctypes.c_int(dirfd), _string(path), ctypes.c_uint(flags))
    return _check(result, "open_tree", path)


def move_mount(from_fd: int, from_path: str | Path, to_fd: int, to_path: str | Path, flags: int) -> None:
    """move_mount(2)."""
    result = _syscall(
        _NR_MOVE_MOUNT,
        ctypes.c_int(from_fd),
        _string(from_path),
        ctypes.c_int(to_fd),
        _string(to_path),
        ctypes.c_uint(flags),
    )
    _check(result, "move_mount", to_path)


def fsopen(fstype: str, flags: int = FSOPEN_CLOEXEC) -> int:
    """fsopen(2): a new descriptor."""
    return _check(_syscall(_NR_FSOPEN, _string(fstype), ctypes.c_uint(flags)), f"fsopen {fstype}")


def fsconfig_set_flag(fs_fd: int, key: str) -> None:
    """fsconfig(2) FSCONFIG_SET_FLAG."""
    _fsconfig(fs_fd, _FSCONFIG_SET_FLAG, key, None, 0)


def fsconfig_set_string(fs_fd: int, key: str, value: str | Path) -> None:
    """fsconfig(2) FSCONFIG_SET_STRING."""
    _fsconfig(fs_fd, _FSCONFIG_SET_STRING, key, value, 0)


def fsconfig_set_fd(fs_fd: int, key: str, fd: int) -> None:
    """fsconfig(2) FSCONFIG_SET_FD."""
    _fsconfig(fs_fd, _FSCONFIG_SET_FD, key, None, fd)


def fsconfig_create(fs_fd: int) -> None:
    """fsconfig(2) FSCONFIG_CMD_CREATE; the error carries the kernel's own words, when it had any."""
    _fsconfig(fs_fd, _FSCONFIG_CMD_CREATE, None, None, 0)


def _fsconfig(fs_fd: int, command: int, key: str | None, value: str | Path | None, aux: int) -> None:
    result = _syscall(
        _NR_FSCONFIG,
        ctypes.c_int(fs_fd),
        ctypes.c_uint(command),
        None if key is None else _string(key),
        None if value is None else _string(value),
        ctypes.c_int(aux),
    )
    if result < 0:
        number = ctypes.get_errno()
        words = _kernel_words(fs_fd)
        raise OSError(number, f"fsconfig {key or 'create'}: {words or os.strerror(number)}")


def _kernel_words(fs_fd: int) -> str:
    """Messages of a file system context, e.g. `e erofs: cannot find valid erofs superblock` (fsopen(2))."""
    words = []
    while True:
        try:
            words.append(os.read(fs_fd, _LOG_BYTES).decode(errors="replace").strip())
        except OSError:
            return "; ".join(words)


def fsmount(fs_fd: int, flags: int = FSMOUNT_CLOEXEC, attr_flags: int = 0) -> int:
    """fsmount(2): a descriptor of a detached mount."""
    result = _syscall(_NR_FSMOUNT, ctypes.c_int(fs_fd), ctypes.c_uint(flags), ctypes.c_uint(attr_flags))
    return _check(result, "fsmount")


def mount_setattr(
    dirfd: int,
    path: str | Path,
    flags: int,
    *,
    attr_set: int = 0,
    attr_clr: int = 0,
    propagation: int = 0,
    userns_fd: int = 0,
) -> None:
    """mount_setattr(2)."""
    attr = _MountAttr(attr_set, attr_clr, propagation, userns_fd)
    result = _syscall(
        _NR_MOUNT_SETATTR,
        ctypes.c_int(dirfd),
        _string(path),
        ctypes.c_uint(flags),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(result, "mount_setattr", path)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2)."""
    _check(_libc.fallocate(fd, mode, offset, length), "fallocate")


def renameat2(source: Path, target: Path, flags: int) -> None:
    """renameat2(2). EEXIST: the target is there (RENAME_NOREPLACE); ENOENT: one of the two is not."""
    result = _libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags)
    _check(result, "renameat2", target)


def fanotify_init(flags: int, event_flags: int) -> int:
    """fanotify_init(2): a new descriptor; `event_flags` are those of the descriptors in events."""
    return _check(_libc.fanotify_init(flags, event_flags), "fanotify_init")


def fanotify_mark(group_fd: int, flags: int, mask: int, dirfd: int, path: str | Path) -> None:
    """fanotify_mark(2)."""
    _check(_libc.fanotify_mark(group_fd, flags, mask, dirfd, os.fsencode(path)), "fanotify_mark", path)


def pidfd_getfd(pidfd: int, target_fd: int) -> int:
    """pidfd_getfd(2): a duplicate of another process's descriptor."""
    result = _syscall(_NR_PIDFD_GETFD, ctypes.c_int(pidfd), ctypes.c_int(target_fd), ctypes.c_uint(0))
    return _check(result, "pidfd_getfd")


def openat2(dirfd: int, path: str | Path, flags: int, resolve: int) -> int:
    """openat2(2): a new descriptor, close-on-exec; `resolve` says which ways of a path are refused."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve)
    result = _syscall(_NR_OPENAT2, ctypes.c_int(dirfd), _string(path), ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    return _check(result, "openat2", path)


def cachestat(fd: int, offset: int, length: int) -> int:
    """cachestat(2), Linux 6.5: how many pages of that part of a file are in the page cache."""
    part = (ctypes.c_uint64 * 2)(offset, length)
    found = (ctypes.c_uint64 * 5)()
    _check(_syscall(_NR_CACHESTAT, ctypes.c_int(fd), part, found, ctypes.c_uint(0)), "cachestat")
    return int(found[0])


def address_of(memory: bytearray | mmap.mmap) -> int:
    """Where the bytes of a writable buffer lie in this process, for calls that take addresses; keep it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def mallopt(parameter: int, value: int) -> bool:
    """Set one of M_* of this process's allocator; False where the C library has no such call, or refuses."""
    call = getattr(_libc, "mallopt", None)
    return call is not None and call(parameter, value) == 1


_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret"""
_TSC_SAMPLE_NS = 50_000_000


def tsc_khz() -> int:
    """Frequency of this x86-64 processor's time stamp counter, measured for 50 ms. Blocking."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(_RDTSC)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address_of(code))
        began, first = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW), read()
        while (now := time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)) < began + _TSC_SAMPLE_NS:
            pass
        return int((read() - first) * 1_000_000 // (now - began))
