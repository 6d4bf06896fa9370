"""Notices that a shared file system has given up the open file a mounted layer is read through.

A client that could reach no copy of a file for longer than it tries answers EIO, and some answer so for ever, on that
open file, after everything is back (MooseFS, or any FUSE client that was started anew: ENOTCONN). A mounted layer holds
its data file open for as long as it is mounted. So every layer is read from now and then, past the page cache; when
that fails while the same bytes can be read through a file opened anew, layers have to be mounted anew, for whoever
starts from then on. Sandboxes that have the old mount keep it, and its errors.

It never mounts, and a store that cannot be reached at all is left alone: then nothing would be better anew.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""Between two looks at all layers; each costs one small read of the store a layer."""
_DEAD = frozenset({errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ENXIO})
_ENTRIES = 10_000
"""Looked at in search of a file with data."""
_SMALL_BYTES = 65_536


def find_probe(directory_fd: int) -> Path | None:
    """A file with data in a mounted layer, relative to it, one that costs little and that nobody maps if there is one
    soon; None when there is none.
    """
    found: Path | None = None
    seen = 0
    for folder, _, names, fd in os.fwalk(".", dir_fd=directory_fd):
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_size > 0:
                found = Path(folder, name)
                if status.st_size <= _SMALL_BYTES and not status.st_mode & 0o111:
                    return found
        seen += len(names)
        if seen > _ENTRIES:
            break
    return found


def reads(path: Path, *, directory_fd: int | None = None) -> bool:
    """Whether the first byte of a file comes from where it is stored. Other errors than of a dead file pass.

    Pages of it that nobody has mapped are dropped first. Waits as long as the file system does.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in _DEAD:
            return False
        raise
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 1, 0)
    except OSError as error:
        if error.errno in _DEAD:
            return False
        raise
    finally:
        os.close(fd)
    return True


class Healing:
    """Looks at layers by turns in a thread; `renew` is called when they must be mounted anew.

    `held`: digest of each mounted layer, and a descriptor of its directory. `data_of`: its data file on the store.
    """

    def __init__(
        self,
        data_of: Callable[[str], Path | None],
        held: Callable[[], Iterable[tuple[str, int]]],
        renew: Callable[[], None],
    ) -> None:
        self._data_of = data_of
        self._held = held
        self._renew = renew
        self._probes: dict[Path, Path | None] = {}

    def look(self) -> bool:
        """Once, at all of them; whether they had to be renewed."""
        for digest, directory_fd in self._held():
            data = self._data_of(digest)
            if data is not None and self._is_dead(directory_fd, data):
                log.warning("layers_renewed", extra={"fields": {"data": str(data)}})
                self._renew()
                return True
        return False

    def _is_dead(self, directory_fd: int, data: Path) -> bool:
        if data not in self._probes:
            self._probes[data] = find_probe(directory_fd)
        probe = self._probes[data]
        if probe is None or reads(probe, directory_fd=directory_fd):
            return False
        with suppress(OSError):
            return reads(data)
        return False

    @contextmanager
    def looking(self, *, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
        """A thread looks while the body runs. At the end it may be waiting for the store, and is not waited for."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(every_s):
                try:
                    self.look()
                except OSError as error:
                    log.warning("layers_not_looked_at", extra={"fields": {"reason": str(error)}})

        threading.Thread(target=run, name="healing", daemon=True).start()
        try:
            yield
        finally:
            over.set()
