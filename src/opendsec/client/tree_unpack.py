"""A tree stream from a sandbox into a local directory. The sandbox is not trusted.

Refused: names that are absolute or have empty, `.` or `..` components, anything but files, directories and symbolic
links, a path
that leads through a symbolic link, more bytes or entries than allowed. Every step is relative to a directory
descriptor and never
follows a link. A link that leads out of the tree is not made but reported. Set-id and sticky bits are dropped. Each
file
is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass, field
from typing import Self

from opendsec.client.progress import Meter
from opendsec.client.tree_format import ENTRY_LENGTH, MAX_ENTRY_BYTES, TreeEntry, unpack_entry
from opendsec.errors import FileError, ProtocolError, TransportError
from opendsec.model.file import FileKind

MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """How much a downloaded tree may be."""

    max_bytes: int = 64 * 1024**3
    """Bytes of file content."""
    max_entries: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadedTree:
    """What a download left."""

    files: int
    bytes: int
    skipped_links: tuple[str, ...] = ()
    """Symbolic links that lead out of the tree: they were not made, because local programs would follow them."""


@dataclass(slots=True)
class _OpenFile:
    descriptor: int
    parent: int
    temporary: bytes
    entry: TreeEntry
    left: int


@dataclass(slots=True)
class _Parent:
    name: bytes
    descriptor: int


@dataclass(slots=True)
class _Progress:
    entries: int = 0
    finished: bool = False
    directories: list[TreeEntry] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class TreeUnpacker:
    """Feed it the stream; `finish` checks that it was whole. A context manager: what is half made is removed on the
    way out."""

    def __init__(self, root: str | os.PathLike[str], *, meter: Meter, limits: TreeLimits | None = None) -> None:
        self._limits = limits or TreeLimits()
        self._meter = meter
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parent: _Parent | None = None
        self._file: _OpenFile | None = None
        self._head = bytearray()
        self._state = _Progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Raises ProtocolError (refused), FileError (limits), OSError (this machine)."""
        view = memoryview(chunk)
        while view:
            if self._state.finished:
                raise ProtocolError("bytes after the end of a tree stream")
            view = self._take_content(view) if self._file is not None else self._take_head(view)

    def finish(self) -> DownloadedTree:
        """After the last bytes. Raises TransportError when the stream was cut."""
        if not self._state.finished:
            raise TransportError("the tree stream was cut")
        for entry in reversed(self._state.directories):
            descriptor = self._open_directory(entry.name)
            try:
                os.fchmod(descriptor, entry.mode & 0o777)
                os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(descriptor)
        return DownloadedTree(
            files=self._meter.files_done, bytes=self._meter.bytes_done, skipped_links=tuple(self._state.skipped)
        )

    def close(self) -> None:
        """Release descriptors and remove the file that is not complete. May be repeated."""
        if self._file is not None:
            os.close(self._file.descriptor)
            os.unlink(self._file.temporary, dir_fd=self._file.parent)
            self._file = None
        if self._parent is not None:
            os.close(self._parent.descriptor)
            self._parent = None
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def _take_head(self, view: memoryview) -> memoryview:
        need = ENTRY_LENGTH.size
        if len(self._head) >= need:
            (length,) = ENTRY_LENGTH.unpack_from(self._head)
            need += length
        taken = view[: need - len(self._head)]
        self._head += taken
        if len(self._head) == ENTRY_LENGTH.size:
            (length,) = ENTRY_LENGTH.unpack_from(self._head)
            if length > MAX_ENTRY_BYTES:
                raise FileError(
                    f"the tree holds a path this side cannot take: its entry has {length} bytes, at most "
                    f"{MAX_ENTRY_BYTES}",
                    detail={"errno": "ENAMETOOLONG"},
                    remedy="download a directory below it, or pack the tree inside the sandbox",
                )
            self._state.finished = length == 0
        elif len(self._head) == need:
            entry = unpack_entry(bytes(self._head[ENTRY_LENGTH.size :]))
            self._head.clear()
            self._begin(entry)
        return view[len(taken) :]

    def _take_content(self, view: memoryview) -> memoryview:
        file = self._file
        if file is None:
            return view
        taken = view[: file.left]
        written = 0
        while written < len(taken):
            written += os.write(file.descriptor, taken[written:])
        file.left -= len(taken)
        if taken:
            self._meter.add(len(taken), _text(file.entry.name))
        if not file.left:
            self._complete(file)
        return view[len(taken) :]

    def _begin(self, entry: TreeEntry) -> None:
        self._state.entries += 1
        if self._state.entries > self._limits.max_entries:
            raise _too_much(f"more than {self._limits.max_entries} entries")
        directory, name = _split(entry.name)
        parent = self._open_parent(directory)
        match entry.kind:
            case FileKind.DIRECTORY:
                self._make_directory(entry, parent, name)
            case FileKind.SYMLINK:
                self._make_link(entry, parent, name)
            case FileKind.FILE:
                self._open_file(entry, parent)
            case _:
                raise ProtocolError(f"a tree stream with a {entry.kind}: {_text(entry.name)!r}")

    def _make_directory(self, entry: TreeEntry, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            os.close(self._open_directory(entry.name))
        self._state.directories.append(entry)

    def _make_link(self, entry: TreeEntry, parent: int, name: bytes) -> None:
        if _leads_out(entry):
            self._state.skipped.append(_text(entry.name))
            return
        temporary = _temporary_name()
        os.symlink(entry.link, temporary, dir_fd=parent)
        os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)
        _rename(temporary, name, parent)

    def _open_file(self, entry: TreeEntry, parent: int) -> None:
        if entry.size > self._limits.max_bytes - self._meter.bytes_done:
            raise _too_much(f"more than {self._limits.max_bytes} bytes")
        temporary = _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600, dir_fd=parent)
        self._file = _OpenFile(descriptor, parent, temporary, entry, entry.size)
        if not entry.size:
            self._complete(self._file)

    def _complete(self, file: _OpenFile) -> None:
        os.fchmod(file.descriptor, file.entry.mode & 0o777)
        os.utime(file.descriptor, ns=(file.entry.mtime_ns, file.entry.mtime_ns))
        self._file = None
        os.close(file.descriptor)
        _rename(file.temporary, _split(file.entry.name)[1], file.parent)
        self._meter.file_done(_text(file.entry.name))

    def _open_parent(self, directory: bytes) -> int:
        if not directory:
            return self._root
        if self._parent is not None and self._parent.name == directory:
            return self._parent.descriptor
        descriptor = self._open_directory(directory)
        if self._parent is not None:
            os.close(self._parent.descriptor)
        self._parent = _Parent(directory, descriptor)
        return descriptor

    def _open_directory(self, name: bytes) -> int:
        """A descriptor of a directory below the root, opened step by step so that no step can be a link."""
        descriptor = os.dup(self._root)
        for part in name.split(b"/"):
            try:
                below = os.open(part, _DIRECTORY, dir_fd=descriptor)
            except OSError as exc:
                raise _blocked(name, exc) from exc
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor


