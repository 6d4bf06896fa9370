"""A read-only FUSE file system of flat files, in the kernel's own words (linux/fuse.h): one directory, files of fixed
size, reads that may be answered at any time, in any order, from any thread.

    fd = open_device()
    mount(fd, target)
    serve(fd, files)            # any number of threads may; returns when the file system is unmounted

No FUSE library, because those give each read a thread until it is answered: then one slow file takes the threads of
all others, and nobody can answer a read whose time is up. Here a read is a `Reply` that whoever has the bytes, or the
bad news, completes. The twelve messages a read-only file system needs are all that is understood; others get ENOSYS.

The file system ends with the last descriptor of /dev/fuse: reads fail then (ENOTCONN), they never hang. Who keeps a
second descriptor can serve on after the first process died: `resend` makes the kernel ask again what that one owed.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from opendsec.linux import libc

READ_BYTES = 1 << 20
"""The largest read the kernel may ask for."""
MAX_PENDING = 4096
"""Reads the kernel may have under way at once. Its default, 12, would let one slow file hold up all others."""
ROOT = 1
"""Number of the directory itself."""

_BUFFER_BYTES = 65_536
"""Messages to us are small; the kernel refuses buffers below 8 KiB."""
_FOREVER_S = 1 << 30
_MAJOR, _MINOR = 7, 31
_PAGE_BYTES = 4096

_LOOKUP, _FORGET, _GETATTR = 1, 2, 3
_OPEN, _READ, _STATFS, _RELEASE = 14, 15, 17, 18
_INIT, _OPENDIR, _READDIR, _RELEASEDIR = 26, 27, 28, 29
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42
_NOTIFY_RESEND = 7

_ASYNC_READ = 1 << 0
_ASYNC_DIO = 1 << 15
_MAX_PAGES = 1 << 22
_KEEP_CACHE = 1 << 1

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHIIH22x")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_OUT = struct.Struct("<QII")
_OPEN_OUT = struct.Struct("<QIi")
_READ_IN = struct.Struct("<QQIIQII")
_STATFS_OUT = struct.Struct("<QQQQQIIII24x")
_DIRENT = struct.Struct("<QQII")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of the directory. Name, size and number never change; the number is above ROOT."""

    number: int
    name: str
    size_bytes: int


class Files(Protocol):
    """What is in the directory. Calls come from every thread that serves, and must not wait for anything slow."""

    def by_name(self, name: str) -> File | None: ...

    def by_number(self, number: int) -> File | None: ...

    def all(self) -> Iterable[File]: ...

    def read(self, file: File, offset: int, size: int, reply: Reply) -> None:
        """See that `reply` is completed at some time. The part lies within the file."""


class Reply:
    """The answer the kernel waits for, to be given once: what comes after the first is not sent."""

    __slots__ = ("_done", "_fd", "_lock", "_unique")

    def __init__(self, fd: int, unique: int) -> None:
        self._fd = fd
        self._unique = unique
        self._done = False
        self._lock = threading.Lock()

    def give(self, *parts: bytes | memoryview) -> bool:
        """Complete it with these bytes, one after the other; False when it was complete already."""
        return self._send(0, parts)

    def fail(self, number: int) -> bool:
        """Complete it with an errno."""
        return self._send(-number, ())

    def _send(self, error: int, parts: tuple[bytes | memoryview, ...]) -> bool:
        with self._lock:
            if self._done:
                return False
            self._done = True
        head = _OUT.pack(_OUT.size + sum(map(len, parts)), error, self._unique)
        try:
            os.writev(self._fd, (head, *parts))
        except OSError as failure:
            # ENOENT: whoever asked was killed meanwhile; ENODEV, EBADF: unmounted, closed.
            if failure.errno not in (errno.ENOENT, errno.ENODEV, errno.EBADF):
                raise
        return True


def open_device() -> int:
    """A descriptor of /dev/fuse. OSError where the kernel has no FUSE."""
    return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)


def mount(fd: int, target: Path, *, source: str = "opendsec") -> None:
    """Mount what `fd` will serve, read-only."""
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={READ_BYTES}"
    flags = libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC
    libc.mount(source, target, "fuse.opendsec", flags, options)


def resend(fd: int) -> None:
    """Ask the kernel to send again what a process that died had read and not answered (Linux 6.9). OSError before."""
    os.write(fd, _OUT.pack(_OUT.size, _NOTIFY_RESEND, 0))


