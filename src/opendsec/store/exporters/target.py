"""What the user's TARGET of an export means, and the place it is written to: whole when it is finished, or not there.

`oci:DIR` is an OCI layout; `oci-archive:FILE`, or a bare FILE, the same as one tar archive; `docker-archive:FILE` an
archive that `docker load` takes, which is an OCI layout as well. All is written beside the target under a hidden name
and renamed at the end; what a killed export left there is removed by the next to the same target (its lock is free).
Blobs are written once, straight into place: their digest is known only when they are, so an archive's header is filled
in afterwards.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from opendsec.errors import ConflictError, InvalidSpecError
from opendsec.store.durable import disk_full_named, remove_tree, sync_directory, write_synced
from opendsec.store.exporters.compression import Hashed
from opendsec.store.exporters.documents import Written, blob_path


class TargetKind(StrEnum):
    """The form of what is written."""

    OCI = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place on this machine an image can be exported to."""

    kind: TargetKind
    path: Path

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.path}"


def parse_target(text: str) -> Target:
    """The target meant by `text`. InvalidSpecError naming the field `target`."""
    prefix, separator, rest = text.partition(":")
    if separator and prefix in {kind.value for kind in TargetKind}:
        kind, path = TargetKind(prefix), rest
    elif text.startswith("docker://"):
        raise InvalidSpecError(
            f"target: {text!r} is a registry", detail={"field": "target"}, remedy="use `opendsec image push`"
        )
    else:
        kind, path = TargetKind.OCI_ARCHIVE, text
    if not path or path.endswith("/.") or Path(path).name in {"", ".", ".."}:
        raise InvalidSpecError(
            f"target: {text!r} names no file",
            detail={"field": "target"},
            remedy="give FILE, oci:DIR, oci-archive:FILE or docker-archive:FILE",
        )
    return Target(kind=kind, path=Path(path))


class Place(ABC):
    """Where blobs and documents of one image are put."""

    @abstractmethod
    def blob(self, pieces: Iterable[bytes]) -> Written:
        """Write a blob; what it turned out to be."""

    @abstractmethod
    def document(self, name: str, content: bytes) -> None:
        """Write a file beside the blobs."""


@contextmanager
def opened_target(target: Target, *, replace: bool) -> Iterator[Place]:
    """A new place that becomes the target when the body ends well. ConflictError when it is there, unless `replace`.

    A directory is never replaced.
    """
    _check_free(target, replace=replace)
    directory = target.path.resolve().parent
    if not directory.is_dir():
        raise InvalidSpecError(f"target: {directory} is not a directory", detail={"field": "target"})
    _remove_leftovers(directory, target.path.name)
    partial = directory / f".{target.path.name}.{secrets.token_hex(4)}.partial"
    try:
        with disk_full_named(directory), _made(partial, target) as place:
            yield place
        with disk_full_named(directory):
            _check_free(target, replace=replace)
            partial.rename(target.path)
            sync_directory(directory)
    finally:
        remove_tree(partial)


def _check_free(target: Target, *, replace: bool) -> None:
    path = target.path
    if not os.path.lexists(path) or (replace and path.is_file() and target.kind is not TargetKind.OCI):
        return
    raise ConflictError(
        f"{path} is there already",
        detail={"field": "target"},
        remedy="remove it first" if target.kind is TargetKind.OCI else "remove it first, or say --replace",
    )


@contextmanager
def _made(partial: Path, target: Target) -> Iterator[Place]:
    """The hidden file or directory, locked while this process writes to it."""
    if target.kind is TargetKind.OCI:
        partial.mkdir()
        fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            layout = _Directory(partial)
            yield layout
            layout.close()
        finally:
            os.close(fd)
        return
    with partial.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        archive = _Archive(file)
        yield archive
        archive.close()


def _remove_leftovers(directory: Path, name: str) -> None:
    """What killed exports to this target left: hidden, of its name, and locked by nobody."""
    for path in directory.glob(f".{_quoted(name)}.????????.partial"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(path)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)


def _quoted(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


class _Directory(Place):
    """An OCI layout directory; blobs get their names when they are whole."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / "blobs" / "sha256").mkdir(parents=True)

    def blob(self, pieces: Iterable[bytes]) -> Written:
        passing = Hashed(iter(pieces))
        partial = self._root / "blobs" / "partial"
        with partial.open("xb") as file:
            for piece in passing:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._root / blob_path(passing.digest))
        return Written(digest=passing.digest, size_bytes=passing.size_bytes)

    def document(self, name: str, content: bytes) -> None:
        write_synced(self._root / name, content, mode=0o644)

    def close(self) -> None:
        """All names on the disk."""
        for directory in (self._root / "blobs" / "sha256", self._root / "blobs", self._root):
            sync_directory(directory)


class _Archive(Place):
    """A layout as one tar archive. A blob is written behind a place kept for its header, which is filled in then."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._blobs: set[str] = set()

    def blob(self, pieces: Iterable[bytes]) -> Written:
        start = self._file.tell()
        self._file.write(bytes(tarfile.BLOCKSIZE))
        passing = Hashed(iter(pieces))
        for piece in passing:
            self._file.write(piece)
        written = Written(digest=passing.digest, size_bytes=passing.size_bytes)
        if written.digest in self._blobs:  # Two layers of the same content are one blob.
            self._file.seek(start)
            self._file.truncate()
            return written
        self._blobs.add(written.digest)
        self._file.write(bytes(-passing.size_bytes % tarfile.BLOCKSIZE))
        end = self._file.tell()
        self._file.seek(start)
        self._file.write(_header(blob_path(written.digest), passing.size_bytes))
        self._file.seek(end)
        return written

    def document(self, name: str, content: bytes) -> None:
        self._file.write(_header(name, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE))

    def close(self) -> None:
        """The end mark; all of it on the disk."""
        end = self._file.tell() + 2 * tarfile.BLOCKSIZE
        self._file.write(bytes(2 * tarfile.BLOCKSIZE + -end % tarfile.RECORDSIZE))
        self._file.flush()
        os.fsync(self._file.fileno())


def _header(name: str, size: int) -> bytes:
    """One block, whatever the size: GNU's form holds more than 8 GiB in the field itself."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
