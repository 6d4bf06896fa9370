"""Reads of layers that were served before this process and cannot be served yet: they wait, as for a chunk.

Where the table of a layer is neither on the node nor to be had from the store, a server that takes over cannot check
a byte of it. It may be had a little later, so reads are kept until then, each no longer than reads may wait: EIO after
that, and at once for the reads that follow, until the file is served. (Readers of one page wait for each other in the
kernel: if each waited anew, the last would wait as often as there are sandboxes.) Nothing here reads anything.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opendsec.linux.fuse import File
from opendsec.store.loading.engine import Answer

Read = Callable[[int, int, Answer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    number: int
    offset: int
    size: int
    reply: Answer
    deadline: float


class EarlyReads:
    """Files that are to be served, and the reads of them so far. Threads may share it."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._files: dict[int, File] = {}
        self._reads: deque[_Read] = deque()
        self._given_up: set[int] = set()

    def expect(self, file: File) -> None:
        """This file will be served."""
        with self._lock:
            self._files[file.number] = file

    def file(self, number: int) -> File | None:
        """The file of that number, if it is one of these."""
        return self._files.get(number)

    def all(self) -> Iterable[File]:
        """All of them."""
        return list(self._files.values())

    def keep(self, file: File, offset: int, size: int, reply: Answer) -> bool:
        """Keep a read, or fail it; False when the file is served by now."""
        deadline = time.monotonic() + self._patience_s
        with self._lock:
            if file.number not in self._files:
                return False
            is_given_up = file.number in self._given_up
            if not is_given_up:
                self._reads.append(_Read(number=file.number, offset=offset, size=size, reply=reply, deadline=deadline))
        if is_given_up:
            reply.fail(errno.EIO)
        return True

    def served(self, number: int, read: Read) -> None:
        """From now on that file is: hand over what was kept."""
        with self._lock:
            if self._files.pop(number, None) is None:
                return
            kept = [one for one in self._reads if one.number == number]
            self._reads = deque(one for one in self._reads if one.number != number)
        for one in kept:
            read(one.offset, one.size, one.reply)

    def end_overdue(self, now: float) -> None:
        """Those that have waited until `now` get EIO."""
        while True:
            with self._lock:
                if not self._reads or self._reads[0].deadline > now:
                    return
                first = self._reads.popleft()
                self._given_up.add(first.number)
            first.reply.fail(errno.EIO)