def serve(fd: int, files: Files) -> None:
    """Answer messages until the file system is unmounted."""
    while True:
        try:
            message = os.read(fd, _BUFFER_BYTES)
        except OSError as failure:
            if failure.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                continue  # a message was taken back while it was read
            if failure.errno == errno.ENODEV:
                return
            raise
        _, opcode, unique, node, *_ = _IN.unpack_from(message)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            continue  # these want no answer
        reply = Reply(fd, unique)
        try:
            _dispatch(files, opcode, node, message[_IN.size :], reply)
        except BaseException:
            reply.fail(errno.EIO)  # nobody else would ever answer
            raise


def _dispatch(files: Files, opcode: int, node: int, body: bytes, reply: Reply) -> None:
    if opcode == _READ:
        _read(files, node, body, reply)
    elif opcode == _LOOKUP:
        _give_entry(files.by_name(os.fsdecode(body.rstrip(b"\0"))) if node == ROOT else None, reply)
    elif opcode == _GETATTR:
        _give_attributes(files, node, reply)
    elif opcode in (_OPEN, _OPENDIR):
        reply.give(_OPEN_OUT.pack(0, _KEEP_CACHE if opcode == _OPEN else 0, 0))
    elif opcode == _READDIR:
        _read_directory(files, body, reply)
    elif opcode == _STATFS:
        reply.give(_STATFS_OUT.pack(0, 0, 0, 0, 0, _PAGE_BYTES, 255, _PAGE_BYTES, 0))
    elif opcode == _INIT:
        _give_init(body, reply)
    elif opcode in (_RELEASE, _RELEASEDIR, _DESTROY):
        reply.give()
    else:
        reply.fail(errno.ENOSYS)


def _give_init(body: bytes, reply: Reply) -> None:
    major, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if (major, minor) < (_MAJOR, _MINOR):
        reply.fail(errno.EPROTO)
        return
    wanted = flags & (_ASYNC_READ | _ASYNC_DIO | _MAX_PAGES)
    pages = READ_BYTES // _PAGE_BYTES
    reply.give(
        _INIT_OUT.pack(_MAJOR, _MINOR, readahead, wanted, MAX_PENDING, MAX_PENDING, _PAGE_BYTES, 1, pages, 0, 0, 0, 0)
    )


def _read(files: Files, node: int, body: bytes, reply: Reply) -> None:
    _, offset, size, *_ = _READ_IN.unpack_from(body)
    file = files.by_number(node)
    if file is None:
        reply.fail(errno.EIO)
        return
    size = min(size, file.size_bytes - offset)
    if size <= 0:
        reply.give()
    else:
        files.read(file, offset, size, reply)


def _give_entry(file: File | None, reply: Reply) -> None:
    if file is None:
        reply.fail(errno.ENOENT)
    else:
        reply.give(_ENTRY.pack(file.number, 0, _FOREVER_S, _FOREVER_S, 0, 0), _attributes(file))


def _give_attributes(files: Files, node: int, reply: Reply) -> None:
    file = None if node == ROOT else files.by_number(node)
    if file is None and node != ROOT:
        reply.fail(errno.EIO)
    else:
        reply.give(_ATTR_OUT.pack(_FOREVER_S, 0, 0), _attributes(file))


def _attributes(file: File | None) -> bytes:
    """struct fuse_attr; of the directory when None."""
    number, size = (ROOT, 0) if file is None else (file.number, file.size_bytes)
    mode = stat.S_IFDIR | 0o500 if file is None else stat.S_IFREG | 0o400
    links = 2 if file is None else 1
    return _ATTR.pack(number, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, _PAGE_BYTES, 0)


def _read_directory(files: Files, body: bytes, reply: Reply) -> None:
    _, offset, size, *_ = _READ_IN.unpack_from(body)
    listing, total = [], 0
    for place, file in enumerate(sorted(files.all(), key=lambda one: one.name)):
        if place < offset:
            continue
        name = os.fsencode(file.name)
        entry = _DIRENT.pack(file.number, place + 1, len(name), stat.S_IFREG >> 12) + name
        entry += bytes(-len(entry) % 8)
        total += len(entry)
        if total > size:
            break
        listing.append(entry)
    reply.give(*listing)
