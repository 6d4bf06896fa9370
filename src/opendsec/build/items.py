"""What is copied into an image, as items, and items as a tree stream (docs/reference/guest-protocol.md).

Pure but for reading the files it is told to. A file that changes after its digest was taken is an error: the cache
would hold the wrong bytes under the right key.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import tarfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opendsec.build.context import Source
from opendsec.client.tree_format import END, TreeEntry, pack_entry
from opendsec.errors import FileError, InvalidSpecError, UnsupportedError
from opendsec.model.file import FileKind

CHUNK_BYTES = 512 * 1024
_XATTR = "SCHILY.xattr."
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who gets what is copied."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry, and where its bytes come from."""

    entry: TreeEntry
    content: Callable[[], Iterator[bytes]] | None = None

    def moved(self, directory: str) -> Item:
        """The same below a directory."""
        return replace(self, entry=replace(self.entry, name=os.fsencode(directory) + b"/" + self.entry.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the step says about everything it copies."""

    owner: Owner | None = None
    mode: int | None = None

    def applied(self, entry: TreeEntry) -> TreeEntry:
        """The entry as it is to be."""
        if self.owner is not None:
            entry = replace(entry, uid=self.owner.uid, gid=self.owner.gid)
        if self.mode is not None and entry.kind is not FileKind.SYMLINK:
            entry = replace(entry, mode=self.mode)
        return entry


def stream(items: Sequence[Item], *, end: bool = True) -> Iterator[bytes]:
    """The items as a tree stream, in pieces; without the mark at its end more may follow."""
    for item in items:
        yield pack_entry(item.entry)
        if item.content is not None:
            yield from item.content()
    if end:
        yield END


def context_items(
    source: Source, target: str, changes: Changes, digests: Mapping[Path, str], *, with_itself: bool = True
) -> list[Item]:
    """A source of the context at `target`, a path relative to where the stream is unpacked; empty: right there.
    `with_itself=False`: only what is below it."""
    items: list[Item] = []
    for found in source.entries[not with_itself :]:
        name = posixpath.join(target, found.name) if found.name else target
        status = found.status
        entry = TreeEntry(
            kind=_kind(status.st_mode),
            name=os.fsencode(name),
            mode=stat.S_IMODE(status.st_mode),
            mtime_ns=status.st_mtime_ns,
            size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
            link=os.fsencode(os.readlink(found.where)) if stat.S_ISLNK(status.st_mode) else b"",  # noqa: PTH115
            uid=0,
            gid=0,
        )
        items.append(Item(entry=changes.applied(entry), content=_content(found.where, entry, digests)))
    return items


def inline_item(content: str, target: str, changes: Changes) -> Item:
    """A document in place."""
    data = content.encode("utf-8", "surrogateescape")
    entry = TreeEntry(kind=FileKind.FILE, name=os.fsencode(target), mode=0o644, size=len(data), uid=0, gid=0)
    return Item(entry=changes.applied(entry), content=lambda: iter((data,)))


def directory_item(name: str, owner: Owner, *, mode: int = 0o755, mtime_ns: int = 0) -> Item:
    """A directory that has to be made on the way."""
    entry = TreeEntry(
        kind=FileKind.DIRECTORY, name=os.fsencode(name), mode=mode, mtime_ns=mtime_ns, uid=owner.uid, gid=owner.gid
    )
    return Item(entry=entry)


def _kind(mode: int) -> FileKind:
    if stat.S_ISDIR(mode):
        return FileKind.DIRECTORY
    return FileKind.SYMLINK if stat.S_ISLNK(mode) else FileKind.FILE


def _content(where: Path, entry: TreeEntry, digests: Mapping[Path, str]) -> Callable[[], Iterator[bytes]] | None:
    if entry.kind is not FileKind.FILE:
        return None

    def read() -> Iterator[bytes]:
        running = hashlib.sha256()
        left = entry.size
        with where.open("rb") as file:
            while left and (piece := file.read(min(left, CHUNK_BYTES))):
                left -= len(piece)
                running.update(piece)
                if not left and (file.read(1) or running.hexdigest() != digests[where]):
                    raise _changed(where)
                yield piece
        if left:
            raise _changed(where)

    return read


def _changed(where: Path) -> FileError:
    return FileError(
        f"{where} changed while the image was built",
        detail={"path": str(where), "errno": "EIO"},
        remedy="build again when nothing writes to the context",
    )


# archives, for ADD


def is_archive(path: Path) -> bool:
    """Whether ADD unpacks it. Raises UnsupportedError for zstd, which Python cannot read."""
    with path.open("rb") as file:
        if file.read(4) == _ZSTD:
            raise UnsupportedError(
                f"{path.name} is compressed with zstd, which ADD cannot unpack here",
                detail={"field": "source"},
                remedy="COPY it, or pack it with gzip or xz",
            )
    return tarfile.is_tarfile(path)


def archive_items(path: Path, changes: Changes, *, status: os.stat_result | None = None) -> list[Item]:
    """What is in a tar archive, with the owners it says. Raises InvalidSpecError for what a copy cannot make.

    `status`: as it was before its digest was taken; FileError when it is another file by now.
    """
    with _opened(path, status) as archive:
        members = archive.getmembers()
    by_name = {_clean(member.name): member for member in members if member.isreg()}
    contents = _Contents(path, status)
    return [item for member in members if (item := _member(path, member, by_name, changes, contents)) is not None]


def _opened(path: Path, status: os.stat_result | None) -> tarfile.TarFile:
    archive = tarfile.open(path, "r:*", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - the caller closes it
    number = archive.fileobj.fileno()  # type: ignore[attr-defined]  # Of the file itself, also below a decompressor.
    if status is not None and _identity(os.fstat(number)) != _identity(status):
        archive.close()
        raise _changed(path)
    return archive


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_ino, status.st_size, status.st_mtime_ns)


class _Contents:
    """Bytes of the files of an archive, which stays open from one to the next: a compressed one that is opened anew is
    unpacked anew up to there. It is closed when nobody has it any more.
    """

    def __init__(self, path: Path, status: os.stat_result | None) -> None:
        self._path = path
        self._status = status
        self._archive: tarfile.TarFile | None = None

    def read(self, member: tarfile.TarInfo) -> Iterator[bytes]:
        if self._archive is None:
            self._archive = _opened(self._path, self._status)
            weakref.finalize(self, self._archive.close)
        file = self._archive.extractfile(member)
        assert file is not None
        while piece := file.read(CHUNK_BYTES):
            yield piece


def _clean(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


def _member(
    path: Path,
    member: tarfile.TarInfo,
    by_name: Mapping[str, tarfile.TarInfo],
    changes: Changes,
    contents: _Contents,
) -> Item | None:
    name = _clean(member.name)
    if name == ".":
        return None
    if name == ".." or name.startswith("../"):
        raise InvalidSpecError(f"{path.name}: the entry {member.name!r} leads out of it", detail={"field": "source"})
    source = by_name.get(_clean(member.linkname)) if member.islnk() else member
    kinds = {tarfile.DIRTYPE: FileKind.DIRECTORY, tarfile.SYMTYPE: FileKind.SYMLINK}
    if source is None or not (source.isreg() or source.type in kinds):
        raise InvalidSpecError(
            f"{path.name}: the entry {member.name!r} is neither a file, a directory nor a link of either",
            detail={"field": "source"},
        )
    entry = TreeEntry(
        kind=kinds.get(source.type, FileKind.FILE),
        name=os.fsencode(name),
        mode=source.mode & 0o7777,
        mtime_ns=max(0, int(source.mtime * 10**9)),
        size=source.size if source.isreg() else 0,
        link=os.fsencode(source.linkname) if source.issym() else b"",
        uid=source.uid,
        gid=source.gid,
        xattrs=tuple(
            (os.fsencode(key.removeprefix(_XATTR)), value.encode("utf-8", "surrogateescape"))
            for key, value in source.pax_headers.items()
            if key.startswith(_XATTR)
        ),
    )
    found = source
    content = (lambda: contents.read(found)) if source.isreg() else None
    return Item(entry=changes.applied(entry), content=content)
