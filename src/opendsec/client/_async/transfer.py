"""Copies between the local machine and a sandbox: files and whole trees, streaming, with flat memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from opendsec.client._async.transport import Body, Transport, octal, target
from opendsec.client.concurrency import async_blocking
from opendsec.client.progress import Meter, ProgressCallback
from opendsec.client.retrying import may_repeat
from opendsec.client.tree_pack import CHUNK_BYTES, pack_tree
from opendsec.client.tree_unpack import DownloadedTree, TreeLimits, TreeUnpacker
from opendsec.errors import FileError, OpenDSecError, ProtocolError
from opendsec.model.file import FileStat
from opendsec.wire.contracts import TREE_MEDIA_TYPE, TreeStatus

GATHER_BYTES = 1024 * 1024
_DOWNLOAD_ATTEMPTS = 4


class Transfer:
    """Uploads and downloads of one sandbox."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def upload(self, local: str, path: str, *, user: str | None, progress: ProgressCallback | None) -> TreeStatus:
        """See Files.upload."""
        if await async_blocking(os.path.isdir, local):
            where = self._target("tree", path, user)
            return await self._transport.upload(
                where, TreeStatus, lambda: _tree_body(Path(local), progress), headers={"Content-Type": TREE_MEDIA_TYPE}
            )
        return await self._upload_file(Path(local), path, user, progress)

    async def download_tree(
        self,
        path: str,
        local: str,
        *,
        user: str | None,
        limits: TreeLimits | None,
        progress: ProgressCallback | None,
    ) -> DownloadedTree:
        """See Files.download. What was complete before a failure stays; a repeat replaces it."""
        await async_blocking(Path(local).mkdir, parents=True, exist_ok=True)
        attempt = 0
        while True:
            try:
                body = await self._open(self._target("tree", path, user))
                return await self._unpack(body, local, limits, Meter(progress))
            except OpenDSecError as error:
                if attempt >= _DOWNLOAD_ATTEMPTS - 1 or not may_repeat(error, idempotent=True):
                    raise
            await self._transport.pause_before_repeat(attempt)
            attempt += 1

    async def download_file(
        self,
        path: str,
        local: str,
        *,
        user: str | None,
        limits: TreeLimits | None,
        progress: ProgressCallback | None,
    ) -> DownloadedTree:
        """See Files.download."""
        final = Path(local)
        if await async_blocking(final.is_dir):
            raise FileError(
                f"{local} is a directory", detail={"path": local, "errno": "EISDIR"}, remedy="name the file in it"
            )
        await async_blocking(final.parent.mkdir, parents=True, exist_ok=True)
        temporary = final.with_name(f".opendsec-{secrets.token_hex(8)}.part")
        attempt = 0
        try:
            while True:
                try:
                    return await self._fetch(path, temporary, final, user, limits or TreeLimits(), progress)
                except OpenDSecError as error:
                    if attempt >= _DOWNLOAD_ATTEMPTS - 1 or not may_repeat(error, idempotent=True):
                        raise
                await self._transport.pause_before_repeat(attempt)
                attempt += 1
        finally:
            await async_blocking(temporary.unlink, missing_ok=True)

    async def _upload_file(
        self, local: Path, path: str, user: str | None, progress: ProgressCallback | None
    ) -> TreeStatus:
        file = await async_blocking(local.open, "rb", buffering=0)
        try:
            status = os.fstat(file.fileno())
            where = self._target("content", path, user, mode=status.st_mode & 0o777, parents=True)
            meter = Meter(progress, bytes_total=status.st_size)
            await self._transport.upload(
                where,
                FileStat,
                lambda: _file_body(file, status.st_size, local.name, meter),
                headers={"Content-Length": str(status.st_size)},
            )
            meter.file_done(local.name)
        finally:
            await async_blocking(file.close)
        return TreeStatus(files=1, bytes=status.st_size)

    async def _unpack(self, body: Body, local: str, limits: TreeLimits | None, meter: Meter) -> DownloadedTree:
        unpacker = await async_blocking(TreeUnpacker, local, meter=meter, limits=limits)
        try:
            while data := await self._gather(body):
                await async_blocking(unpacker.feed, data)
            return await async_blocking(unpacker.finish)
        finally:
            unpacker.close()
            await body.aclose()

    async def _fetch(
        self,
        path: str,
        temporary: Path,
        final: Path,
        user: str | None,
        limits: TreeLimits,
        progress: ProgressCallback | None,
    ) -> DownloadedTree:
        body = await self._open(self._target("content", path, user))
        announced = body.headers.get(b"content-length")
        meter = Meter(progress, bytes_total=int(announced) if announced else None)
        try:
            with await async_blocking(temporary.open, "wb", buffering=0) as file:
                while data := await self._gather(body):
                    if meter.bytes_done + len(data) > limits.max_bytes:
                        raise FileError(f"{path} has more than {limits.max_bytes} bytes", detail={"errno": "EFBIG"})
                    await async_blocking(_write_all, file, data)
                    meter.add(len(data), final.name)
            await async_blocking(os.replace, temporary, final)
        finally:
            await body.aclose()
        meter.file_done(final.name)
        return DownloadedTree(files=1, bytes=meter.bytes_done)

    async def _gather(self, body: Body) -> bytes:
        """The next bytes, about a MiB of them: a hop to another thread for each small piece would cost more than
        the disk."""
        pieces: list[bytes] = []
        size = 0
        while size < GATHER_BYTES and (data := await body.read(silence_s=self._transport.timeout_s)):
            pieces.append(data)
            size += len(data)
        return b"".join(pieces)

    async def _open(self, where: str) -> Body:
        body = await self._transport.open("GET", where, silence_s=self._transport.timeout_s)
        if not body.announces_end:
            await body.aclose()
            raise ProtocolError("the server sends a file without saying where it ends")
        return body

    def _target(
        self, verb: str, path: str, user: str | None, *, mode: int | None = None, parents: bool | None = None
    ) -> str:
        query = {"path": path, "user": user, "mode": octal(mode), "parents": parents}
        return target("sandboxes", self._sandbox_id, "files", verb, query=query)


async def _tree_body(local: Path, progress: ProgressCallback | None) -> AsyncIterator[bytes]:
    pieces = pack_tree(local, Meter(progress))
    while chunk := await async_blocking(_next_piece, pieces):
        yield chunk


async def _file_body(file: BinaryIO, size: int, name: str, meter: Meter) -> AsyncIterator[bytes]:
    offset = 0
    meter.bytes_done = 0
    while offset < size:
        data = await async_blocking(os.pread, file.fileno(), min(CHUNK_BYTES, size - offset), offset)
        if not data:
            raise FileError(f"{name} became shorter while it was read", detail={"path": name, "errno": "EIO"})
        offset += len(data)
        yield data
        meter.add(len(data), name)


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    return next(pieces, b"")


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