def _split(name: bytes) -> tuple[bytes, bytes]:
    parts = name.split(b"/")
    if len(parts) > MAX_DEPTH or any(part in {b"", b".", b".."} or b"\0" in part for part in parts):
        raise ProtocolError(f"a tree entry with the name {_text(name[:200])!r} is refused")
    return b"/".join(parts[:-1]), parts[-1]


def _leads_out(entry: TreeEntry) -> bool:
    """Only leading `..` count as safe, because after another component they could undo a link instead of a
    directory."""
    parts = entry.link.split(b"/")
    depth = entry.name.count(b"/")
    ups = 0
    while ups < len(parts) and parts[ups] in {b"..", b".", b""}:
        depth -= parts[ups] == b".."
        ups += 1
    absolute = entry.link.startswith(b"/") or not entry.link
    return absolute or depth < 0 or b".." in parts[ups:] or b"\0" in entry.link


def _rename(temporary: bytes, name: bytes, parent: int) -> None:
    try:
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.unlink(temporary, dir_fd=parent)
        raise


def _temporary_name() -> bytes:
    return b".opendsec-" + secrets.token_hex(8).encode("ascii") + b".part"


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _blocked(name: bytes, exc: OSError) -> FileError:
    text = _text(name)
    return FileError(
        f"{text!r} cannot be a directory below the target: {exc.strerror}",
        detail={"path": text, "errno": errno.errorcode.get(exc.errno or 0, "")},
        remedy="download into an empty directory",
    )


def _too_much(why: str) -> FileError:
    return FileError(
        f"the tree has {why}", detail={"errno": "EFBIG"}, remedy="raise the limits, or take a smaller tree"
    )
