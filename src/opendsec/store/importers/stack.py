"""The layers below, and one group of image layers on top of them, as the kernel shows them together.

The group is written onto an overlay, so the kernel itself makes whiteouts and opaque directories, copies parents up
with their attributes, and shows links of lower layers; what it left in the upper directory is the layer. Below lie
layers of the store (mounted from their files) and upper directories of groups before. All mounts are detached: they
belong to descriptors of this process and go with it, however it ends.

An upper directory is cleaned before it is packed: attributes that only the live overlay needed go, whiteouts get one
time, because the kernel took the clock's, and a directory stays opaque only where there is something below to hide:
the kernel marks every new one, which would hide what other layers bring to the same place later.
"""

# Paths are bytes here, because names of files need not be text.
# ruff: noqa: PTH116

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from opendsec.errors import HostCapabilityError, ImageInvalidError
from opendsec.linux.mount import overlay
from opendsec.store.compose import MAX_LAYERS
from opendsec.store.durable import remove_tree
from opendsec.store.marks import OPAQUE, PRIVATE, is_whiteout
from opendsec.store.mounts import open_erofs

_PRIVATE, _OPAQUE = os.fsencode(PRIVATE), os.fsencode(OPAQUE)
_IMPLICIT_MODE = 0o755


class Stack(contextlib.AbstractContextManager["Stack"]):
    """Lower layers, lowest first. `work` is on a file system an overlay's upper directory can be on."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._opened = contextlib.ExitStack()
        self._lowers: list[int] = []

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add_files(self, meta: Path, data: Path | None) -> None:
        """A layer of the store comes on top. Raises as `open_erofs` does.

        Where the store's file system cannot back a mount (tmpfs, some shared ones), a copy in `work` can.
        """
        try:
            self._keep(open_erofs(meta, data=data))
        except HostCapabilityError as error:
            if "path" not in error.detail:  # It is not about where the files lie.
                raise
            copies = [self._work / f"copy{len(self._lowers)}.{number}" for number in range(2)]
            for source, copy in zip((meta, data), copies, strict=True):
                if source is not None:
                    shutil.copyfile(source, copy)
            self._keep(open_erofs(copies[0], data=None if data is None else copies[1]))

    def add_tree(self, tree: Path) -> None:
        """A directory comes on top: an upper directory that was cleaned, or any tree."""
        self._keep(os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))

    def add_opened(self, fd: int) -> None:
        """An open directory comes on top; the descriptor stays the caller's."""
        self._keep(os.dup(fd))

    def _keep(self, fd: int) -> None:
        if len(self._lowers) >= MAX_LAYERS:
            os.close(fd)
            raise ImageInvalidError(
                f"more than {MAX_LAYERS} layers would lie over each other", remedy="raise --collapse-mb"
            )
        self._opened.callback(os.close, fd)
        self._lowers.append(fd)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Path | None]:
        """All layers together, read-only, while the context lasts; None when there are none."""
        if len(self._lowers) < 2:
            yield _at(self._lowers[0]) if self._lowers else None
            return
        fd = overlay(self._lowers[::-1])
        try:
            yield _at(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def with_root_of(self, below: Path | None) -> Iterator[int]:
        """All layers together under another root's attributes, to be read while the context lasts: a mount."""
        upper, scratch = self._work / "root.upper", self._work / "root.work"
        upper.mkdir(mode=_IMPLICIT_MODE)
        scratch.mkdir(mode=0o700)
        _copy_root(below, upper)
        fd = overlay(self._lowers[::-1], upper=upper, work=scratch)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def group(self, name: str) -> Iterator[tuple[Path, Path]]:
        """A fresh group on top: where to write, and the directory that is the layer once the context has ended well.

        It is not among the layers by that: see `add_tree`.
        """
        upper = self._work / f"{name}.upper"
        upper.mkdir(mode=_IMPLICIT_MODE)
        with self.shown() as below:
            _copy_root(below, upper)
            if below is None:
                yield upper, upper
                return
            scratch = self._work / f"{name}.work"
            scratch.mkdir(mode=0o700)
            fd = overlay(self._lowers[::-1], upper=upper, work=scratch)
            try:
                yield _at(fd), upper
            finally:
                os.close(fd)
            remove_tree(scratch)
            clean(os.fsencode(upper), os.fsencode(below))


def _at(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _copy_root(below: Path | None, upper: Path) -> None:
    """The root of a layer hides the one below: it gets its attributes, or root's, mode 0755, time 0."""
    if below is None:
        upper.chmod(_IMPLICIT_MODE)
        os.utime(upper, (0, 0))
        return
    source = os.fsencode(below) + b"/."
    status = os.stat(source)
    os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(stat.S_IMODE(status.st_mode))
    for name in os.listxattr(source):
        if not os.fsencode(name).startswith(_PRIVATE):
            os.setxattr(upper, name, os.getxattr(source, name))
    os.utime(upper, ns=(status.st_mtime_ns, status.st_mtime_ns))


def clean(upper: bytes, below: bytes | None) -> None:
    """Make the upper directory of an overlay that is gone a layer. `below`: what it was laid on."""
    todo: list[tuple[bytes, bytes | None]] = [(upper, None if below is None else below + b"/.")]
    while todo:
        directory, hidden = todo.pop()
        opaque = _strip(directory, keep=_OPAQUE if hidden is not None and directory != upper else None)
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                todo.append((entry.path, None if opaque or hidden is None else _directory(hidden + b"/" + entry.name)))
            elif is_whiteout(entry.stat(follow_symlinks=False)):
                os.utime(entry.path, (0, 0), follow_symlinks=False)
            else:
                _strip(entry.path, keep=None)


def _directory(path: bytes) -> bytes | None:
    """The path if a directory is there, and no link to one."""
    try:
        return path if stat.S_ISDIR(os.lstat(path).st_mode) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _strip(path: bytes, *, keep: bytes | None) -> bool:
    """Remove overlayfs' own attributes but `keep`; whether that is there."""
    kept = False
    for text in os.listxattr(path, follow_symlinks=False):
        name = os.fsencode(text)
        if name == keep:
            kept = True
        elif name.startswith(_PRIVATE):
            os.removexattr(path, name, follow_symlinks=False)
    return kept
