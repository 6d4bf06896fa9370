"""A guest's memory in files: copied whole from where a VMM keeps it, or only what one machine has changed.

A machine that was restored maps its base file privately: what it writes are pages of its own, and those the kernel
shows in /proc/PID/pagemap (proc(5)) are all that has to be saved. They are written to `pages`, one after the other, and
where they belong to `index`: pairs of u64 (page number, count). Putting them back means writing them through
/proc/PID/mem of a VMM that has mapped the same base and executed nothing yet.

Refuses guests whose memory is not one mapping of the file it is asked for.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from opendsec.store.durable import disk_full_named
from opendsec.store.sparse import data_extents

MEMORY, PAGES, INDEX = "memory", "pages", "index"
PAGE = mmap.PAGESIZE
_RUN = struct.Struct("<QQ")
_ENTRY_BYTES = 8
_WINDOW = 4096
"""Pages asked about at once: 16 MiB of the guest."""
_CHUNK = 4 * 1024 * 1024
_ZEROS = bytes(PAGE)
_FILE_OR_SHARED, _SWAPPED, _PRESENT = 1 << 61, 1 << 62, 1 << 63
"""Documentation/admin-guide/mm/pagemap.rst"""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages."""

    first: int
    count: int


def runs_of(pages: Sequence[int]) -> Iterator[Run]:
    """Ascending page numbers as runs. Pure."""
    if not pages:
        return
    start = 0
    for at, (before, after) in enumerate(pairwise(pages), start=1):
        if after != before + 1:
            yield Run(pages[start], at - start)
            start = at
    yield Run(pages[start], len(pages) - start)


def find_mapping(pid: int, file: Path, *, size: int) -> int:
    """Where in its address space a process has mapped all of a file. Raises OSError (ESRCH: nowhere)."""
    wanted = file.stat()
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, _, offset, device, inode = line.split()[:5]
        if int(inode) != wanted.st_ino or int(offset, 16) or _device(device) != wanted.st_dev:
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        if end - start == size:
            return start
    raise OSError(errno.ESRCH, f"process {pid} has not mapped {size} bytes of {file}")


def _device(text: str) -> int:
    major, minor = text.split(":")
    return os.makedev(int(major, 16), int(minor, 16))


def private_pages(pid: int, start: int, *, size: int) -> list[int]:
    """Numbers of those pages of a private mapping that are the process's own. Raises OSError."""
    found: list[int] = []
    fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, size // PAGE, _WINDOW):
            wanted = min(_WINDOW, size // PAGE - first) * _ENTRY_BYTES
            data = os.pread(fd, wanted, (start // PAGE + first) * _ENTRY_BYTES)
            if len(data) != wanted:
                raise OSError(errno.EIO, f"the page map of process {pid} ends early")
            if any(data):
                found += [first + at for at, entry in enumerate(array("Q", data)) if _is_own(entry)]
    finally:
        os.close(fd)
    return found


def _is_own(entry: int) -> bool:
    return bool(entry & (_PRESENT | _SWAPPED)) and not entry & _FILE_OR_SHARED


def save_pages(pid: int, base: Path, target: Path, *, size: int) -> int:
    """Write `pages` and `index` of what the process changed of `base`; how many. Raises OSError, DiskFullError."""
    start = find_mapping(pid, base, size=size)
    runs = list(runs_of(private_pages(pid, start, size=size)))
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with disk_full_named(target), (target / PAGES).open("xb") as file:
            for run in runs:
                for data in _read(memory, start, run):
                    file.write(data)
        with disk_full_named(target):
            (target / INDEX).write_bytes(b"".join(_RUN.pack(run.first, run.count) for run in runs))
    finally:
        os.close(memory)
    return sum(run.count for run in runs)


def load_pages(pid: int, base: Path, saved: Path, *, size: int) -> None:
    """Put what `save_pages` wrote into a process that has mapped the same base. Raises OSError, ValueError."""
    start = find_mapping(pid, base, size=size)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        for run, data in _saved_runs(saved, size=size):
            done = 0
            while done < len(data):
                done += os.pwrite(memory, data[done : done + _CHUNK], start + run.first * PAGE + done)
    finally:
        os.close(memory)


def copy_memory(source: Path, target: Path) -> None:
    """A memory file without the pages that are zero, as a sparse file. Raises OSError, DiskFullError."""
    with disk_full_named(target.parent), source.open("rb") as old, target.open("xb") as new:
        new.truncate(os.fstat(old.fileno()).st_size)
        for at, length in data_extents(old.fileno()):
            for offset in range(at, at + length, _CHUNK):
                data = os.pread(old.fileno(), min(_CHUNK, at + length - offset), offset)
                _write_nonzero(new.fileno(), data, offset)


def apply_pages(saved: Path, memory: Path) -> None:
    """Write what `save_pages` wrote over a memory file of its own. Raises OSError, ValueError, DiskFullError."""
    with disk_full_named(memory.parent), memory.open("r+b") as file:
        for run, data in _saved_runs(saved, size=os.fstat(file.fileno()).st_size):
            file.seek(run.first * PAGE)
            file.write(data)


def _read(memory: int, start: int, run: Run) -> Iterator[bytes]:
    at, end = start + run.first * PAGE, start + (run.first + run.count) * PAGE
    while at < end:
        data = os.pread(memory, min(_CHUNK, end - at), at)
        if not data:
            raise OSError(errno.EIO, "the guest's memory ends early")
        yield data
        at += len(data)


def _saved_runs(saved: Path, *, size: int) -> Iterator[tuple[Run, memoryview]]:
    """Runs with their bytes. ValueError: the two files do not belong together."""
    index = (saved / INDEX).read_bytes()
    with (saved / PAGES).open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if len(index) % _RUN.size or sum(count for _, count in _RUN.iter_unpack(index)) * PAGE != length:
            raise ValueError(f"{INDEX} does not fit {PAGES}")
        if not length:
            return
        with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            at = 0
            for first, count in _RUN.iter_unpack(index):
                if (first + count) * PAGE > size:
                    raise ValueError(f"{INDEX} names a page beyond the memory")
                with view[at : at + count * PAGE] as data:
                    yield Run(first, count), data
                at += count * PAGE


def _write_nonzero(fd: int, data: bytes, offset: int) -> None:
    start = None
    for at in range(0, len(data), PAGE):
        if data[at : at + PAGE] == _ZEROS:
            if start is not None:
                os.pwrite(fd, data[start:at], offset + start)
                start = None
        elif start is None:
            start = at
    if start is not None:
        os.pwrite(fd, data[start:], offset + start)
