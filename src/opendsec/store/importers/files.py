"""Files of an image as it came: a layout or an unpacked archive, in which nothing is believed.

A file is opened component by component without following a symbolic link, so a blob that is a link to a secret of
this machine, or a FIFO that nobody writes to, is an error that names it. Old Docker archives link layers to each
other; there a link may lead to another file of the same archive, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.store.importers.oci_config import Descriptor

_MAX_LINKS = 8
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class ImageFiles:
    """The files below one directory. `links`: whether a link to another file below it is followed."""

    def __init__(self, root: Path, *, links: bool = False) -> None:
        self.root = root
        self._links = links

    def open(self, name: str, *, label: str = "") -> BinaryIO:
        """A regular file by its relative name. ImageInvalidError when it is missing or anything else."""
        said = label or name.rpartition("/")[2][:80]
        current = posixpath.normpath(name)
        for _ in range(_MAX_LINKS):
            if current.startswith(("/", "../")) or current in (".", ".."):
                raise ImageInvalidError(f"{said}: {name[:120]!r} does not lie in the image")
            try:
                fd = self._descend(current)
            except (FileNotFoundError, NotADirectoryError, ValueError) as error:
                raise ImageInvalidError(f"{said} is missing from the image", detail={"file": name}) from error
            except OSError as error:
                target = self._target(current) if error.errno == errno.ELOOP and self._links else None
                if target is None:
                    raise ImageInvalidError(
                        f"{said} cannot be opened as a file of the image: {error.strerror}", detail={"file": name}
                    ) from error
                current = target
                continue
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ImageInvalidError(f"{said} is not a regular file", detail={"file": name})
            return os.fdopen(fd, "rb")
        raise ImageInvalidError(f"{said}: too many links on the way to it", detail={"file": name})

    def has(self, name: str) -> bool:
        """Whether a regular file of that name is there."""
        try:
            self.open(name).close()
        except ImageInvalidError:
            return False
        return True

    def small(self, name: str, *, limit: int, label: str = "") -> bytes:
        """All bytes of a file, at most `limit`."""
        with self.open(name, label=label) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ImageInvalidError(f"{label or name[-80:]} has more than {limit} bytes")
        return content

    def _descend(self, name: str) -> int:
        *directories, last = name.split("/")
        with contextlib.ExitStack() as opened:
            here = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            opened.callback(os.close, here)
            for directory in directories:
                here = os.open(directory, _FLAGS | os.O_DIRECTORY, dir_fd=here)
                opened.callback(os.close, here)
            return os.open(last, _FLAGS, dir_fd=here)

    def _target(self, name: str) -> str | None:
        """Where a link leads, as a name below the root."""
        try:
            link = (self.root / name).readlink()
        except OSError:
            return None
        return posixpath.normpath(posixpath.join(posixpath.dirname(name), os.fspath(link)))


def decode_json(content: bytes, *, where: str) -> Any:
    """A JSON value. ImageInvalidError saying where it stood."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageInvalidError(f"{where} is not JSON: {error}") from error


def decode_object(content: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object. ImageInvalidError saying where it stood."""
    fields = decode_json(content, where=where)
    if not isinstance(fields, dict):
        raise ImageInvalidError(f"{where} is not a JSON object")
    return fields


def verify(file: BinaryIO, blob: Descriptor, label: str, on_done: Callable[[int], None]) -> None:
    """Size and digest of a blob, before anything in it is believed."""
    size = os.fstat(file.fileno()).st_size
    if size < blob.size_bytes:
        raise ImageInvalidError(f"{label} is truncated: {size} of {blob.size_bytes} bytes", detail={"layer": label})
    running = hashlib.new(blob.digest.partition(":")[0])
    while size == blob.size_bytes and (chunk := file.read(4 << 20)):
        running.update(chunk)
        on_done(file.tell())
    check_digest(blob, size, running.hexdigest(), label=label)


def check_digest(blob: Descriptor, size: int, found: str, *, label: str = "") -> None:
    """DigestMismatchError unless size and digest are the descriptor's."""
    if size != blob.size_bytes or f"{blob.digest.partition(':')[0]}:{found}" != blob.digest:
        raise DigestMismatchError(
            f"{label or blob.digest}: its bytes do not have the size or digest its descriptor says",
            detail={"digest": blob.digest},
        )
