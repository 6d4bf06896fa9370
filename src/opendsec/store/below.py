"""What a stack of layers shows at a path, without mounting it: the rules of overlayfs, by descriptor.

The topmost layer that has a path decides; a whiteout (character device 0:0) says that there is nothing; directories of
several layers are one, down to the first that is opaque. Layers may be given without mounting an overlay, and the files
are neither opened nor followed. It refuses nothing and changes nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

from opendsec.store.marks import attributes, is_opaque, is_whiteout

_MAX_LINKS = 40
"""The kernel follows no more in one path (MAXSYMLINKS)."""


class Below:
    """`layers`: descriptors of their root directories, topmost first; they stay the caller's."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._directories: dict[str, tuple[int, ...]] = {"": self._layers}

    def under(self, layer: int) -> Below:
        """The same stack with one more layer on top."""
        return Below((layer, *self._layers))

    def find(self, path: str) -> os.stat_result | None:
        """lstat(2) of an absolute path as the stack shows it; None when it shows nothing there."""
        return self._look(path)[0]

    def attributes(self, path: str) -> dict[str, bytes]:
        """Extended attributes of a path that is there, without those of overlayfs."""
        for fd in self._holding(path.rpartition("/")[0]):
            try:
                os.lstat(path[1:], dir_fd=fd)
            except FileNotFoundError:
                continue
            return attributes(_name(fd, path))
        return {}

    def read(self, path: str, *, most: int) -> bytes:
        """The first bytes of a regular file; none when there is no such file."""
        for fd in self._holding(path.rpartition("/")[0]):
            try:
                file = os.open(path[1:], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError:
                return b""  # a link, a whiteout: whatever it is, it is no regular file
            try:
                return os.read(file, most) if stat.S_ISREG(os.fstat(file).st_mode) else b""
            finally:
                os.close(file)
        return b""

    def real(self, path: str) -> str:
        """An absolute path without a symbolic link in it; what is not there stays as it is.

        Empty for links in a circle, and for what no path can be.
        """
        left = _parts(path)
        found, links = "", 0
        while left:
            part = left.pop()
            if part == "..":
                found = found.rpartition("/")[0]
                continue
            try:
                target = self._target(f"{found}/{part}")
            except OSError as error:
                if error.errno in (errno.ENAMETOOLONG, errno.EINVAL):
                    return ""
                raise
            if target is None:
                found = f"{found}/{part}"
                continue
            links += 1
            if links > _MAX_LINKS:
                return ""
            left += _parts(target)
            if target.startswith("/"):
                found = ""
        return found or "/"

    def _target(self, path: str) -> str | None:
        """Of a symbolic link; None of anything else."""
        for fd in self._holding(path.rpartition("/")[0]):
            try:
                status = os.lstat(path[1:], dir_fd=fd)
            except FileNotFoundError:
                continue
            return os.readlink(path[1:], dir_fd=fd) if stat.S_ISLNK(status.st_mode) else None
        return None

    def _look(self, path: str) -> tuple[os.stat_result | None, tuple[int, ...]]:
        """What is shown, and the layers that take part in it if it is a directory."""
        shown: os.stat_result | None = None
        taking_part: list[int] = []
        for fd in self._holding(path.rpartition("/")[0]):
            try:
                status = os.lstat(path[1:], dir_fd=fd)
            except FileNotFoundError:
                continue
            if is_whiteout(status):
                break
            if not stat.S_ISDIR(status.st_mode):
                shown = shown or status
                break
            shown = shown or status
            taking_part.append(fd)
            if is_opaque(_name(fd, path)):
                break
        return shown, tuple(taking_part)

    def _holding(self, directory: str) -> tuple[int, ...]:
        """Layers whose directory of that path is seen, topmost first. However deep it is: no call for each level."""
        unknown = []
        while directory not in self._directories:
            unknown.append(directory)
            directory = directory.rpartition("/")[0]
        for path in reversed(unknown):
            self._directories[path] = self._look(path)[1]
        return self._directories[unknown[0] if unknown else directory]


def _name(fd: int, path: str) -> str:
    return f"/proc/self/fd/{fd}{path}"


def _parts(path: str) -> list[str]:
    """The names of a path, last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]
