"""The chunk table of a data file while mkfs.erofs is still writing it, and the file on its way to the disk meanwhile.

A second core hashes what is there already, so that little is left to do when the program ends. It relies on a file that
only grows: whoever writes must never go back to what it has written. mkfs.erofs before 1.10 does not; for later ones,
which were not looked into, `layers` waits for the end instead. So it does on file systems over a network: the size they
show of a file that is being written goes back and forth, and bytes below it may not be there yet (seen with MooseFS).
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from opendsec.linux.mount import mountinfo
from opendsec.store.chunks import CHUNK_BYTES, DIGEST_BYTES

_LOOK_EVERY_S = 0.02
_PIECE_BYTES = 64 * CHUNK_BYTES
_SYNC_BYTES = 512 * CHUNK_BYTES
"""So much more before the disk is asked again."""
_OF_THIS_NODE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "bcachefs", "zfs"})


def can_follow(directory: Path) -> bool:
    """Whether a file may be read in this directory while it is written: its file system is this node's own."""
    place = directory.resolve()
    above = [entry for entry in mountinfo() if place.is_relative_to(entry.target)]
    return max(above, key=lambda entry: len(entry.target)).fstype in _OF_THIS_NODE if above else False


class Following:
    """A context manager around the writing; `finish` inside it, when the writer has ended.

    Leaving without `finish` gives everything up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._table = bytearray()
        self._synced = 0
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._ended = threading.Event()
        self._wanted = True
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._follow, name="following", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted = False
        self._ended.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)

    def finish(self) -> bytes:
        """The whole table (`store.chunks`); the file is on the disk. Raises OSError."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return bytes(self._table)

    def _follow(self) -> None:
        try:
            while not self._ended.wait(_LOOK_EVERY_S):
                self._catch_up(whole=False)
            if self._wanted:
                self._catch_up(whole=True)
                os.fsync(self._fd)
        except OSError as error:
            self._failure = error

    def _catch_up(self, *, whole: bool) -> None:
        """Hash what has come; without `whole`, complete chunks only."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                if whole:
                    raise
                return
        size = os.fstat(self._fd).st_size
        end = size if whole else size // CHUNK_BYTES * CHUNK_BYTES
        done = len(self._table) // DIGEST_BYTES * CHUNK_BYTES
        while done < end and (whole or not self._ended.is_set()):
            length = self._read(done, min(_PIECE_BYTES, end - done))
            for start in range(0, length, CHUNK_BYTES):
                self._table += hashlib.sha256(self._piece[start : min(start + CHUNK_BYTES, length)]).digest()
            done += length
        if not whole and done - self._synced >= _SYNC_BYTES:
            os.fdatasync(self._fd)
            self._synced = done

    def _read(self, offset: int, length: int) -> int:
        """A file system over a network may answer with less than was asked for."""
        done = 0
        while done < length:
            count = os.preadv(self._fd, [self._piece[done:length]], offset + done)
            if count == 0:
                raise OSError(f"{self._path} has become shorter while it was read")
            done += count
        return length
