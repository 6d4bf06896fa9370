"""Where the files of a store are read from: a directory, or objects behind HTTP or S3.

    open_files("/mnt/shared/store")          a directory of this node, also of a mounted shared file system
    open_files("https://host/store")         a static tree behind any server that answers Range requests
    open_files("s3://bucket/prefix")         any S3-compatible endpoint; key and address as AWS_* say

Names are relative to the root of the store: `data/sha256/<hex>`. Whatever goes wrong is an OSError: FileNotFoundError
when the file is not there, PermissionError when this node may not read it, TimeoutError, or EIO with the peer's words.
Nothing is believed here and nothing is tried twice: `fetch` checks what it gets and decides what to ask for again.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from opendsec.errors import HostCapabilityError, InvalidSpecError
from opendsec.store.layout import BLOBS, DATA, TABLES
from opendsec.store.manifest import hex_of

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

OPEN_FILES = 256
"""Descriptors kept of a directory store: opening a file of a network file system again costs round trips."""
CONNECT_S = 5.0
_PIECE_BYTES = 1 << 20
REMOTE_SCHEMES = ("http://", "https://", "s3://")


def data_name(digest: str) -> str:
    """Of the data of a layer."""
    return f"{DATA}/{hex_of(digest)}"


def table_name(digest: str) -> str:
    """Of the chunk table of data of that digest."""
    return f"{TABLES}/{hex_of(digest)}"


def blob_name(digest: str) -> str:
    """Of metadata, or of a layer of one file."""
    return f"{BLOBS}/{hex_of(digest)}"


def is_remote(address: str) -> bool:
    """Whether a store's address names objects behind HTTP or S3 rather than a directory."""
    return address.startswith(REMOTE_SCHEMES)


def open_files(address: str, *, attempt_s: float = 10.0) -> StoreFiles:
    """The files of a store. `attempt_s` limits each request to a remote one, body included.

    Raises InvalidSpecError, or HostCapabilityError without the library remote stores need.
    """
    if is_remote(address):
        return ObjectFiles(address, attempt_s=attempt_s)
    if "://" in address:
        raise InvalidSpecError(
            f"{address!r} is no store: expected a directory, http(s)://… or s3://bucket/prefix",
            detail={"field": "OPENDSEC_STORE"},
        )
    return DirectoryFiles(Path(address))


class StoreFiles(ABC):
    """The files of one store, to be read. Threads may share it."""

    address: str
    """For messages; holds no key."""

    @abstractmethod
    def read(self, name: str, offset: int, size: int) -> bytes:
        """That part of a file; shorter where the file ends. OSError."""

    @abstractmethod
    def read_whole(self, name: str, *, most: int) -> bytes:
        """A whole file of at most so many bytes. OSError, EFBIG when it is larger."""

    @abstractmethod
    def listed(self, folder: str) -> list[str] | None:
        """The names in a folder, in any order; none when it is not there. None: this store cannot tell. OSError."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Put a small file there, whole or not at all, replacing what was there. OSError."""

    @abstractmethod
    def close(self) -> None:
        """Give back descriptors and connections."""


