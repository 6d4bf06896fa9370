"""Apply tar entries to a tree on this machine, exactly and without ever leaving the tree.

Kept: owners by number, modes with set-id bits, modification times, hard links, symbolic links, devices, FIFOs, holes,
extended attributes with capabilities and ACLs. Layers are applied in order with the whiteout rules of the OCI image
specification: `.wh.NAME` removes NAME of lower layers, `.wh..wh..opq` removes all that lower layers have in its
directory, and neither touches what the same layer brings, wherever it stands in the archive.

The tree may be an overlay on the layers below: the kernel then turns what is removed into whiteouts, and only what
changed lies in its upper directory. A hard link to a file of a lower layer takes all names of that file along, which
overlayfs by itself does not do.

Refused, by layer and entry, is what an overlay would take for its own: character devices 0:0 (they are whiteouts) and
attributes of overlayfs; and access lists as text, which would be lost.

Parents are resolved inside the tree, symbolic links included, as a process chrooted there would see them; `..` in a
name is refused, and nothing is ever opened through a link. Nobody else may write to the tree meanwhile (it is
private, mode 0700).
"""

# Paths are bytes here, because names of files need not be text.
# ruff: noqa: PTH101, PTH102, PTH108, PTH115, PTH208, PTH211

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.store.durable import remove_tree
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.pax import extents_of, mtime_ns, text_acl, xattrs_of
from opendsec.store.importers.tar import Archive
from opendsec.store.walk import walked

WHITEOUT = ".wh."
_WHITEOUT_META = ".wh..wh."
_OPAQUE = ".wh..wh..opq"
OVERLAY_XATTRS = (b"trusted.overlay.", b"user.overlay.")
"""An image that brings these would steer the overlay file system it becomes a layer of."""

_LABELS = frozenset({b"security.selinux", b"security.ima", b"security.evm"})
"""Written by the kernel itself where it is so configured; it would not let go of them."""

_XATTR_BYTES = 3000
"""ext4 has one block for all attributes of a file, and says ENOSPC when they do not fit."""

_IMPLICIT_MODE = 0o755
_MAX_LINKS = 40
_COPY_BYTES = 1 << 20
_NAME_ERRORS = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EMLINK})


class Spent:
    """What an import has used of its limits so far, over all its trees."""

    def __init__(self) -> None:
        self.entries = 0
        self.total_bytes = 0


