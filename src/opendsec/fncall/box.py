"""The places of a pool's container that can be written, seen from the host: fresh for every run, empty after it.

    /call/work       the run's own directory: working directory and HOME; made before a run, gone after it
    /tmp, /var/tmp, /dev/shm

Each is a tmpfs with a limit of bytes and of files; the root is read-only, so there is no fifth. They are reached by
directory descriptors that were opened before anything untrusted ran inside, and no link is followed from them on. The
kernel's count of files per tmpfs says whether one is as it was: nobody inside is asked.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from opendsec.backends.container_rubbish import remove_contents
from opendsec.linux.launch import Tmpfs

CALL = "/call"
WORK = "/call/work"
"""Working directory and HOME of every run."""
TMP, VAR_TMP, SHARED_MEMORY = "/tmp", "/var/tmp", "/dev/shm"  # noqa: S108 paths inside
PLACES = (CALL, TMP, VAR_TMP, SHARED_MEMORY)
MAX_FILES = 16_384
"""Files of one place."""
USER_ID = 65_534
"""Of everything untrusted inside: nobody."""
FEW_FILES = 256
"""So many are removed on the event loop; more take a thread."""
_WORK_NAME = "work"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def writable_places(disk_mb: int) -> tuple[Tmpfs, ...]:
    """What the launcher mounts; each takes at most `disk_mb` MiB."""
    limits = f"size={disk_mb}m,nr_inodes={MAX_FILES}"
    return (
        Tmpfs(target=CALL, options=f"mode=755,{limits}"),
        *(Tmpfs(target=place, options=f"mode=1777,{limits}") for place in PLACES[1:]),
    )


class Box:
    """Of one container; `pid` is its process 1, `user` the host's id of the user inside."""

    def __init__(self, pid: int, user: int) -> None:
        self._user = user
        self._fds: list[int] = []
        try:
            for place in PLACES:
                self._fds.append(os.open(f"/proc/{pid}/root{place}", _FLAGS))
            self.call = self._fds[0]
            self.remember()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the places; they end with the container."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remember(self) -> None:
        """It is now as it must be before every run."""
        self._files = [_files_of(fd) for fd in self._fds]

    # Before a run

    def prepare(self, files: Mapping[str, bytes], *, programs: Iterable[str] = ()) -> None:
        """An empty directory of the run's own, and these files in it; `programs` may be executed. OSError (ENOSPC)."""
        os.mkdir(_WORK_NAME, 0o700, dir_fd=self.call)
        self._give(_WORK_NAME)
        made = {""}
        executable = set(programs)
        for name, content in files.items():
            self._make_parents(name, made)
            self._write(f"{_WORK_NAME}/{name}", content, 0o755 if name in executable else 0o644)

    def _make_parents(self, name: str, made: set[str]) -> None:
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            parent = "/".join(parts[:depth])
            if parent not in made:
                os.mkdir(f"{_WORK_NAME}/{parent}", 0o755, dir_fd=self.call)
                self._give(f"{_WORK_NAME}/{parent}")
                made.add(parent)

    def _write(self, path: str, content: bytes, mode: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=self.call)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
            os.fchown(fd, self._user, self._user)
        finally:
            os.close(fd)

    def _give(self, path: str) -> None:
        os.chown(path, self._user, self._user, dir_fd=self.call, follow_symlinks=False)

    # After it, when nothing of it runs any more

    def find(self, patterns: Iterable[str]) -> list[str]:
        """Regular files below the run's directory that match, relative, sorted; `**` as pathlib has it."""
        return sorted({path for path in self._walk() if any(Path(path).match(pattern) for pattern in patterns)})

    def _walk(self) -> Iterable[str]:
        for directory, _, names, fd in os.fwalk(_WORK_NAME, dir_fd=self.call, follow_symlinks=False):
            for name in names:
                if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    yield f"{directory}/{name}".removeprefix(f"{_WORK_NAME}/")

    def read(self, path: str, most: int) -> bytes | None:
        """A regular file of the run's directory; None: there is none of that name, or a link leads to it.

        Raises ValueError when it is longer than `most` bytes.
        """
        with contextlib.ExitStack() as stack:
            try:
                at = self._enter(stack, _WORK_NAME, self.call)
                *parents, name = path.split("/")
                for parent in parents:
                    at = self._enter(stack, parent, at)
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
            except OSError:
                return None
            stack.callback(os.close, fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return None
            if found.st_size > most:
                raise ValueError(f"{path!r} has {found.st_size} bytes, at most {most}")
            return _read_all(fd, most)

    def _enter(self, stack: contextlib.ExitStack, name: str, at: int) -> int:
        fd = os.open(name, _FLAGS, dir_fd=at)
        stack.callback(os.close, fd)
        return fd

    def left(self) -> int:
        """Files that are there now and were not at the beginning, the run's directory among them."""
        return sum(_files_of(fd) for fd in self._fds) - sum(self._files)

    def empty(self) -> None:
        """Remove whatever was written. Blocking when there is much. Raises OSError."""
        if self.left() == 1:
            with contextlib.suppress(OSError):
                os.rmdir(_WORK_NAME, dir_fd=self.call)
        for fd, files in zip(self._fds, self._files, strict=True):
            if _files_of(fd) != files:
                remove_contents(fd)

    @property
    def is_clean(self) -> bool:
        """Whether every place has exactly the files it began with, by the kernel's count."""
        return all(_files_of(fd) == files for fd, files in zip(self._fds, self._files, strict=True))


def _read_all(fd: int, most: int) -> bytes:
    pieces = []
    while piece := os.read(fd, most):
        pieces.append(piece)
    return b"".join(pieces)


def _files_of(fd: int) -> int:
    found = os.fstatvfs(fd)
    return found.f_files - found.f_ffree
