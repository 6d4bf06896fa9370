"""Read a tar archive strictly, entry by entry, from any supported compression.

Python's `tarfile` takes a damaged header in the middle of an archive for its end and says nothing. Here every archive
must end with its end mark: anything else is truncated or damaged, and the error names the last good entry.
Compression is recognised by its first bytes, never by a name or a claimed type.

It only reads; what entries may do to a tree is decided in `unpack`.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Self, cast

from opendsec.errors import ImageInvalidError
from opendsec.store.importers.limits import Limits
from opendsec.store.programs import filtered, find_program

_MAGIC = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"))
_SKIPPABLE_ZSTD = range(0x184D2A50, 0x184D2A60)
_HEADER_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ChildProcessError)


def compression_of(start: bytes) -> str:
    """`gzip`, `zstd`, `bzip2`, `xz` or `` from the first 6 bytes of a file."""
    for magic, name in _MAGIC:
        if start.startswith(magic):
            return name
    if len(start) >= 4 and int.from_bytes(start[:4], "little") in _SKIPPABLE_ZSTD:
        return "zstd"
    return ""


class Counted:
    """A stream that hashes and counts what is read from it, and ends when that is too much for its archive's size."""

    def __init__(self, stream: BinaryIO, *, limits: Limits, size_bytes: int, hashed: str = "") -> None:
        self._stream = stream
        self._hash = hashlib.new(hashed) if hashed else None
        self._limits = limits
        self._most = max(limits.free_bytes, size_bytes * limits.max_ratio)
        self.done = 0

    def read(self, size: int = -1, /) -> bytes:
        chunk = self._stream.read(size)
        self.done += len(chunk)
        if self.done > self._most:
            raise tarfile.ReadError(f"it unpacks to more than {self._limits.max_ratio} times its size")
        if self._hash is not None:
            self._hash.update(chunk)
        return chunk

    def drain(self) -> None:
        """Read the rest; a damaged compressed stream fails here at the latest, and one that goes on and on."""
        end = self.done + self._limits.max_padding_bytes
        while self.read(1 << 20):
            if self.done > end:
                raise tarfile.ReadError(f"more than {self._limits.max_padding_bytes} bytes follow its end mark")

    def digest(self) -> str:
        """`sha256:<hex>`, or of the algorithm that was asked for, of what was read."""
        if self._hash is None:
            raise ValueError("this stream is not hashed")
        return f"{self._hash.name}:{self._hash.hexdigest()}"


@contextmanager
def decompressed(file: BinaryIO) -> Iterator[BinaryIO]:
    """The uncompressed bytes of an open file that stands at its beginning."""
    start = file.read(6)
    file.seek(0)
    match compression_of(start):
        case "gzip":
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                yield cast("BinaryIO", stream)
        case "bzip2":
            with bz2.BZ2File(file) as stream:
                yield cast("BinaryIO", stream)
        case "xz":
            with lzma.LZMAFile(file) as stream:
                yield cast("BinaryIO", stream)
        case "zstd":
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # The buffered file above has read ahead.
            with filtered([find_program("zstd"), "-dcq", "-M1024MB"], file.fileno()) as stream:
                yield stream
        case _:
            yield file


class Archive:
    """The entries of one tar stream, in order; `last` is the name of the latest, for errors."""

    def __init__(self, stream: Counted, *, limits: Limits) -> None:
        self.stream = stream
        self.last = ""
        self._limits = limits
        self._tar: tarfile.TarFile | None = None

    def entries(self) -> Iterator[tarfile.TarInfo]:
        """Each entry once; its content must be read before the next is asked for. Reads the stream to its very end."""
        with tarfile.open(
            fileobj=cast("BinaryIO", self.stream),
            mode="r|",
            tarinfo=_strict(self._limits),
            encoding="utf-8",
            errors="surrogateescape",
        ) as self._tar:
            while (member := self._tar.next()) is not None:
                self.last = member.name
                self._tar.members = []  # type: ignore[attr-defined]  # A stream needs no index, and a million entries would fill the memory.
                yield member
        self.stream.drain()

    def content(self, member: tarfile.TarInfo) -> BinaryIO:
        """The bytes of a regular entry, holes as zeros."""
        file = None if self._tar is None else self._tar.extractfile(member)
        if file is None:
            raise tarfile.ReadError(f"entry {member.name!r} has no content")
        return cast("BinaryIO", cast("io.BufferedReader", file).raw)  # Unbuffered, it can skip holes of a stream.


@contextmanager
def opened_archive(file: BinaryIO, *, label: str, limits: Limits, hashed: str = "") -> Iterator[Archive]:
    """The archive in an open file. What is wrong with its bytes becomes ImageInvalidError with `label` and entry.

    `hashed`: an algorithm; `archive.stream.digest()` is that digest of the uncompressed bytes, once all was read.
    """
    archive: Archive | None = None
    try:
        with decompressed(file) as stream:
            size_bytes = os.fstat(file.fileno()).st_size
            archive = Archive(Counted(stream, limits=limits, size_bytes=size_bytes, hashed=hashed), limits=limits)
            yield archive
    except _BROKEN as error:
        raise _damaged(label, archive, error, file) from error
    except OSError as error:
        if error.errno is not None:  # The decompressors' own errors have no number.
            raise
        raise _damaged(label, archive, error, file) from error


def position(file: BinaryIO) -> int:
    """How far an open archive file was read, whoever reads it."""
    return os.lseek(file.fileno(), 0, os.SEEK_CUR)


def looks_like_disk(start: bytes) -> bool:
    """Do a file's first 512 bytes say that it is a machine's disk: qcow2, or a boot sector?"""
    return start.startswith(b"QFI\xfb") or start[510:512] == b"\x55\xaa"


def _damaged(label: str, archive: Archive | None, error: Exception, file: BinaryIO) -> ImageInvalidError:
    last = archive.last if archive is not None else ""
    if not last and looks_like_disk(os.pread(file.fileno(), 512, 0)):
        return ImageInvalidError(
            f"{label} is no archive: it begins as the disk of a machine does",
            detail={"layer": label, "entry": ""},
            remedy="import it for full VMs: `opendsec image import NAME FILE --disk`",
        )
    where = f"after entry {last!r}" if last else "at its beginning"
    return ImageInvalidError(
        f"{label} is truncated or damaged {where}: {str(error) or 'unexpected end'}",
        detail={"layer": label, "entry": last},
    )


def _strict(limits: Limits) -> type[tarfile.TarInfo]:
    """A TarInfo whose headers are good or an error, and whose extended headers have a size that can be read at once."""

    class StrictTarInfo(tarfile.TarInfo):
        @classmethod
        def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
            try:
                return super().fromtarfile(tar)
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                raise
            except (tarfile.HeaderError, ValueError) as error:  # numbers in maps of holes that are none, too
                raise tarfile.ReadError(f"bad header ({error})") from error

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            info = super().frombuf(buf, encoding, errors)
            if info.type in _HEADER_TYPES and info.size > limits.max_header_bytes:
                raise tarfile.ReadError(f"an extended header claims {info.size} bytes")
            if info.size < 0:
                raise tarfile.ReadError(f"entry {info.name!r} claims a negative size")
            return info

    return StrictTarInfo
