"""Pre-content events (Linux 6.14): the kernel asks before it reads a range of a marked file, and waits for the answer.

    group = open_group(); arm(group, path)
    for request in parse(os.read(group, READ_BYTES)): … fill request.offset … ; os.write(group, allow(request.fd))

What one has to know of it, each tried on Linux 6.18:

* Only descriptors opened *while* the file is marked ask. One opened before never does, and also never will.
* The descriptor in an event asks nothing itself, and is open for reading and writing.
* An event that was read is answered by the *number* its descriptor had in the process that read it. Whoever holds the
  group may answer, also after that process died and its descriptors went.
* When the last descriptor of a group closes, everything that waits is **allowed**, and nothing asks any more. A file
  with holes then reads as zeros. So who fills files needs more than one holder of the group.
* mmap(2) asks once, for all of the mapping. Writing asks too.

Bytes in, values out, but for `open_group`, `arm` and `disarm`. What a range is filled with is not its business.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux import libc

READ_BYTES = 4096
"""About 80 events at a time."""
REASONS = frozenset({errno.EPERM, errno.EIO, errno.EBUSY, errno.ETXTBSY, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT})
"""What the kernel takes as a reason; others are EINVAL."""

_METADATA = struct.Struct("=IBBHQii")
_INFO = struct.Struct("=BBH")
_RANGE = struct.Struct("=IQQ")
_RESPONSE = struct.Struct("=iI")
_VERSION = 3
_INFO_RANGE = 6
_ALLOW = 0x1
_DENY = 0x2
_ERRNO_SHIFT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Somebody is about to read, and waits."""

    fd: int
    """Of the file, for reading and writing; whoever read the event closes it after the answer. Negative: none could
    be opened, and the kernel has refused the read itself."""
    pid: int
    offset: int
    count: int
    """Bytes. 0 with `offset` 0: the kernel did not say, so everything."""


def open_group() -> int:
    """A new group: a descriptor that does not block, for who waits may go away.

    OSError EINVAL before Linux 6.14, EPERM without CAP_SYS_ADMIN.
    """
    flags = libc.FAN_CLASS_PRE_CONTENT | libc.FAN_CLOEXEC | libc.FAN_NONBLOCK | libc.FAN_UNLIMITED_QUEUE
    return libc.fanotify_init(flags, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0))


def arm(group: int, path: Path) -> None:
    """Descriptors of the file that are opened from now on ask. Idempotent.

    OSError EOPNOTSUPP or EINVAL: not on this file system.
    """
    libc.fanotify_mark(group, libc.FAN_MARK_ADD, libc.FAN_PRE_ACCESS, libc.AT_FDCWD, path)


def disarm(group: int, path: Path) -> None:
    """They ask no more. Idempotent."""
    try:
        libc.fanotify_mark(group, libc.FAN_MARK_REMOVE, libc.FAN_PRE_ACCESS, libc.AT_FDCWD, path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise


def parse(content: bytes) -> tuple[Request, ...]:
    """The events of one read(2) of a group. ValueError for what is none, or of another version."""
    found = []
    while content:
        if len(content) < _METADATA.size:
            raise ValueError(f"{len(content)} bytes are no fanotify event")
        length, version, _, header, mask, fd, pid = _METADATA.unpack_from(content)
        if version != _VERSION or header < _METADATA.size or not header <= length <= len(content):
            raise ValueError(f"fanotify event of version {version}, {length} bytes of {len(content)}")
        if mask & libc.FAN_PRE_ACCESS:
            offset, count = _range(content[header:length])
            found.append(Request(fd=fd, pid=pid, offset=offset, count=count))
        content = content[length:]
    return tuple(found)


def _range(records: bytes) -> tuple[int, int]:
    while len(records) >= _INFO.size:
        kind, _, length = _INFO.unpack_from(records)
        if not _INFO.size <= length <= len(records):
            raise ValueError(f"fanotify record of {length} bytes")
        if kind == _INFO_RANGE:
            if length < _INFO.size + _RANGE.size:
                raise ValueError(f"fanotify range of {length} bytes")
            _, offset, count = _RANGE.unpack_from(records, _INFO.size)
            return offset, count
        records = records[length:]
    return 0, 0


def allow(fd: int) -> bytes:
    """The answer that lets the read go on."""
    return _RESPONSE.pack(fd, _ALLOW)


def deny(fd: int, reason: int = errno.EIO) -> bytes:
    """The answer that fails the read with `reason`, or with EIO when the kernel does not take that one."""
    number = reason if reason in REASONS else errno.EIO
    return _RESPONSE.pack(fd, _DENY | number << _ERRNO_SHIFT)


def answer(group: int, response: bytes) -> bool:
    """Send it; False when nobody waits for it (any more)."""
    try:
        os.write(group, response)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True
