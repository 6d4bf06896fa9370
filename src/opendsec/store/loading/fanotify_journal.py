"""Which reads the filling process has taken and not answered: so that the next one can answer them.

    <run>/fanotify/journal     one slot for each descriptor number an event can have, and a heartbeat; shared memory

The kernel gives an event once, to whoever reads it, and lets the reader wait until somebody answers its number. A
process that is killed in between takes the question with it, so it is written down first. Memory of a file on a tmpfs
outlives the process and not the machine, which is how long a question lives.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SLOTS = 4096
"""Descriptor numbers; the filling process lets itself have no higher one."""
_SLOT = struct.Struct("=QQQQ")
_TAKEN = 1
_HEAD_BYTES = 64
_BEAT = struct.Struct("=Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A read somebody waits for."""

    number: int
    """Of the descriptor its event had."""
    inode: int
    offset: int
    count: int


class Journal:
    """Opened, and made when it is not there. One process writes at a time; others may look at the heartbeat."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, _HEAD_BYTES + SLOTS * _SLOT.size)
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def put(self, taken: Taken) -> None:
        """Before anything else is done about it."""
        at = _HEAD_BYTES + taken.number * _SLOT.size
        _SLOT.pack_into(self._memory, at, 0, taken.inode, taken.offset, taken.count)
        self._memory[at] = _TAKEN  # last, and one byte: a slot is there or not

    def clear(self, number: int) -> None:
        """After it was answered, and before the number can be another event's."""
        self._memory[_HEAD_BYTES + number * _SLOT.size] = 0

    def unanswered(self) -> Iterator[Taken]:
        """What an earlier process has left."""
        for number in range(SLOTS):
            taken, inode, offset, count = _SLOT.unpack_from(self._memory, _HEAD_BYTES + number * _SLOT.size)
            if taken:
                yield Taken(number=number, inode=inode, offset=offset, count=count)

    def forget(self) -> None:
        """Of a group that is no more."""
        self._memory[:] = bytes(len(self._memory))

    def beat(self) -> None:
        """The process that writes is well."""
        _BEAT.pack_into(self._memory, 0, time.monotonic_ns())

    def silent_s(self) -> float:
        """Seconds since the last beat."""
        (beat,) = _BEAT.unpack_from(self._memory, 0)
        return (time.monotonic_ns() - int(beat)) / 1e9

    def close(self) -> None:
        """Give back the memory."""
        self._memory.close()
