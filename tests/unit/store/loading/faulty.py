"""A store in memory that lies, fails and waits as it is told; and an answer to a read that remembers what it was."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Iterable

from opendsec.model.image import Blob
from opendsec.store.chunks import CHUNK_BYTES, table_digest
from opendsec.store.loading.sources import StoreFiles, blob_name, data_name, table_name

Fault = Callable[[str, int, bytes], bytes]
"""Name, offset and the right bytes; returns what the store says, or raises."""


def honest(_name: str, _offset: int, content: bytes) -> bytes:
    return content


def pieces_of(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]


def blob_of(content: bytes) -> tuple[Blob, bytes]:
    """A data blob and its table."""
    table = b"".join(hashlib.sha256(piece).digest() for piece in pieces_of(content))
    return Blob(digest=table_digest(table), size_bytes=len(content)), table


class FaultyFiles(StoreFiles):
    def __init__(self, *contents: bytes, fault: Fault = honest) -> None:
        self.address = "memory"
        self.fault = fault
        self.reads: list[tuple[str, int, int]] = []
        self.files: dict[str, bytes] = {}
        for content in contents:
            blob, table = blob_of(content)
            self.files |= {data_name(blob.digest): content, table_name(blob.digest): table}
            self.files[blob_name(f"sha256:{hashlib.sha256(content).hexdigest()}")] = content

    def read(self, name: str, offset: int, size: int) -> bytes:
        self.reads.append((name, offset, size))
        return self.fault(name, offset, self._content(name)[offset : offset + size])

    def read_whole(self, name: str, *, most: int) -> bytes:
        content = self.fault(name, 0, self._content(name))
        if len(content) > most:
            raise OSError(errno.EFBIG, "too large", name)
        return content

    def listed(self, folder: str) -> list[str] | None:
        return [name.rpartition("/")[2] for name in self.files if name.startswith(f"{folder}/")]

    def write(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def close(self) -> None:
        pass

    def _content(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there", name)
        return self.files[name]


class Answer:
    """What `Reply` of the kernel would have been given; only the first counts."""

    def __init__(self) -> None:
        self.complete = threading.Event()
        self.content: bytes | None = None
        self.error = 0
        self._lock = threading.Lock()

    def give(self, *parts: bytes | memoryview) -> bool:
        return self._end(b"".join(parts), 0)

    def fail(self, number: int) -> bool:
        return self._end(None, number)

    def wait(self) -> Answer:
        assert self.complete.wait(60), "a read was never answered"
        return self

    def _end(self, content: bytes | None, error: int) -> bool:
        with self._lock:
            if self.complete.is_set():
                return False
            self.content, self.error = content, error
            self.complete.set()
            return True


def all_of(answers: Iterable[Answer]) -> list[bytes | None]:
    return [answer.wait().content for answer in answers]
