"""What a guest has written, made again on this host: a raw tree stream becomes an overlay's upper directory.

The guest is hostile, and its disk is never mounted here. Each name is one plain component made in a directory that
this stream has made itself, through that directory's descriptor; nothing is opened through a link, nothing replaced,
and nobody else may write below the tree (it is private, mode 0700, above). What overlayfs would take for its own is
taken over where it means what it says (whiteouts, opaque directories), dropped where it is bookkeeping, and refused
where it would lead elsewhere.
"""

# Paths are bytes here, because names of files need not be text; and names are relative to descriptors.

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from opendsec.errors import ImageInvalidError
from opendsec.guest.protocol import FieldError
from opendsec.guest.raw_tree import RawContentEnd, RawEntry, RawEvent, RawPiece, RawTreeReader
from opendsec.store.durable import disk_full_named

OPAQUE: Final = b"trusted.overlay.opaque"
_OVERLAY, _NESTED = b"trusted.overlay.", b"trusted.overlay.overlay."
_BOOKKEEPING: Final = frozenset(_OVERLAY + name for name in (b"origin", b"impure", b"nlink", b"uuid", b"upper"))
"""What overlayfs keeps for itself, about files of the guest's that are not here."""
_LABELS: Final = frozenset({b"security.selinux", b"security.ima", b"security.evm"})
_MAX_NAME, _MAX_COMPONENT, _MAX_DEPTH = 4096, 255, 1024
_BATCH_BYTES: Final = 4 << 20
_KINDS: Final = {
    "fifo": stat.S_IFIFO,
    "socket": stat.S_IFSOCK,
    "char_device": stat.S_IFCHR,
    "block_device": stat.S_IFBLK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperLimits:
    """Beyond these the stream is refused."""

    max_entries: int = 10_000_000
    max_inodes: int = 10_000_000
    """Of entries, those that are no further name of a file."""
    max_bytes: int = 256 << 30
    """Of content: what is written here."""
    max_file_bytes: int = 64 << 30
    """Of one file, holes included."""


async def receive_upper(chunks: AsyncIterator[bytes], tree: Path, *, limits: UpperLimits | None = None) -> None:
    """Make `tree`, which is not there yet, of what a guest sends.

    Raises ImageInvalidError for a stream that cannot be a tree, DiskFullError, and what `chunks` raises; what was
    made by then stays for the caller to remove. The event loop is not held up.
    """
    with UpperWriter(tree, limits=limits or UpperLimits()) as writer:
        batch: list[bytes] = []
        size = 0
        async for chunk in chunks:
            batch.append(chunk)
            size += len(chunk)
            if size >= _BATCH_BYTES:
                await _to_its_end(writer.feed, b"".join(batch))
                batch, size = [], 0
        await _to_its_end(writer.feed, b"".join(batch))
        await _to_its_end(writer.finish)


async def _to_its_end(call: Callable[..., None], *given: bytes) -> None:
    """In a thread, which is waited for also when this is cancelled: it writes to descriptors that are closed next."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *given))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


@dataclass(slots=True)
class _Directory:
    """One that is being filled."""

    name: bytes
    fd: int
    entry: RawEntry


class UpperWriter:
    """Used as `with`: descriptors are given back. Blocking."""

    def __init__(self, tree: Path, *, limits: UpperLimits) -> None:
        self._tree = tree
        self._limits = limits
        self._reader = RawTreeReader()
        self._open: list[_Directory] = []
        self._file: tuple[int, RawEntry] | None = None
        self._entries = self._inodes = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop().fd)
        if self._file is not None:
            os.close(self._file[0])
            self._file = None

    def feed(self, chunk: bytes) -> None:
        """Make what is complete. Raises ImageInvalidError, DiskFullError."""
        with disk_full_named(self._tree):
            try:
                for event in self._reader.feed(chunk):
                    self._take(event)
            except FieldError as error:
                raise _bad(b"", str(error)) from error

    def finish(self) -> None:
        """The stream has ended. Raises ImageInvalidError when it was cut."""
        if not self._reader.finished or not self._open:
            raise _bad(b"", "the stream is cut")
        with disk_full_named(self._tree):
            while self._open:
                self._close_directory()

    def _take(self, event: RawEvent) -> None:
        match event:
            case RawPiece(offset, data):
                assert self._file is not None
                self._bytes += len(data)
                if self._bytes > self._limits.max_bytes:
                    raise _bad(self._file[1].name, f"more than {self._limits.max_bytes} bytes in all")
                _write_all(self._file[0], data, offset)
            case RawContentEnd():
                self._close_file()
            case RawEntry():
                self._entries += 1
                self._inodes += event.hard_link is None
                if self._entries > self._limits.max_entries:
                    raise _bad(event.name, f"more than {self._limits.max_entries} entries")
                if self._inodes > self._limits.max_inodes:
                    raise _bad(event.name, f"more than {self._limits.max_inodes} files and directories")
                try:
                    self._make(event)
                except OSError as error:
                    if error.errno in _IMPOSSIBLE:
                        raise _bad(event.name, os.strerror(error.errno or 0)) from error
                    raise
                except (OverflowError, ValueError) as error:
                    raise _bad(event.name, f"it says what no file can have ({error})") from error

    def _make(self, entry: RawEntry) -> None:
        if not self._open:
            self._make_root(entry)
            return
        base = self._place(entry.name)
        parent = self._open[-1].fd
        if entry.hard_link is not None:
            self._make_link(entry, parent, base)
        elif entry.kind == "directory":
            os.mkdir(base, 0o700, dir_fd=parent)
            fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            self._open.append(_Directory(base, fd, entry))
        elif entry.kind == "file":
            if entry.size > self._limits.max_file_bytes:
                raise _bad(entry.name, f"{entry.size} bytes, a file may have {self._limits.max_file_bytes}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = (os.open(base, flags, 0o600, dir_fd=parent), entry)
        else:
            self._make_special(entry, parent, base)

    def _make_root(self, entry: RawEntry) -> None:
        if entry.name or entry.kind != "directory" or entry.hard_link is not None:
            raise _bad(entry.name, "the first entry is not the root")
        self._tree.mkdir(mode=0o700)
        fd = os.open(self._tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._open.append(_Directory(b"", fd, entry))

    def _place(self, name: bytes) -> bytes:
        """The entry's own name; its directory is the last one open, for entries come depth first."""
        *above, base = _components(name)
        common = 0
        while common < len(above) and common + 1 < len(self._open) and self._open[common + 1].name == above[common]:
            common += 1
        if common != len(above):
            raise _bad(name, "its directory has not come before it")
        if common >= _MAX_DEPTH:
            raise _bad(name, f"more than {_MAX_DEPTH} directories deep")
        while len(self._open) > common + 1:
            self._close_directory()
        return base

    def _make_link(self, entry: RawEntry, parent: int, base: bytes) -> None:
        """Each directory on the way to the first name is opened by itself, no link followed."""
        assert entry.hard_link is not None
        *above, source = _components(entry.hard_link)
        at = os.dup(self._open[0].fd)
        try:
            for part in above:
                below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = below
            if stat.S_ISDIR(os.stat(source, dir_fd=at, follow_symlinks=False).st_mode):
                raise _bad(entry.name, "a hard link to a directory")
            os.link(source, base, src_dir_fd=at, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(at)

    def _make_special(self, entry: RawEntry, parent: int, base: bytes) -> None:
        if entry.kind == "symlink":
            os.symlink(entry.link, base, dir_fd=parent)
        else:
            os.mknod(base, _KINDS[entry.kind] | 0o600, os.makedev(*entry.device), dir_fd=parent)
        os.chown(base, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        if entry.kind != "symlink":
            os.chmod(base, entry.mode, dir_fd=parent)
        path = b"/proc/self/fd/%d/%s" % (parent, base)
        for name, value in _kept(entry):
            _set_xattr(path, name, value, entry)
        os.utime(base, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _close_file(self) -> None:
        assert self._file is not None
        fd, entry = self._file
        os.ftruncate(fd, entry.size)
        _set_facts(fd, entry)
        self._file = None
        os.close(fd)

    def _close_directory(self) -> None:
        directory = self._open[-1]
        _set_facts(directory.fd, directory.entry)
        self._open.pop()
        os.close(directory.fd)


_IMPOSSIBLE: Final = frozenset(
    {errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ}
    | {errno.EMLINK, errno.EPERM, errno.EFBIG}
)
"""How the kernel answers names and links that cannot be."""


def _components(name: bytes) -> list[bytes]:
    parts = name.split(b"/")
    if len(name) > _MAX_NAME or any(part in (b"", b".", b"..") or len(part) > _MAX_COMPONENT for part in parts):
        raise _bad(name, "a name that cannot be")
    return parts


def _kept(entry: RawEntry) -> list[tuple[bytes, bytes]]:
    """Attributes that are taken over. Raises ImageInvalidError for what would act on a layer of ours. Pure."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in entry.xattrs:
        if name in _BOOKKEEPING or name in _LABELS:
            continue
        is_mark = name == OPAQUE and entry.kind == "directory" and value == b"y"
        if name.startswith(_OVERLAY) and not name.startswith(_NESTED) and not is_mark:
            raise _bad(entry.name, f"the attribute {os.fsdecode(name)} refers to something else than it shows")
        kept.append((name, value))
    return kept


def _set_facts(fd: int, entry: RawEntry) -> None:
    """Owner, then mode (a new owner takes bits from it), then attributes (a new owner takes capabilities)."""
    try:
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        for name, value in _kept(entry):
            _set_xattr(fd, name, value, entry)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    except OverflowError as error:
        raise _bad(entry.name, "its time is out of range") from error


def _set_xattr(target: int | bytes, name: bytes, value: bytes, entry: RawEntry) -> None:
    try:
        if isinstance(target, int):
            os.setxattr(target, name, value)
        else:
            os.setxattr(target, name, value, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and len(value) < 512:
            raise
        raise _bad(entry.name, f"the attribute {os.fsdecode(name)}: {os.strerror(error.errno or 0)}") from error


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _bad(name: bytes, why: str) -> ImageInvalidError:
    entry = os.fsdecode(name[:200])
    where = f"entry {entry!r}: " if name else ""
    return ImageInvalidError(f"what the guest sent of its writable layer: {where}{why}", detail={"entry": entry})
