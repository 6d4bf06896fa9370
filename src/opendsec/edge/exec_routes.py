"""Commands over HTTP: start, follow, feed, signal, end. Raw ASGI, because every agent turn passes here.

An exec stream begins when the guest has answered (or after a second, when a session is busy), so a command that can
not be started is still a proper HTTP error. A client that leaves ends nothing but its own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Iterator

from opendsec import errors
from opendsec.edge import outcome
from opendsec.edge.command import Command
from opendsec.edge.commands import CommandBook
from opendsec.edge.node import Node
from opendsec.edge.recorder import OutputStream
from opendsec.edge.requests import flag, integer, nothing_else, number, project_of
from opendsec.edge.sandbox import Sandbox
from opendsec.guest.base import Guest, GuestError
from opendsec.model.command import ExecRequest, PtySize, check_exec
from opendsec.server.asgi import Receive, Scope, Send, query, read_body, send_json
from opendsec.server.streams import while_uploading
from opendsec.wire import codec
from opendsec.wire.contracts import (
    EXEC_ERROR,
    EXEC_KEEPALIVE,
    EXEC_RESULT,
    EXEC_STARTED,
    EXEC_STDERR,
    EXEC_STDOUT,
    KEEPALIVE_S,
    MAX_JSON_BODY,
    STREAM_MEDIA_TYPE,
    CommandList,
    SignalRequest,
)
from opendsec.wire.frames import pack_frame, pack_header

START_WAIT_S = 1.0
"""So long an answer waits for the guest's word on a start; then the stream begins without it."""
GATHER_S = 0.005
"""So long EXEC_STARTED waits for company: a short command is answered in one piece."""
LOOK_EVERY = 32
"""Chunks between two looks whether the client is still there."""
_OFFSET = struct.Struct("<Q")
_HEAD = [(b"content-type", STREAM_MEDIA_TYPE.encode("ascii"))]


