"""One file of a FUSE file system whose reads do as they are told: wait, fail, lie, or never come back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.linux import fuse, libc
from opendsec.linux.fuse import File, Reply


class Told:
    """The files of a directory, served as they are until told otherwise."""

    def __init__(self, source: Path) -> None:
        self.reads = 0
        self.wait_s = 0.0
        self.fail_after: int | None = None
        self.hang_after: int | None = None
        self._paths = dict(enumerate(sorted(source.iterdir()), start=2))
        self._hung: list[Reply] = []

    def by_name(self, name: str) -> File | None:
        return next((file for file in self.all() if file.name == name), None)

    def by_number(self, number: int) -> File | None:
        path = self._paths.get(number)
        return None if path is None else File(number=number, name=path.name, size_bytes=path.stat().st_size)

    def all(self) -> Iterable[File]:
        return [file for number in self._paths if (file := self.by_number(number)) is not None]

    def read(self, file: File, offset: int, size: int, reply: Reply) -> None:
        if file.name != "mem":
            reply.give(self._bytes(file, offset, size))
            return
        self.reads += 1
        if self.hang_after is not None and self.reads > self.hang_after:
            self._hung.append(reply)
        elif self.fail_after is not None and self.reads > self.fail_after:
            reply.fail(errno.EIO)
        else:
            threading.Timer(self.wait_s, lambda: reply.give(self._bytes(file, offset, size))).start()

    def let_go(self) -> None:
        """Answer what hangs, with an error; the kernel tries again by single pages."""
        self.hang_after, self.fail_after = None, 0
        for reply in self._hung:
            reply.fail(errno.EIO)

    def _bytes(self, file: File, offset: int, size: int) -> bytes:
        with self._paths[file.number].open("rb") as opened:
            return os.pread(opened.fileno(), size, offset)


@contextmanager
def served(source: Path, target: Path) -> Iterator[Told]:
    """`source` once more at `target`, by FUSE."""
    told = Told(source)
    fd = fuse.open_device()
    fuse.mount(fd, target)
    thread = threading.Thread(target=fuse.serve, args=(fd, told))
    thread.start()
    try:
        yield told
    finally:
        told.let_go()
        # By force: another process's mount namespace, made meanwhile, may hold a copy of the mount as long as it likes.
        libc.umount2(target, libc.MNT_FORCE | libc.MNT_DETACH)
        thread.join(60)
        os.close(fd)
