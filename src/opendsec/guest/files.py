"""The file operations of a channel: one call each (FS frames of the guest protocol)."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Final

from opendsec.guest import protocol
from opendsec.guest.base import GuestError, GuestLostError, GuestStat
from opendsec.guest.calls import Call
from opendsec.guest.protocol import FieldError, FieldValue, pack_fields

_MAX_ENTRY: Final = 64 * 1024
MAX_LISTED: Final = 100_000
"""Entries of one directory; more are refused, for they are held in memory on their way."""


class Chunks(AsyncIterator[bytes]):
    """The bytes of a call until END. Abandoning it (`aclose`) cancels the call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def __anext__(self) -> bytes:
        with self._call.cancelled_on_failure():
            chunk = await self._call.read()
        if not chunk:
            self._call.done()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        with self._call:
            pass


class EntryReader:
    """Cuts a stream of `u32 length · fields` into entries."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Complete entries. Raises FieldError for one that cannot be."""
        self._buffer += chunk
        position = 0
        while len(self._buffer) - position >= 4:
            length = int.from_bytes(self._buffer[position : position + 4], "little")
            if length > _MAX_ENTRY:
                raise FieldError(f"an entry of {length} bytes")
            if len(self._buffer) - position - 4 < length:
                break
            yield bytes(self._buffer[position + 4 : position + 4 + length])
            position += 4 + length
        del self._buffer[:position]


class FileCalls(ABC):
    """Mixed into Channel."""

    @abstractmethod
    def _call(self, frame_type: int, fields: bytes) -> Call: ...

    def _fs(self, op: str, path: str, user: str, *more: tuple[int, FieldValue]) -> Call:
        fields = [(protocol.T_OP, op), (protocol.T_PATH, path), (protocol.T_USER, user), *more]
        return self._call(protocol.FS, pack_fields(fields))

    async def _simple(self, op: str, path: str, user: str, *more: tuple[int, FieldValue]) -> bytes:
        with self._fs(op, path, user, *more) as call:
            answer = await call.answer()
            call.done()
            return answer

    async def stat(self, path: str, *, user: str = "") -> GuestStat:
        return _decoded_stat(await self._simple("stat", path, user), path)

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, user: str = "") -> None:
        await self._simple("mkdir", path, user, (protocol.T_MODE, mode), (protocol.T_FLAGS, int(parents)))

    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "") -> None:
        await self._simple("move", path, user, (protocol.T_TARGET, target), (protocol.T_FLAGS, int(not overwrite)))

    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None:
        await self._simple("remove", path, user, (protocol.T_FLAGS, int(recursive)))

    async def chmod(self, path: str, mode: int, *, user: str = "") -> None:
        await self._simple("chmod", path, user, (protocol.T_MODE, mode))

    async def list_dir(self, path: str, *, user: str = "") -> list[GuestStat]:
        entries: list[GuestStat] = []
        reader = EntryReader()
        chunks = Chunks(self._fs("list", path, user))
        try:
            async for chunk in chunks:
                entries += [_decoded_stat(entry, "") for entry in _entries(reader, chunk)]
                if len(entries) > MAX_LISTED:
                    raise GuestError("file", f"{path} has more than {MAX_LISTED} entries", errno.EOVERFLOW)
        finally:
            await chunks.aclose()
        return entries

    async def open_read(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> tuple[GuestStat, AsyncIterator[bytes]]:
        more: list[tuple[int, FieldValue]] = [(protocol.T_OFFSET, offset)]
        if length is not None:
            more.append((protocol.T_LENGTH, length))
        call = self._fs("read", path, user, *more)
        with call.cancelled_on_failure():
            stat = _decoded_stat(await call.answer(), path)
        return stat, Chunks(call)

    async def _upload(self, call: Call, chunks: AsyncIterator[bytes]) -> bytes:
        with call:
            async for chunk in chunks:
                await call.write(chunk)
            call.write_eof()
            answer = await call.answer()
            call.done()
            return answer

    async def write_file(
        self, path: str, chunks: AsyncIterator[bytes], *, mode: int | None = None, parents: bool = False, user: str = ""
    ) -> GuestStat:
        more: list[tuple[int, FieldValue]] = [(protocol.T_FLAGS, int(parents))]
        if mode is not None:
            more.append((protocol.T_MODE, mode))
        return _decoded_stat(await self._upload(self._fs("write", path, user, *more), chunks), path)

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, user: str = "") -> tuple[int, int]:
        answer = await self._upload(self._fs("unpack", path, user), chunks)
        try:
            fields = protocol.unpack_fields(answer)
            return protocol.unsigned(fields, protocol.T_COUNT), protocol.unsigned(fields, protocol.T_SIZE)
        except FieldError as exc:
            raise GuestError("protocol", f"the guest agent's answer: {exc}") from exc

    def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        return Chunks(self._fs("pack", path, user))

    async def watch(self, path: str, *, recursive: bool = False, user: str = "") -> AsyncIterator[tuple[str, str]]:
        reader = EntryReader()
        call = self._fs("watch", path, user, (protocol.T_FLAGS, int(recursive)))
        with call:
            await call.answer()
            while chunk := await call.read():
                for entry in _entries(reader, chunk):
                    yield _decoded_event(entry)
            raise GuestLostError("the watch ended by itself")


def _entries(reader: EntryReader, chunk: bytes) -> Iterator[bytes]:
    try:
        yield from reader.feed(chunk)
    except FieldError as exc:
        raise GuestError("protocol", f"the guest agent's answer: {exc}") from exc


def _decoded_stat(data: bytes, path: str) -> GuestStat:
    try:
        return protocol.decode_stat(data, path)
    except FieldError as exc:
        raise GuestError("protocol", f"the guest agent's answer: {exc}") from exc


def _decoded_event(data: bytes) -> tuple[str, str]:
    try:
        return protocol.decode_event(data)
    except FieldError as exc:
        raise GuestError("protocol", f"the guest agent's answer: {exc}") from exc
