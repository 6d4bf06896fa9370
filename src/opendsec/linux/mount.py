"""Mounts on the host: EROFS images from files, overlays, small tmpfs trees, clones, and what is mounted already.

Everything is made detached first (new mount API) and attached in one step, so a failure leaves nothing. It decides
nothing about images or sandboxes, and never touches a mount it was not told of. The mounts of a sandbox are made by
the launcher.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux import libc

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountEntry:
    """One line of /proc/PID/mountinfo (proc(5)); paths are unescaped."""

    mount_id: int
    root: str
    target: str
    options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]


def mountinfo(path: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts, in the kernel's order: of two on one target the later is on top."""
    return parse_mountinfo(path.read_bytes().splitlines())


def parse_mountinfo(lines: Iterable[bytes]) -> list[MountEntry]:
    """Lines of mountinfo as values. ValueError for a line that is none."""
    return [_parse(line) for line in lines]


def _parse(line: bytes) -> MountEntry:
    before, separator, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if not separator or len(left) < 6 or len(right) < 3:
        raise ValueError(f"not a line of mountinfo: {line!r}")
    return MountEntry(
        mount_id=int(left[0]),
        root=_text(left[3]),
        target=_text(left[4]),
        options=tuple(_text(left[5]).split(",")),
        fstype=_text(right[0]),
        source=_text(right[1]),
        super_options=tuple(_text(right[2]).split(",")),
    )


def _text(field: bytes) -> str:
    """Spaces, tabs, newlines and backslashes are written as three octal digits."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field).decode("utf-8", "surrogateescape")


@contextmanager
def _context(fstype: str) -> Iterator[int]:
    fs_fd = libc.fsopen(fstype)
    try:
        yield fs_fd
    finally:
        os.close(fs_fd)


def erofs(image: Path, *, devices: Sequence[Path] = (), direct: bool = True) -> int:
    """A detached read-only mount of an EROFS image file: a descriptor, the mount goes when it is closed unattached.

    No loop device is used. `direct` is `directio` where the kernel knows it (Linux 6.15): file data is cached once and
    not once more for the image file. Raises OSError: ENOTBLK when the image lies on a file system that cannot back it
    (tmpfs, overlayfs), EINVAL with the kernel's words when it is no EROFS image.
    """
    try:
        return _erofs(image, devices, direct=direct)
    except OSError as error:
        if error.errno != errno.EINVAL or "directio" not in (error.strerror or ""):
            raise
    return _erofs(image, devices, direct=False)


def _erofs(image: Path, devices: Sequence[Path], *, direct: bool) -> int:
    with _context("erofs") as fs_fd:
        libc.fsconfig_set_string(fs_fd, "source", image)
        libc.fsconfig_set_flag(fs_fd, "ro")
        if direct:
            libc.fsconfig_set_flag(fs_fd, "directio")
        for device in devices:
            libc.fsconfig_set_string(fs_fd, "device", device)
        try:
            libc.fsconfig_create(fs_fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(image)) from None
        return libc.fsmount(fs_fd, attr_flags=libc.MOUNT_ATTR_RDONLY)


def overlay(lowers: Sequence[int], *, upper: Path | None = None, work: Path | None = None) -> int:
    """A detached overlay of directories: a descriptor. `lowers` are descriptors, **topmost first**, at most 500.

    With `upper` and `work` (fresh directories of one file system) it can be written to; what is written lies in
    `upper`, in whole files and with no redirects, and is not synced (`volatile`). Without, two lowers at least.
    """
    with _context("overlay") as fs_fd:
        for lower in lowers:
            _overlay_lower(fs_fd, lower)
        options = {"redirect_dir": "off", "metacopy": "off", "index": "off", "xino": "off"}
        for key, value in options.items() if upper is not None else ():
            libc.fsconfig_set_string(fs_fd, key, value)
        if upper is not None and work is not None:
            libc.fsconfig_set_string(fs_fd, "upperdir", upper)
            libc.fsconfig_set_string(fs_fd, "workdir", work)
            libc.fsconfig_set_flag(fs_fd, "volatile")
        libc.fsconfig_create(fs_fd)
        return libc.fsmount(fs_fd, attr_flags=libc.MOUNT_ATTR_NODEV if upper is None else 0)


def _overlay_lower(fs_fd: int, lower: int) -> None:
    """Kernels before 6.13 take layers as strings only; the magic link is as good."""
    try:
        libc.fsconfig_set_fd(fs_fd, "lowerdir+", lower)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        libc.fsconfig_set_string(fs_fd, "lowerdir+", f"/proc/self/fd/{lower}")


def tmpfs(*, size_bytes: int, mode: int = 0o755, inodes: int = 1024) -> int:
    """A detached tmpfs, nosuid; a descriptor. Fill it through the descriptor (`dir_fd`), then attach or clone it."""
    with _context("tmpfs") as fs_fd:
        libc.fsconfig_set_string(fs_fd, "size", str(size_bytes))
        libc.fsconfig_set_string(fs_fd, "mode", f"{mode:o}")
        libc.fsconfig_set_string(fs_fd, "nr_inodes", str(inodes))
        libc.fsconfig_create(fs_fd)
        return libc.fsmount(fs_fd, attr_flags=libc.MOUNT_ATTR_NOSUID)


def clone(path: Path | str, *, dir_fd: int = libc.AT_FDCWD, recursive: bool = False) -> int:
    """A detached private copy of what is mounted at `path` (a bind mount that is nowhere yet); a descriptor.

    An empty path names `dir_fd` itself.
    """
    flags = libc.OPEN_TREE_CLONE | libc.OPEN_TREE_CLOEXEC
    flags |= libc.AT_RECURSIVE if recursive else 0
    flags |= 0 if os.fspath(path) else libc.AT_EMPTY_PATH
    tree = libc.open_tree(dir_fd, path, flags)
    try:
        set_attributes(tree, propagation=libc.MS_PRIVATE)
    except OSError:
        os.close(tree)
        raise
    return tree


def set_attributes(tree: int, *, attr_set: int = 0, attr_clr: int = 0, propagation: int = 0) -> None:
    """Change MOUNT_ATTR_* of a mount and everything mounted in it."""
    flags = libc.AT_EMPTY_PATH | libc.AT_RECURSIVE
    libc.mount_setattr(tree, "", flags, attr_set=attr_set, attr_clr=attr_clr, propagation=propagation)


def attach(tree: int, target: Path) -> None:
    """Put a detached tree on `target`, which exists. The descriptor stays open, and stays the caller's."""
    libc.move_mount(tree, "", libc.AT_FDCWD, target, libc.MOVE_MOUNT_F_EMPTY_PATH)


def unmount(target: Path, *, detach: bool = False) -> bool:
    """Unmount the topmost mount on `target`; False when nothing is mounted there.

    `detach` does not wait for its users (MNT_DETACH).
    """
    try:
        libc.umount2(target, libc.MNT_DETACH if detach else 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        raise
    return True