class ExecRoutes:
    """`/v1/sandboxes/{id}/commands…`"""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def start(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST commands"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        asked = query(scope)
        detach = flag(asked, "detach")
        nothing_else(asked)
        body = await read_body(scope, receive, limit=MAX_JSON_BODY)
        command = await sandbox.submit(check_exec(codec.decode(body, ExecRequest)))
        if not detach:
            await self._follow(sandbox, command, (0, 0), receive, send)
            return
        sandbox.used()
        event = command.watch()
        try:
            await _await_start(command, event)
        finally:
            command.unwatch(event)
        await send_json(send, command.status(), status=201)

    async def list(self, sandbox_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET commands"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        await send_json(send, CommandList(items=tuple(one.status() for one in sandbox.commands.all())))

    async def get(self, sandbox_id: str, command_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET commands/{cid}"""
        _, command = self._find(sandbox_id, command_id, scope)
        await send_json(send, command.status())

    async def output(self, sandbox_id: str, command_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """GET commands/{cid}/output"""
        sandbox, command = self._find(sandbox_id, command_id, scope)
        asked = query(scope)
        offsets = (integer(asked, "stdout") or 0, integer(asked, "stderr") or 0)
        nothing_else(asked)
        await self._follow(sandbox, command, offsets, receive, send)

    async def stdin(self, sandbox_id: str, command_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST commands/{cid}/stdin"""
        sandbox, command = self._find(sandbox_id, command_id, scope)
        asked = query(scope)
        offset, eof = integer(asked, "offset"), flag(asked, "eof")
        nothing_else(asked)
        async with sandbox.working():
            status = await while_uploading(
                receive, lambda chunks: sandbox.commands.write_stdin(command, offset, chunks, eof=eof)
            )
        await send_json(send, status)

    async def signal(self, sandbox_id: str, command_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST commands/{cid}/signal"""
        sandbox, command = self._find(sandbox_id, command_id, scope)
        signal = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), SignalRequest).signal
        if not 1 <= signal <= 64:
            raise errors.InvalidSpecError(f"signal: {signal} is not between 1 and 64", detail={"field": "signal"})
        async with sandbox.working():
            guest = await _carried(command)
            with _refusals():
                await guest.signal(command.number, signal)
        await send_json(send, command.status())

    async def resize(self, sandbox_id: str, command_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST commands/{cid}/resize"""
        sandbox, command = self._find(sandbox_id, command_id, scope)
        size = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), PtySize)
        if not (0 < size.rows <= 65535 and 0 < size.cols <= 65535):
            raise errors.InvalidSpecError("rows: rows and cols are between 1 and 65535", detail={"field": "rows"})
        if command.request.pty is None:
            raise errors.ConflictError("this command has no terminal", remedy="start it with pty")
        async with sandbox.working():
            guest = await _carried(command)
            with _refusals():
                await guest.resize(command.number, size.rows, size.cols)
        await send_json(send, command.status())

    async def end(self, sandbox_id: str, command_id: str, scope: Scope, _receive: Receive, send: Send) -> None:
        """DELETE commands/{cid}; one that has ended stays as it is."""
        sandbox, command = self._find(sandbox_id, command_id, scope)
        asked = query(scope)
        text = asked.pop("grace", None)
        grace_s = command.request.grace_s if text is None else number(text, "grace", most=3600.0)
        nothing_else(asked)
        if not command.done:
            async with sandbox.working():
                guest = await command.carried()
                if guest is not None:
                    with _refusals():
                        await guest.kill(command.number, round(grace_s * 1000))
        await send_json(send, command.status())

    def _find(self, sandbox_id: str, command_id: str, scope: Scope) -> tuple[Sandbox, Command]:
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        return sandbox, sandbox.commands.get(command_id)

    async def _follow(
        self, sandbox: Sandbox, command: Command, offsets: tuple[int, int], receive: Receive, send: Send
    ) -> None:
        sandbox.used()
        event = command.watch()
        try:
            await _await_start(command, event)
            await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
            await _Follower(sandbox.commands, command, offsets, receive, send).run(event)
        finally:
            command.unwatch(event)
            sandbox.used()


class _Follower:
    """Sends one command's frames from given offsets until its end, no faster than the client reads."""

    def __init__(
        self, book: CommandBook, command: Command, offsets: tuple[int, int], receive: Receive, send: Send
    ) -> None:
        self._book = book
        self._command = command
        self._at = {EXEC_STDOUT: offsets[0], EXEC_STDERR: offsets[1]}
        self._streams = {EXEC_STDOUT: command.stdout, EXEC_STDERR: command.stderr}
        self._receive = receive
        self._send = send
        self._parts: list[bytes | memoryview] = []

    async def run(self, event: asyncio.Event) -> None:
        command = self._command
        self._parts.append(pack_frame(EXEC_STARTED, 0, codec.encode(command.status())))
        until = time.monotonic() + GATHER_S
        while not command.done:
            event.clear()
            if not await _waited(event, until - time.monotonic()):
                break
        chunks = 0
        while True:
            event.clear()
            done = command.done
            while await self._gather():
                await self._flush(more=True)
                chunks += 1
                if chunks % LOOK_EVERY == 0 and await _gone(self._receive):
                    return
            if done:
                self._parts.append(_last_frame(command))
                await self._flush(more=False)
                return
            await self._flush(more=True)
            if not await _waited(event, KEEPALIVE_S):
                if await _gone(self._receive):
                    return
                self._parts.append(pack_frame(EXEC_KEEPALIVE, 0))

    async def _gather(self) -> bool:
        """Take one chunk of each stream; whether there may be more worth a flush of its own."""
        large = False
        for kind, stream in self._streams.items():
            large = await self._take(kind, stream) >= 65536 or large
        return large

    async def _take(self, kind: int, stream: OutputStream) -> int:
        at = self._at[kind]
        data = await self._book.read(self._command, stream, at)
        if data:
            self._parts.append(pack_header(kind, 0, _OFFSET.size + len(data)) + _OFFSET.pack(at))
            self._parts.append(data)
            self._at[kind] = at + len(data)
            # What is in memory may be a small first part of more.
            return 65536 if self._at[kind] < stream.kept else len(data)
        return 0

    async def _flush(self, *, more: bool) -> None:
        if self._parts or not more:
            body = b"".join(self._parts)
            self._parts.clear()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _last_frame(command: Command) -> bytes:
    if command.result is not None:
        return pack_frame(EXEC_RESULT, 0, codec.encode(command.result))
    assert command.error is not None
    return pack_frame(EXEC_ERROR, 0, codec.encode_error(command.error))


async def _await_start(command: Command, event: asyncio.Event) -> None:
    """Until the guest has answered, the command has ended, or a second has passed. Raises what forbade the start."""
    until = time.monotonic() + START_WAIT_S
    while not command.given and not command.done:
        event.clear()
        if not await _waited(event, until - time.monotonic()):
            return
    if command.error is not None:
        # A copy: what becomes of it on its way out (request id, traceback) is this request's alone.
        raise codec.error_from_fields(codec.error_fields(command.error))


async def _waited(event: asyncio.Event, seconds: float) -> bool:
    """Whether it was set in time."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _gone(receive: Receive) -> bool:
    """Whether the client has closed the connection, without waiting."""
    try:
        async with asyncio.timeout(0):
            return bool((await receive())["type"] == "http.disconnect")
    except TimeoutError:
        return False


async def _carried(command: Command) -> Guest:
    """The connection on which its guest knows it. Raises ConflictError when it has ended, SandboxLostError."""
    guest = await command.carried()
    if guest is None:
        raise errors.ConflictError("the command has ended", detail={"command_id": command.command_id})
    return guest


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """The guest's refusals as errors of ours."""
    try:
        yield
    except GuestError as exc:
        raise outcome.refusal(exc) from exc