class TreeWriter:
    """One tree, filled layer by layer. Begin each archive with `layer`, apply its entries, and close the `with`."""

    def __init__(self, root: Path, *, limits: Limits, whiteouts: bool = True, spent: Spent | None = None) -> None:
        if os.geteuid() != 0:
            raise InvalidSpecError(
                "unpacking an image needs root: its files have owners", detail={"field": "user"}, remedy="use sudo"
            )
        self._root = os.fsencode(root)
        self._limits = limits
        self._whiteouts = whiteouts
        self._label = ""
        self._here: set[bytes] = set()
        self._times: dict[bytes, int] = {}
        self._resolved: dict[bytes, bytes] = {}
        self._linked: dict[tuple[int, int], list[bytes]] | None = None
        self._spent = spent or Spent()
        if not root.exists():
            root.mkdir(mode=_IMPLICIT_MODE)
            root.chmod(_IMPLICIT_MODE)
            self._times[b""] = 0

    @contextlib.contextmanager
    def layer(self, label: str) -> Iterator[None]:
        """The entries applied inside belong to this layer. Directory times are set when it ends."""
        self._label = label
        self._here.clear()
        yield
        self._set_times()

    def apply(self, archive: Archive, member: tarfile.TarInfo) -> None:
        """Apply one entry. ImageInvalidError names layer and entry."""
        self._count(member)
        path = self._clean(member.name, member)
        directory, name = posixpath.split(path)
        try:
            if self._whiteouts and self._is_whiteout(member, path, name):
                self._whiteout(member, directory, os.fsdecode(name))
                return
            target = self._place(directory, name, member)
            self._write(archive, member, target)
            self._remember(target)
        except OverflowError as error:
            raise self._bad(member, "an owner, time or device number is out of range") from error
        except ValueError as error:  # a NUL in a name of a link or attribute, a time that is no number
            raise self._bad(member, f"it says what no file can have ({error})") from error
        except OSError as error:
            if error.errno in _NAME_ERRORS:
                raise self._bad(member, os.strerror(error.errno or 0)) from error
            raise

    # names

    def _clean(self, name: str, member: tarfile.TarInfo) -> bytes:
        """A name as a relative path of plain components; `` is the root of the tree."""
        encoded = os.fsencode(name)
        parts = [part for part in encoded.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise self._bad(member, f"the name {name!r} climbs out with `..`")
        if b"\0" in encoded:
            raise self._bad(member, "its name holds a NUL")
        return b"/".join(parts)

    def _full(self, relative: bytes) -> bytes:
        return self._root + b"/" + (relative or b".")  # The root itself may be the magic link of a descriptor.

    def _place(self, directory: bytes, name: bytes, member: tarfile.TarInfo) -> bytes:
        """The path below the root where the entry goes; its parents are there."""
        if not name:
            return b""
        parent = self._parent(directory, member, make=True)
        if parent is None:
            raise self._bad(member, "its directory could not be made")
        self._keep_time(parent)
        return parent + b"/" + name if parent else name

    def _parent(self, directory: bytes, member: tarfile.TarInfo, *, make: bool) -> bytes | None:
        """Resolve a directory inside the tree, following links as chroot(2) would; None when missing and not made."""
        known = self._resolved.get(directory)
        if known is not None:
            return known
        done: list[bytes] = []
        todo = directory.split(b"/")[::-1] if directory else []
        links = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                done = done[:-1]
                continue
            here = b"/".join([*done, part])
            kind = self._kind(here)
            if kind == stat.S_IFLNK:
                links += 1
                if links > _MAX_LINKS:
                    raise self._bad(member, "too many symbolic links on the way to it")
                link = os.readlink(self._full(here))
                done = [] if link.startswith(b"/") else done
                todo.extend(link.split(b"/")[::-1])
                continue
            if kind != stat.S_IFDIR:
                if not make:
                    return None
                self._make_implicit(here, exists=kind is not None)
            done.append(part)
        resolved = b"/".join(done)
        self._resolved[directory] = resolved
        return resolved

    def _kind(self, relative: bytes) -> int | None:
        try:
            return stat.S_IFMT(os.lstat(self._full(relative)).st_mode)
        except FileNotFoundError:
            return None

    def _make_implicit(self, relative: bytes, *, exists: bool) -> None:
        """A directory no entry describes: root's, mode 0755, time 0, so that the clock has no say in the result."""
        self._keep_time(posixpath.dirname(relative))
        if exists:
            self._remove(relative)
        os.mkdir(self._full(relative), _IMPLICIT_MODE)
        os.chown(self._full(relative), 0, 0)
        _clear_xattrs(self._full(relative))
        os.chmod(self._full(relative), _IMPLICIT_MODE)
        self._times[relative] = 0
        self._remember(relative)

    # whiteouts

    def _is_whiteout(self, member: tarfile.TarInfo, path: bytes, name: bytes) -> bool:
        for part in path.split(b"/")[:-1]:
            if part.startswith(os.fsencode(_WHITEOUT_META)):
                return True  # Below a directory that aufs left; `_whiteout` knows those.
            if part.startswith(os.fsencode(WHITEOUT)):
                raise self._bad(member, "it lies below a whiteout")
        return name.startswith(os.fsencode(WHITEOUT))

    def _whiteout(self, member: tarfile.TarInfo, directory: bytes, name: str) -> None:
        below_meta = any(part.startswith(os.fsencode(_WHITEOUT_META)) for part in directory.split(b"/"))
        if below_meta or (name != _OPAQUE and name.startswith(_WHITEOUT_META)):
            return  # Left over from aufs; means nothing in an image.
        hidden = os.fsencode(name[len(WHITEOUT) :])
        if hidden in (b"", b".", b".."):
            raise self._bad(member, "a whiteout must name what it hides")
        parent = self._parent(directory, member, make=False)
        if parent is None or self._kind(parent) != stat.S_IFDIR:
            return
        self._keep_time(parent)
        if name == _OPAQUE:
            for child in os.listdir(self._full(parent)):
                self._hide(parent + b"/" + child if parent else child)
        else:
            self._hide(parent + b"/" + hidden if parent else hidden)

    def _hide(self, top: bytes) -> None:
        """Remove what lower layers brought at a path and below; what this layer brought stays, with its parents."""
        left = [top]
        while left:
            relative = left.pop()
            kind = self._kind(relative)
            if kind is None:
                continue
            if relative not in self._here:
                self._remove(relative)
            elif kind == stat.S_IFDIR:
                self._keep_time(relative)
                left += [relative + b"/" + child for child in os.listdir(self._full(relative))]

    def _remember(self, relative: bytes) -> None:
        """This layer brought the path, and so keeps its parents."""
        while relative and relative not in self._here:
            self._here.add(relative)
            relative = posixpath.dirname(relative)

    def _remove(self, relative: bytes) -> None:
        self._resolved.clear()
        prefix = relative + b"/"
        for gone in [path for path in self._times if path == relative or path.startswith(prefix)]:
            del self._times[gone]
        remove_tree(Path(os.fsdecode(self._full(relative))))

    # entries

    def _write(self, archive: Archive, member: tarfile.TarInfo, target: bytes) -> None:
        kind = self._kind(target)
        if kind is not None and not (kind == stat.S_IFDIR and member.isdir()):
            if not target:
                raise self._bad(member, "the root of an image is a directory")
            self._remove(target)
            kind = None
        full = self._full(target)
        if member.islnk():
            self._link(member, full)
            return
        self._create(archive, member, full, exists=kind is not None)
        os.chown(full, member.uid, member.gid, follow_symlinks=False)
        _clear_xattrs(full)
        if not member.issym():
            os.chmod(full, member.mode & 0o7777)
        self._set_xattrs(member, full)
        if member.isdir():
            self._times[target] = mtime_ns(member)
        else:
            os.utime(full, ns=(mtime_ns(member), mtime_ns(member)), follow_symlinks=False)

    def _create(self, archive: Archive, member: tarfile.TarInfo, full: bytes, *, exists: bool) -> None:
        if member.isdir():
            if not exists:
                os.mkdir(full, 0o700)
        elif member.isreg():
            self._copy(archive, member, full)
        elif member.issym():
            if not member.linkname:
                raise self._bad(member, "a symbolic link to nothing")
            os.symlink(os.fsencode(member.linkname), full)
        elif member.isfifo():
            os.mkfifo(full, 0o600)
        elif member.ischr() or member.isblk():
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            if member.ischr() and (member.devmajor, member.devminor) == (0, 0):
                raise self._bad(member, "the character device 0:0 would be a whiteout of overlayfs")
            os.mknod(full, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        else:
            raise self._bad(member, f"its type {member.type!r} is not known")

    def _copy(self, archive: Archive, member: tarfile.TarInfo, full: bytes) -> None:
        source = archive.content(member)
        fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for offset, size in extents_of(member):
                _copy_extent(source, fd, offset, size)
            os.ftruncate(fd, member.size)
        finally:
            os.close(fd)

    def _link(self, member: tarfile.TarInfo, full: bytes) -> None:
        directory, name = posixpath.split(self._clean(member.linkname, member))
        parent = self._parent(directory, member, make=False)
        source = None if parent is None or not name else (parent + b"/" + name if parent else name)
        if source is None or self._kind(source) in (None, stat.S_IFDIR):
            raise self._bad(member, f"a hard link to {member.linkname!r}, which is no file here")
        before = os.lstat(self._full(source))
        os.link(self._full(source), full, follow_symlinks=False)
        if before.st_nlink > 1:
            self._take_along(source, before)

    def _take_along(self, source: bytes, before: os.stat_result) -> None:
        """Linking copied a file of a lower layer up, under one of its names: give it the others again."""
        identity = (before.st_dev, before.st_ino)
        if self._identity(source) == identity:
            return  # It was brought by this tree itself, and has its names.
        if self._linked is None:
            self._linked = self._find_linked()
        for name in self._linked.get(identity, ()):
            if self._identity(name) == identity:
                self._keep_time(posixpath.dirname(name))
                os.unlink(self._full(name))
                os.link(self._full(source), self._full(name), follow_symlinks=False)

    def _identity(self, relative: bytes) -> tuple[int, int] | None:
        try:
            status = os.lstat(self._full(relative))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (status.st_dev, status.st_ino)

    def _find_linked(self) -> dict[tuple[int, int], list[bytes]]:
        """All names of all files with several. Those of lower layers stay what they are, or go."""
        found: dict[tuple[int, int], list[bytes]] = {}
        start = len(self._full(b"")) + 1
        for top, _, names in walked(self._full(b"")):
            for name in names:
                path = top + b"/" + name
                status = os.lstat(path)
                if status.st_nlink > 1:
                    found.setdefault((status.st_dev, status.st_ino), []).append(path[start:])
        return found

    def _set_xattrs(self, member: tarfile.TarInfo, full: bytes) -> None:
        """After chown(2), which drops capabilities."""
        if (header := text_acl(member.pax_headers)) is not None:
            raise self._bad(member, f"its access list is text ({header}); write it with tar --xattrs, not --acls")
        for key, value in xattrs_of(member.pax_headers).items():
            if key.startswith(OVERLAY_XATTRS):
                raise self._bad(member, f"the attribute {os.fsdecode(key)} is reserved for overlay file systems")
            try:
                os.setxattr(full, key, value, follow_symlinks=False)
            except OSError as error:
                too_big = error.errno == errno.ENOSPC and len(value) > _XATTR_BYTES
                if too_big or error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.ERANGE, errno.E2BIG):
                    raise self._bad(
                        member, f"the attribute {os.fsdecode(key)} cannot be set: {os.strerror(error.errno or 0)}"
                    ) from error
                raise

    # times

    def _keep_time(self, directory: bytes) -> None:
        """Changing what a directory holds must not change its time; an entry of its own sets it later."""
        if directory not in self._times:
            self._times[directory] = os.lstat(self._full(directory)).st_mtime_ns

    def _set_times(self) -> None:
        for directory, time_ns in self._times.items():
            os.utime(self._full(directory), ns=(time_ns, time_ns), follow_symlinks=False)
        self._times.clear()

    # limits and errors

    def _count(self, member: tarfile.TarInfo) -> None:
        self._spent.entries += 1
        if self._spent.entries > self._limits.max_entries:
            raise self._bad(member, f"more than {self._limits.max_entries} entries")
        if member.isreg():
            self._spent.total_bytes += member.size
            if member.size > self._limits.max_file_bytes:
                raise self._bad(member, f"{member.size} bytes, a file may have {self._limits.max_file_bytes}")
            if self._spent.total_bytes > self._limits.max_total_bytes:
                raise self._bad(member, f"the files together have more than {self._limits.max_total_bytes} bytes")

    def _bad(self, member: tarfile.TarInfo, why: str) -> ImageInvalidError:
        return ImageInvalidError(
            f"{self._label}: entry {member.name!r}: {why}", detail={"layer": self._label, "entry": member.name}
        )


def _clear_xattrs(full: bytes) -> None:
    """Those of a lower layer, and an access list that was inherited from the directory; labels are this machine's."""
    for text in os.listxattr(full, follow_symlinks=False):
        name = os.fsencode(text)
        if name not in _LABELS:
            os.removexattr(full, name, follow_symlinks=False)


def _copy_extent(source: BinaryIO, fd: int, offset: int, size: int) -> None:
    source.seek(offset)
    os.lseek(fd, offset, os.SEEK_SET)
    remaining = size
    while remaining > 0:
        chunk = source.read(min(remaining, _COPY_BYTES))
        if not chunk:
            raise tarfile.ReadError("unexpected end of data")
        _write_all(fd, chunk)
        remaining -= len(chunk)


def _write_all(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view) :]
