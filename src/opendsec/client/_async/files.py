"""Files of one sandbox: `sandbox.files`. Paths are absolute, inside the sandbox; text is UTF-8.

Writes are atomic: a reader sees the old file or the new one. What comes back short is an error, never a shorter file.
Methods raise FileError (with `detail["errno"]`, such as ENOENT) for what the sandbox's file system refuses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import TypeVar

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transfer import Transfer
from opendsec.client._async.transport import Body, Content, Transport, decode_answer, octal, target
from opendsec.client.progress import ProgressCallback
from opendsec.client.retrying import may_repeat
from opendsec.client.tree_unpack import DownloadedTree, TreeLimits
from opendsec.errors import FileError, InvalidSpecError, OpenDSecError, ProtocolError
from opendsec.model.file import FileEvent, FileStat
from opendsec.wire.contracts import TREE_MEDIA_TYPE, Empty, FileList, FileRequest, TreeStatus

_T = TypeVar("_T")

MAX_READ_BYTES = 1024 * 1024 * 1024
WATCH_SILENCE_S = 30 * 24 * 3600.0
_ABSENT = frozenset({"ENOENT", "ENOTDIR"})
_READ_ATTEMPTS = 4


class Files:
    """`sandbox.files`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._transfer = Transfer(transport, sandbox_id)

    async def read(self, path: str, *, user: str | None = None) -> str:
        """The file as text; bytes that are no UTF-8 become U+FFFD."""
        return (await self.read_bytes(path, user=user)).decode("utf-8", "replace")

    async def read_bytes(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> bytes:
        """The file, or `length` bytes of it from `offset`; at most 1 GiB, use `read_stream` or `download` beyond
        that."""
        for attempt in range(_READ_ATTEMPTS):
            try:
                body = await self._open(path, offset, length, user)
                return await body.read_all(MAX_READ_BYTES, silence_s=self._transport.timeout_s)
            except OpenDSecError as error:
                if not may_repeat(error, idempotent=True) or attempt == _READ_ATTEMPTS - 1:
                    raise
                await self._transport.pause_before_repeat(attempt)
        raise AssertionError("unreachable")

    async def read_stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Chunks of the file as they arrive, of any size, in flat memory. Raises TransportError when it is cut."""
        body = await self._open(path, offset, length, user)
        try:
            while data := await body.read(silence_s=self._transport.timeout_s):
                yield data
        finally:
            await body.aclose()

    async def write(
        self, path: str, data: bytes | str, *, mode: int | None = None, user: str | None = None, parents: bool = True
    ) -> FileStat:
        """Write a whole file. `mode`: None keeps the old file's, else 0o644. `parents`: make missing directories."""
        raw = data.encode("utf-8") if isinstance(data, str) else bytes(data)
        where = self._content_target(path, mode, user, parents=parents)
        return await self._transport.upload(where, FileStat, lambda: raw)

    async def write_stream(
        self,
        path: str,
        chunks: AsyncIterator[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = True,
    ) -> FileStat:
        """Write a file of any size from chunks, in flat memory. Not repeated by itself when the connection is cut."""
        where = self._content_target(path, mode, user, parents=parents)
        body: Content = chunks if isinstance(chunks, AsyncIterator) else _pieces(chunks)
        return await self._transport.upload(where, FileStat, lambda: body, repeatable=False)

    async def stat(self, path: str, *, user: str | None = None) -> FileStat:
        """Kind, size, mode, times and owner; of a link itself, not of what it points to."""
        return await self._verb("stat", FileStat, FileRequest(path=path, user=user))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether the path exists; a dangling link does."""
        try:
            await self.stat(path, user=user)
        except FileError as error:
            if error.detail.get("errno") in _ABSENT:
                return False
            raise
        return True

    async def list(self, path: str, *, user: str | None = None) -> tuple[FileStat, ...]:
        """A directory's entries, sorted by name."""
        return (await self._verb("list", FileList, FileRequest(path=path, user=user))).items

    async def mkdir(
        self, path: str, *, mode: int | None = None, parents: bool = False, user: str | None = None
    ) -> None:
        """Make a directory. `parents`: make missing ones above it, and one that exists is fine."""
        request = FileRequest(path=path, mode=mode, parents=parents, user=user)
        await self._verb("mkdir", Empty, request, idempotent=parents)

    async def move(self, path: str, target_path: str, *, overwrite: bool = True, user: str | None = None) -> None:
        """Rename. `overwrite=False`: FileError with EEXIST when the target is there."""
        request = FileRequest(path=path, target=target_path, overwrite=overwrite, user=user)
        await self._verb("move", Empty, request, idempotent=False)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Remove a file, a link or an empty directory; `recursive`: a directory with everything in it."""
        request = FileRequest(path=path, recursive=recursive, user=user)
        await self._verb("remove", Empty, request, idempotent=False)

    async def chmod(self, path: str, mode: int, *, user: str | None = None) -> None:
        """Set the permission bits."""
        await self._verb("chmod", Empty, FileRequest(path=path, mode=mode, user=user))

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> AsyncGenerator[FileEvent, None]:
        """Changes below a directory, from now on, until you stop iterating. Raises TransportError when it is cut."""
        where = self._target("watch", {"path": path, "recursive": recursive, "user": user})
        body = await self._transport.open("GET", where)
        try:
            async with aclosing(read_lines(body, silence_s=WATCH_SILENCE_S)) as lines:
                async for line in lines:
                    yield decode_answer(line, FileEvent, body.request_id)
        finally:
            await body.aclose()

    async def upload(
        self, local: str, path: str, *, user: str | None = None, progress: ProgressCallback | None = None
    ) -> TreeStatus:
        """Copy a local file to `path`, or a local directory's content into the directory `path`, which is made if
        missing.

        Modes, times and links are kept; sockets, FIFOs and devices are left out. Memory stays flat at every size.
        """
        return await self._transfer.upload(local, path, user=user, progress=progress)

    async def download(
        self,
        path: str,
        local: str,
        *,
        user: str | None = None,
        limits: TreeLimits | None = None,
        progress: ProgressCallback | None = None,
    ) -> DownloadedTree:
        """Copy a file to the local path `local`, or a directory's content into the local directory `local`, made if
        missing.

        The sandbox is not trusted: nothing is written outside `local`, no link is followed, links that lead out of
        the tree are
        left out and named in the result, set-id bits are dropped. A file appears under its name when it is complete.
        """
        if (await self.stat(path, user=user)).kind == "directory":
            return await self._transfer.download_tree(path, local, user=user, limits=limits, progress=progress)
        return await self._transfer.download_file(path, local, user=user, limits=limits, progress=progress)

    async def read_tree(self, path: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """What is below a directory, or one file, as a tree stream (docs/reference/guest-protocol.md) with owners and
        attributes. Sockets, FIFOs and devices are not in it. Close the iterator (`contextlib.aclosing`).
        """
        body = await self._transport.open(
            "GET", self._target("tree", {"path": path, "user": user}), silence_s=self._transport.timeout_s
        )
        try:
            if not body.announces_end:
                raise ProtocolError("the server sends a tree without saying where it ends")
            while data := await body.read(silence_s=self._transport.timeout_s):
                yield data
        finally:
            await body.aclose()

    async def write_tree(self, path: str, stream: Callable[[], Content], *, user: str | None = None) -> TreeStatus:
        """Unpack a tree stream below the directory `path`, which is made if missing. `stream` is called again when the
        connection breaks. Owners other than the user's own need root."""
        where = self._target("tree", {"path": path, "user": user})
        return await self._transport.upload(where, TreeStatus, stream, headers={"Content-Type": TREE_MEDIA_TYPE})

    async def _open(self, path: str, offset: int, length: int | None, user: str | None) -> Body:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidSpecError("offset: offset and length are 0 or more", detail={"field": "offset"})
        query = {"path": path, "offset": offset or None, "length": length, "user": user}
        body = await self._transport.open("GET", self._target("content", query), silence_s=self._transport.timeout_s)
        if not body.announces_end:
            await body.aclose()
            raise ProtocolError("the server sends a file without saying where it ends")
        return body

    async def _verb(self, verb: str, kind: type[_T], request: FileRequest, *, idempotent: bool = True) -> _T:
        where = target("sandboxes", self._sandbox_id, "files", verb)
        return await self._transport.call("POST", where, kind, value=request, idempotent=idempotent)

    def _content_target(self, path: str, mode: int | None, user: str | None, *, parents: bool) -> str:
        return self._target("content", {"path": path, "mode": octal(mode), "user": user, "parents": parents})

    def _target(self, verb: str, query: dict[str, str | int | bool | None]) -> str:
        return target("sandboxes", self._sandbox_id, "files", verb, query=query)


async def _pieces(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
