"""A local directory as a tree stream, for uploads: flat memory, parents before children, nothing followed.

Sockets, FIFOs and devices are left out. A file that shrinks while it is read is an error, never a shorter copy.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from opendsec.client.progress import Meter
from opendsec.client.tree_format import END, TreeEntry, pack_entry
from opendsec.errors import FileError
from opendsec.model.file import FileKind

CHUNK_BYTES = 512 * 1024


def pack_tree(root: Path, meter: Meter) -> Iterator[bytes]:
    """Chunks of about CHUNK_BYTES. Raises OSError with the path, FileError when a file changes under us."""
    pending = bytearray()
    for piece in _pieces(os.fsencode(root), meter):
        pending += piece
        if len(pending) >= CHUNK_BYTES:
            yield bytes(pending)
            pending.clear()
    pending += END
    yield bytes(pending)


def _pieces(root: bytes, meter: Meter) -> Iterator[bytes]:
    waiting = [b""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(root + b"/" + directory) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        below = []
        for entry in entries:
            name = directory + b"/" + entry.name if directory else entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                below.append(name)
            yield from _entry_pieces(entry.path, name, status, meter)
        waiting.extend(reversed(below))


def _entry_pieces(path: bytes, name: bytes, status: os.stat_result, meter: Meter) -> Iterator[bytes]:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        yield pack_entry(TreeEntry(kind=FileKind.DIRECTORY, name=name, mode=mode, mtime_ns=status.st_mtime_ns))
    elif stat.S_ISLNK(status.st_mode):
        link = os.readlink(path)  # noqa: PTH115 - names are bytes here
        yield pack_entry(TreeEntry(kind=FileKind.SYMLINK, name=name, mode=mode, mtime_ns=status.st_mtime_ns, link=link))
    elif stat.S_ISREG(status.st_mode):
        yield from _file_pieces(path, name, meter)


def _file_pieces(path: bytes, name: bytes, meter: Meter) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _changed(path)
        left = status.st_size
        mode = stat.S_IMODE(status.st_mode)
        yield pack_entry(TreeEntry(kind=FileKind.FILE, name=name, mode=mode, mtime_ns=status.st_mtime_ns, size=left))
        while left:
            data = file.read(min(left, CHUNK_BYTES))
            if not data:
                raise _changed(path)
            left -= len(data)
            meter.add(len(data), os.fsdecode(name))
            yield data
        meter.file_done(os.fsdecode(name))


def _changed(path: bytes) -> FileError:
    text = os.fsdecode(path)
    return FileError(
        f"{text} changed while it was read", detail={"path": text, "errno": "EIO"}, remedy="upload it again"
    )