class DirectoryFiles(StoreFiles):
    """A directory of this node's file tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address = str(root)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, name: str, offset: int, size: int) -> bytes:
        fd = self._take(name)
        try:
            return os.pread(fd, size, offset)
        finally:
            self._give_back(name, fd)

    def read_whole(self, name: str, *, most: int) -> bytes:
        with (self.root / name).open("rb") as file:
            content = file.read(most + 1)
        return _at_most(content, most, name)

    def listed(self, folder: str) -> list[str] | None:
        try:
            return [path.name for path in (self.root / folder).iterdir()]
        except FileNotFoundError:
            return []

    def write(self, name: str, content: bytes) -> None:
        target = self.root / name
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(content)
            partial.chmod(0o644)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            fds, self._open = list(self._open.values()), OrderedDict()
        for fd in fds:
            os.close(fd)

    def _take(self, name: str) -> int:
        """A descriptor nobody else uses at this moment, so that closing one never hits a reader."""
        with self._lock:
            fd = self._open.pop(name, None)
        return os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW) if fd is None else fd

    def _give_back(self, name: str, fd: int) -> None:
        with self._lock:
            surplus = fd if name in self._open else None
            if surplus is None:
                self._open[name] = fd
                if len(self._open) > OPEN_FILES:
                    _, surplus = self._open.popitem(last=False)
        if surplus is not None:
            os.close(surplus)


class ObjectFiles(StoreFiles):
    """Objects behind HTTP or S3. Keeps connections open; any number of threads may ask at once."""

    def __init__(self, address: str, *, attempt_s: float) -> None:
        self.address = address.rstrip("/")
        self._store = _object_store(self.address, attempt_s)

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self._streamed(name, {"range": (offset, offset + size)}, size)[:size] if size else b""

    def read_whole(self, name: str, *, most: int) -> bytes:
        return _at_most(self._streamed(name, {}, most + 1), most, name)

    def _streamed(self, name: str, options: GetOptions, enough: int) -> bytes:
        """Of an answer, its beginning: what a server sends beyond `enough` bytes is not waited for, nor kept."""
        from obstore import get
        from obstore.exceptions import BaseError

        pieces, total = [], 0
        try:
            for piece in get(self._store, name, options=options).stream(min_chunk_size=_PIECE_BYTES):
                total += len(piece)
                pieces.append(bytes(piece))
                if total >= enough:
                    break
        except (BaseError, OSError) as error:
            raise _as_os_error(error, name) from error
        return b"".join(pieces)

    def listed(self, folder: str) -> list[str] | None:
        from obstore import list_with_delimiter
        from obstore.exceptions import BaseError

        if not self.address.startswith("s3://"):
            return None
        try:
            found = list_with_delimiter(self._store, folder)["objects"]
        except (BaseError, OSError) as error:
            raise _as_os_error(error, folder) from error
        return [str(one["path"]).rpartition("/")[2] for one in found]

    def write(self, name: str, content: bytes) -> None:
        from obstore import put
        from obstore.exceptions import BaseError

        try:
            put(self._store, name, content, use_multipart=False)  # plain HTTP knows no parts
        except (BaseError, OSError) as error:
            raise _as_os_error(error, name) from error

    def size(self, name: str) -> int | None:
        """Of an object; None when there is none. OSError."""
        from obstore import head
        from obstore.exceptions import BaseError

        try:
            return int(head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _as_os_error(error, name) from error

    def upload(self, name: str, path: Path) -> None:
        """Put a file there, large ones in parts: it is there when all of it is. OSError."""
        from obstore import put
        from obstore.exceptions import BaseError

        try:
            put(self._store, name, path)
        except (BaseError, OSError) as error:
            raise _as_os_error(error, name) from error

    def close(self) -> None:
        """Connections go with the object."""


def _object_store(address: str, attempt_s: float) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import HTTPStore, S3Store
    except ImportError as error:
        raise HostCapabilityError(
            "the library obstore is not installed, so stores behind HTTP and S3 cannot be read",
            detail={"probe": "obstore"},
            remedy="pip install 'opendsec[server]'",
        ) from error
    options: ClientConfig = {
        "allow_http": True,  # who names an endpoint without TLS means it
        "timeout": timedelta(seconds=attempt_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_S, attempt_s)),
    }
    retry: RetryConfig = {"max_retries": 0}
    try:
        if address.startswith("s3://"):
            return S3Store.from_url(address, client_options=options, retry_config=retry)
        return HTTPStore.from_url(address, client_options=options, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise InvalidSpecError(
            f"{address!r} cannot be a store: {_first_line(error)}", detail={"field": "OPENDSEC_STORE"}
        ) from error


def _as_os_error(error: Exception, name: str) -> OSError:
    from obstore.exceptions import NotSupportedError, PermissionDeniedError, UnauthenticatedError

    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "the store has no such file", name)
    if isinstance(error, OSError):
        return error
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return PermissionError(errno.EACCES, f"the store refuses: {_first_line(error)}", name)
    words = _first_line(error)
    if isinstance(error, NotSupportedError):
        return OSError(
            errno.EOPNOTSUPP, f"the server cannot do what is needed (it must answer Range requests): {words}", name
        )
    if "timed out" in str(error) or "TimedOut" in str(error):
        return TimeoutError(errno.ETIMEDOUT, f"no answer in time: {words}", name)
    return OSError(errno.EIO, words, name)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]


def _at_most(content: bytes, most: int, name: str) -> bytes:
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", name)
    return content
