"""A platform from memory on a real loopback socket, for tests of the SDK: it speaks `wire.contracts` and breaks on
request.

It runs in a thread with a loop of its own, so that the async and the sync SDK meet the same server. Commands are
`Program`s the
test has put in `programs` under the script's text. A `Fault` makes matching answers late, cut, doubled, refused or
malformed.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from opendsec import errors
from opendsec.model.command import CommandResult, CommandStatus, EndReason, ExecRequest
from opendsec.model.file import FileEvent, FileEventKind, FileKind, FileStat
from opendsec.model.ids import CommandId, new_sandbox_id
from opendsec.model.node import SandboxEnd, SandboxState, SandboxStatus
from opendsec.wire import codec, contracts
from opendsec.wire.frames import pack_frame

Answer = tuple[int, str, AsyncIterator[bytes]]
KEEPALIVE_S = 0.1
KEY = "test-key"


@dataclass
class Program:
    """What a script does here."""

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int | None = 0
    end_reason: EndReason = EndReason.EXITED
    copies_stdin: bool = False
    holds: bool = False
    """Runs until it is killed."""
    ignores_stdin: errors.OpenDSecError | None = None
    """The refusal of a program that does not read it."""
    total_extra: int = 0
    """So many bytes of stdout more were written than kept; honest only together with `truncated`."""
    truncated: bool = False
    early_result: bool = False
    """The result is sent before the output."""


@dataclass
class Fault:
    """Applied to the next `times` requests whose `METHOD path` matches."""

    match: str
    times: int = 1
    kind: str = "cut"
    """cut (after `after` body bytes), refuse (`status`), swallow (act, never answer), garble (flip a bit of the
    body), mute
    (send `after` bytes, then nothing), double (each piece of an exec stream twice)."""
    after: int = 0
    status: int = 503


@dataclass
class Command:
    """One command and all it wrote."""

    id: str
    program: Program
    request: ExecRequest
    stdin: bytearray = field(default_factory=bytearray)
    stdin_closed: bool = False
    result: CommandResult | None = None
    killed: bool = False
    runs: int = 1


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    query: list[tuple[str, str]]
    headers: dict[str, str]
    body: bytes = b""

    def get(self, name: str, default: str = "") -> str:
        """A query parameter."""
        return dict(self.query).get(name, default)


class Cut(Exception):
    """Drop the connection now."""


class FakeServer:
    """See the module. `url` is where it listens."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.sandboxes: dict[str, SandboxStatus] = {}
        self.commands: dict[str, Command] = {}
        self.files: dict[str, bytes] = {}
        self.tree = b""
        self.piece_bytes = 64 * 1024
        self.batch_failures: dict[int, errors.OpenDSecError] = {}
        self.forgets_stdin = False
        self.orphans = 0
        """So many creates find their sandbox ended, because an earlier answer was lost."""
        self.connections = 0
        self.url = ""
        self._creates: dict[str, tuple[bytes, Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._stop: asyncio.Event | None = None

    def count(self, method: str, pattern: str) -> int:
        """How many requests came with this method and a path that matches."""
        return sum(r.method == method and re.search(pattern, r.path) is not None for r in self.requests)

    async def serve(self, ready: threading.Event, unix_path: str | None, tls: ssl.SSLContext | None) -> None:
        """Listen until `stop`."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if unix_path is not None:
            server = await asyncio.start_unix_server(self._connection, unix_path)
            self.url = f"unix:{unix_path}"
        else:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=tls)
            self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stop.wait()
        server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    def stop(self) -> None:
        """From any thread."""
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                await self._respond(request, writer)
        except (Cut, ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, request: Request, writer: asyncio.StreamWriter) -> None:
        fault = self._fault_for(request)
        if fault is not None and fault.kind == "refuse":
            status, media, body = fault.status, "text/plain", _once(b"try later")
        else:
            status, media, body = await self._answer(request)
        if fault is not None and fault.kind == "swallow":
            raise Cut
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {media}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        async for data in _broken(body, fault):
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _fault_for(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.match, f"{request.method} {request.path}"):
                fault.times -= 1
                return fault
        return None

    async def _answer(self, request: Request) -> Answer:
        try:
            if request.path != "/healthz" and request.headers.get("authorization") != f"Bearer {KEY}":
                raise errors.UnauthorizedError("no API key, or a wrong one")
            return await self._route(request)
        except errors.OpenDSecError as error:
            return error.http_status, "application/json", _once(codec.encode_error(error))

    async def _route(self, request: Request) -> Answer:
        parts = [unquote(part) for part in request.path.split("/")[2:]]
        match request.method, parts:
            case "GET", []:
                return 200, "text/plain", _once(b"ok")
            case "POST", ["sandboxes"]:
                return self._create(request)
            case "POST", ["sandbox-batches"]:
                return 200, contracts.NDJSON_MEDIA_TYPE, self._batch(request)
            case "POST", ["sandbox-batches", "abandon"]:
                return self._abandon(request)
            case "GET", ["sandboxes"]:
                return _json(self._page(request))
            case "GET", ["images"]:
                return _json(contracts.ImagePage(items=()))
            case _, ["sandboxes", sandbox_id, *rest]:
                return await self._of_sandbox(request, sandbox_id, rest)
            case _:
                pass
        raise errors.NotFoundError(f"no route for {request.method} {request.path}")

    def _create(self, request: Request) -> Answer:
        wanted = codec.decode(request.body, contracts.CreateRequest)
        if self.orphans > 0:
            self.orphans -= 1
            raise errors.SandboxExitedError("the sandbox has ended: stopped", detail={"end_reason": "stopped"})
        status = self._remembered(request, lambda: self._new_sandbox(wanted.spec))
        return _json(status, 201)

    def _remembered(self, request: Request, make: Callable[[], Any]) -> Any:
        key = request.headers["idempotency-key"]
        if key not in self._creates:
            self._creates[key] = (request.body, make())
        body, made = self._creates[key]
        if body != request.body:
            raise errors.ConflictError("this idempotency key came with another body")
        return made

    def _new_sandbox(self, spec: Any) -> SandboxStatus:
        if spec.image == "missing":
            raise errors.ImageNotFoundError("no image 'missing'", detail={"field": "image"})
        sandbox_id = new_sandbox_id("local")
        status = SandboxStatus(
            sandbox_id=sandbox_id, project="p", edge="local", state=SandboxState.RUNNING, spec=spec, created_at=1.0
        )
        self.sandboxes[sandbox_id] = status
        return status

    async def _batch(self, request: Request) -> AsyncIterator[bytes]:
        wanted = codec.decode(request.body, contracts.BatchRequest)
        made = self._remembered(request, lambda: [self._new_sandbox(wanted.spec) for _ in range(wanted.count)])
        for index in reversed(range(wanted.count)):
            failure = self.batch_failures.get(index)
            item = (
                contracts.BatchItem(index=index, status=made[index])
                if failure is None
                else contracts.BatchItem(index=index, error=codec.error_fields(failure))
            )
            yield codec.encode(item) + b"\n"
        yield codec.encode(contracts.BatchItem(done=True)) + b"\n"

    def _abandon(self, request: Request) -> Answer:
        keep = codec.decode(request.body, contracts.AbandonRequest).keep
        _, made = self._creates[request.headers["idempotency-key"]]
        for index, status in enumerate(made):
            if index not in keep:
                del self.sandboxes[status.sandbox_id]
        return _json(contracts.Empty())

    def _page(self, request: Request) -> contracts.SandboxPage:
        labels = [value.split("=", 1) for name, value in request.query if name == "label"]
        found = [
            status
            for status in self.sandboxes.values()
            if all(status.spec.labels.get(key) == value for key, value in labels)
            and request.get("state", status.state) == status.state
        ]
        start, limit = int(request.get("cursor", "0")), int(request.get("limit", "2"))
        after = start + limit
        return contracts.SandboxPage(items=tuple(found[start:after]), cursor=str(after) if after < len(found) else "")

    async def _of_sandbox(self, request: Request, sandbox_id: str, rest: list[str]) -> Answer:
        status = self.sandboxes.get(sandbox_id)
        if status is None:
            raise errors.NotFoundError(f"no sandbox {sandbox_id}")
        match request.method, rest:
            case "DELETE", []:
                status = replace(status, state=SandboxState.STOPPED, end_reason=SandboxEnd.STOPPED)
                self.sandboxes[sandbox_id] = status
            case "PATCH", []:
                change = codec.decode(request.body, contracts.UpdateRequest)
                spec = replace(status.spec, lifetime=change.lifetime or status.spec.lifetime)
                status = replace(status, spec=spec)
                self.sandboxes[sandbox_id] = status
            case _, ["commands", *below]:
                return self._commands(request, below)
            case _, ["files", verb]:
                return self._files(request, verb)
            case _:
                pass
        return _json(status)

    def _commands(self, request: Request, rest: list[str]) -> Answer:
        match request.method, rest:
            case "POST", []:
                command = self._start(codec.decode(request.body, ExecRequest))
                if request.get("detach") == "true":
                    return _json(_status(command), 201)
                return 200, contracts.STREAM_MEDIA_TYPE, self._follow(command, 0, 0)
            case "GET", []:
                return _json(contracts.CommandList(items=tuple(_status(c) for c in self.commands.values())))
            case _:
                pass
        command = self.commands.get(rest[0])  # type: ignore[assignment]
        if command is None:
            raise errors.NotFoundError(f"no command {rest[0]}")
        match request.method, rest[1:]:
            case "DELETE", []:
                command.killed = True
            case "GET", ["output"]:
                offsets = int(request.get("stdout", "0")), int(request.get("stderr", "0"))
                return 200, contracts.STREAM_MEDIA_TYPE, self._follow(command, *offsets)
            case "POST", ["stdin"]:
                status = _take_stdin(command, request)
                if self.forgets_stdin:
                    command.stdin.clear()
                return _json(status)
            case _:
                pass
        return _json(_status(command))

    def _start(self, wanted: ExecRequest) -> Command:
        for known in self.commands.values():
            if wanted.operation_id is not None and known.request.operation_id == wanted.operation_id:
                if known.request != wanted:
                    raise errors.ConflictError("this operation id came with another request")
                return known
        script = wanted.script if wanted.script is not None else " ".join(wanted.argv)
        command = Command(f"cmd-{len(self.commands) + 1}", self.programs.get(script, Program()), wanted)
        self.commands[command.id] = command
        return command

    async def _follow(self, command: Command, stdout: int, stderr: int) -> AsyncIterator[bytes]:
        yield pack_frame(contracts.EXEC_STARTED, 0, codec.encode(_status(command)))
        program = command.program
        waited = 0.0
        while (program.holds and not command.killed) or (program.copies_stdin and not command.stdin_closed):
            await asyncio.sleep(0.01)
            waited += 0.01
            if waited >= KEEPALIVE_S:
                waited = 0.0
                yield pack_frame(contracts.EXEC_KEEPALIVE, 0)
        out = bytes(command.stdin) if program.copies_stdin else program.stdout
        result = pack_frame(contracts.EXEC_RESULT, 0, codec.encode(_result(command, out)))
        if program.early_result:
            yield result
        for kind, data, offset in (
            (contracts.EXEC_STDOUT, out, stdout),
            (contracts.EXEC_STDERR, program.stderr, stderr),
        ):
            for start in range(offset, len(data), self.piece_bytes):
                piece = data[start : start + self.piece_bytes]
                yield pack_frame(kind, 0, struct.pack("<Q", start) + piece)
        yield result

    def _files(self, request: Request, verb: str) -> Answer:
        path = request.get("path")
        match request.method, verb:
            case "GET", "content":
                offset, length = int(request.get("offset", "0")), request.get("length")
                data = self._file(path)[offset:]
                return 200, "application/octet-stream", _pieces(data[: int(length)] if length else data)
            case "PUT", "content":
                self.files[path] = request.body
                return _json(self._stat(path))
            case "GET", "tree":
                return 200, contracts.TREE_MEDIA_TYPE, _pieces(self.tree)
            case "PUT", "tree":
                self.tree = request.body
                return _json(contracts.TreeStatus(files=1, bytes=len(request.body)))
            case "GET", "watch":
                event = FileEvent(kind=FileEventKind.CREATED, path=path + "/new")
                return 200, contracts.NDJSON_MEDIA_TYPE, _once(codec.encode(event) + b"\n")
            case _:
                pass
        return self._file_verb(verb, codec.decode(request.body, contracts.FileRequest))

    def _file_verb(self, verb: str, wanted: contracts.FileRequest) -> Answer:
        match verb:
            case "stat":
                return _json(self._stat(wanted.path))
            case "list":
                below = [self._stat(path) for path in sorted(self.files) if path.startswith(wanted.path)]
                return _json(contracts.FileList(items=tuple(below)))
            case "remove":
                self._file(wanted.path)
                del self.files[wanted.path]
            case "move":
                self.files[wanted.target or ""] = self._file(wanted.path)
                del self.files[wanted.path]
            case _:
                pass
        return _json(contracts.Empty())

    def _file(self, path: str) -> bytes:
        if path not in self.files:
            raise errors.FileError(f"no such file: {path}", detail={"errno": "ENOENT", "path": path})
        return self.files[path]

    def _stat(self, path: str) -> FileStat:
        if path == "/tree":
            return FileStat(path=path, kind=FileKind.DIRECTORY, mode=0o755, size_bytes=0, mtime_s=0.0, uid=0, gid=0)
        size = len(self._file(path))
        return FileStat(path=path, kind=FileKind.FILE, mode=0o644, size_bytes=size, mtime_s=0.0, uid=0, gid=0)


@contextmanager
def running(unix_path: str | None = None, tls: ssl.SSLContext | None = None) -> Iterator[FakeServer]:
    """A server for the length of a `with` block."""
    server, ready = FakeServer(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(ready, unix_path, tls)))
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, where, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    parts = urlsplit(where)
    query = parse_qsl(parts.query, keep_blank_values=True, errors="surrogateescape")
    return Request(method, parts.path, query, headers, await _read_body(reader, headers))


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return bytes(body)


def _take_stdin(command: Command, request: Request) -> contracts.StdinStatus:
    offset = int(request.get("offset", "0"))
    if command.program.ignores_stdin is not None:
        raise command.program.ignores_stdin
    if offset > len(command.stdin):
        raise errors.ConflictError("a gap in stdin", detail={"field": "offset"})
    command.stdin += request.body[len(command.stdin) - offset :]
    command.stdin_closed = command.stdin_closed or request.get("eof") == "true"
    return contracts.StdinStatus(accepted=len(command.stdin), closed=command.stdin_closed)


def _status(command: Command) -> CommandStatus:
    summary = (command.request.script or "")[:200]
    return CommandStatus(command_id=CommandId(command.id), summary=summary, started_at=1.0, running=True)


def _result(command: Command, out: bytes) -> CommandResult:
    program = command.program
    return CommandResult(
        command_id=CommandId(command.id),
        exit_code=None if command.killed else program.exit_code,
        end_reason=EndReason.CANCELLED if command.killed else program.end_reason,
        duration_s=0.01,
        stdout_bytes_total=len(out) + program.total_extra,
        stderr_bytes_total=len(program.stderr),
        truncated=program.truncated,
    )


def _json(value: object, status: int = 200) -> Answer:
    return status, "application/json", _once(codec.encode(value))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 256 * 1024):
        yield data[start : start + 256 * 1024]


async def _broken(body: AsyncIterator[bytes], fault: Fault | None) -> AsyncIterator[bytes]:
    sent = 0
    async for data in body:
        if fault is not None and fault.kind in {"cut", "mute"} and sent + len(data) >= fault.after:
            if first := data[: fault.after - sent]:
                yield first
            await asyncio.sleep(3600 if fault.kind == "mute" else 0.05)
            raise Cut
        sent += len(data)
        if fault is not None and fault.kind == "garble":
            yield data[:10] + b"\xff\xff" + data[12:]
            continue
        yield data
        if fault is not None and fault.kind == "double":
            yield data
