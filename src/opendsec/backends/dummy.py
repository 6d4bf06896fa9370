"""An in-memory backend, for our tests and for users': no kernel, no root, no files; the same interface and the same
promises.

What runs inside is the small language of `dummy_shell`, so results are real (exit codes, output, timeouts, kills,
sessions, files), only the machine is not. Any image is accepted and none is looked at. Port 7 answers with what it
is sent; every other port refuses. `recover` works for as long as the `DummyBackend` object lives, so a test can end
one edge and start another on the same backend object.

Refuses (not in `capabilities`): terminals, network, CPU limits. A snapshot holds files and sessions, and no running
commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from opendsec.backends import dummy_snapshot
from opendsec.backends.base import Backend, Capability, Handle, Parked, Running, StartPlan, Usage
from opendsec.backends.dummy_files import FileTree, Watch
from opendsec.backends.dummy_machine import Machine
from opendsec.errors import UnsupportedError
from opendsec.guest.base import (
    CHUNK_BYTES,
    CommandEvent,
    Exit,
    Guest,
    GuestError,
    GuestLostError,
    GuestStat,
    GuestStream,
    KnownCommand,
    StartCommand,
)
from opendsec.model.ids import SandboxId
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind

MIB = 1024 * 1024
ECHO_PORT = 7
CAPABILITIES = frozenset(
    {
        Capability.EXEC,
        Capability.SESSIONS,
        Capability.FILES,
        Capability.MEMORY_LIMIT,
        Capability.PIDS_LIMIT,
        Capability.DISK_LIMIT,
        Capability.PAUSE,
        Capability.RECOVER,
        Capability.SNAPSHOT,
        Capability.PORTS,
    }
)
_FIELD = struct.Struct("<HHI")
_TAGS = {"PATH": 31, "MODE": 33, "SIZE": 36, "MTIME_NS": 37, "KIND": 40, "LINK": 41, "NAME": 42}


class DummyBackend(Backend):
    """Sandboxes that exist only in this object."""

    kind = BackendKind.DUMMY
    offers = CAPABILITIES

    def __init__(self, *, parks: bool = False) -> None:
        """`parks`: pausing ends the connection, as with a virtual machine that is saved and ended."""
        self.parks = parks
        self._machines: dict[SandboxId, Machine] = {}

    @property
    def capabilities(self) -> frozenset[Capability]:
        return CAPABILITIES

    async def open(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Sandboxes stay, as with every backend."""

    def report(self) -> BackendReport:
        names = tuple(sorted(capability.value for capability in CAPABILITIES))
        return BackendReport(
            available=True, capabilities=names, live=len(self._machines), binding=dummy_snapshot.BINDING
        )

    async def start(self, plan: StartPlan) -> Running:
        resources = plan.spec.resources
        machine = Machine(
            memory_limit_bytes=None if resources.memory_limit_mb is None else resources.memory_limit_mb * MIB,
            pids_limit=resources.pids_limit,
            disk_limit_bytes=None if resources.disk_limit_mb is None else resources.disk_limit_mb * MIB,
        )
        if plan.snapshot is not None:
            dummy_snapshot.load(machine, plan.snapshot)
        self._machines[plan.sandbox_id] = machine
        handle = Handle(backend=self.kind, sandbox_id=plan.sandbox_id, data={"slot": plan.slot})
        return Running(handle=handle, guest=DummyGuest(machine))

    async def recover(self, handle: Handle) -> Running | Parked | None:
        machine = self._machines.get(handle.sandbox_id)
        if machine is not None and machine.frozen and self.parks:
            return Parked(handle=handle)
        guest = await self.reconnect(handle)
        return None if guest is None else Running(handle=handle, guest=guest)

    async def reconnect(self, handle: Handle) -> Guest | None:
        machine = self._machines.get(handle.sandbox_id)
        if machine is None or machine.ended.is_set():
            return None
        if machine.frozen and self.parks:
            raise GuestLostError("nothing of this sandbox runs")
        return DummyGuest(machine)

    async def pause(self, handle: Handle) -> None:
        machine = self._machine(handle)
        machine.frozen = True
        if self.parks:
            machine.disconnect(machine.live_connection)

    async def resume(self, handle: Handle) -> None:
        self._machine(handle).thaw()

    async def snapshot(self, handle: Handle, target: Path) -> None:
        dummy_snapshot.save(self._machine(handle), target)

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        machine = self._machines.get(handle.sandbox_id)
        if machine is not None:
            machine.end()

    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        machine = self._machines.pop(sandbox_id, None)
        if machine is not None:
            machine.end()

    def usage(self, handle: Handle) -> Usage:
        machine = self._machines.get(handle.sandbox_id)
        if machine is None:
            return Usage()
        return Usage(
            memory_bytes=machine.memory_bytes(),
            oom_kills=machine.oom_kills,
            pids_denied=machine.pids_denied,
            disk_full=machine.files.full(),
        )

    def _machine(self, handle: Handle) -> Machine:
        machine = self._machines.get(handle.sandbox_id)
        if machine is None:
            raise UnsupportedError("this sandbox is gone", sandbox_id=handle.sandbox_id)
        return machine


@contextlib.contextmanager
def _file_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GuestError("file", f"{error.filename}: {error.strerror}", error.errno or 0) from error


class DummyGuest(Guest):
    """One connection to a dummy sandbox. A new one ends the one before, as with the real agent."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ended = machine.connect()

    def _check(self) -> FileTree:
        if self._ended.is_set():
            raise GuestLostError("the connection to the dummy sandbox has ended")
        return self._machine.files

    async def ping(self) -> float:
        begin = time.monotonic()
        self._check()
        return time.monotonic() - begin

    async def start(self, command_id: int, command: StartCommand) -> int:
        self._check()
        return await self._machine.start(command_id, command, self._ended)

    async def events(self, command_id: int) -> AsyncIterator[CommandEvent]:
        command = self._machine.command(command_id)
        if not command.attached:
            raise GuestError("no_command", f"command {command_id} is not attached on this connection")
        while True:
            command.changed.clear()
            self._check()
            event = command.next_event()
            if event is None:
                await command.changed.wait()
                continue
            yield event
            if isinstance(event, Exit):
                return

    def ack(self, command_id: int, stdout: int, stderr: int) -> None:
        command = self._machine.commands.get(command_id)
        if command is not None and not self._ended.is_set():
            command.acknowledge(stdout, stderr)

    async def attach(self, command_id: int, stdout: int, stderr: int) -> None:
        self._check()
        self._machine.command(command_id).attach(stdout, stderr)

    async def write_stdin(self, command_id: int, offset: int, data: bytes, *, eof: bool) -> None:
        self._check()
        command = self._machine.command(command_id)
        view = memoryview(data)
        while True:
            while command.stdin_room() <= 0:
                command.changed.clear()
                await command.changed.wait()
                self._check()
            part = bytes(view[: max(command.stdin_room(), 0)])
            view = view[len(part) :]
            command.feed(offset, part, eof=eof and not view)
            offset += len(part)
            if not view:
                return

    async def kill(self, command_id: int, grace_ms: int) -> None:
        self._check()
        command = self._machine.commands.get(command_id)
        if command is not None:
            command.kill(grace_ms)

    async def signal(self, command_id: int, signal: int) -> None:
        self._check()
        self._machine.command(command_id).end_by(signal)

    async def resize(self, command_id: int, rows: int, cols: int) -> None:
        raise GuestError("unsupported", "the dummy backend has no terminals")

    def release(self, command_id: int) -> None:
        command = self._machine.commands.get(command_id)
        if command is not None and command.exit is not None:
            del self._machine.commands[command_id]

    async def list_commands(self) -> list[KnownCommand]:
        self._check()
        return [
            KnownCommand(
                id=command_id,
                pid=command.pid,
                ended=command.exit is not None,
                stdout_base=command.streams[1].base,
                stderr_base=command.streams[2].base,
                stdout_total=command.streams[1].total,
                stderr_total=command.streams[2].total,
            )
            for command_id, command in self._machine.commands.items()
        ]

    async def end_session(self, name: str) -> None:
        self._check()
        self._machine.end_session(name)

    async def stat(self, path: str, *, user: str = "") -> GuestStat:
        with _file_errors():
            return self._check().stat(path)

    async def list_dir(self, path: str, *, user: str = "") -> list[GuestStat]:
        with _file_errors():
            return self._check().list(path)

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, user: str = "") -> None:
        with _file_errors():
            self._check().mkdir(path, mode=mode, parents=parents)

    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "") -> None:
        with _file_errors():
            self._check().move(path, target, overwrite=overwrite)

    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None:
        with _file_errors():
            self._check().remove(path, recursive=recursive)

    async def chmod(self, path: str, mode: int, *, user: str = "") -> None:
        with _file_errors():
            self._check().node(path).mode = mode

    async def open_read(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> tuple[GuestStat, AsyncIterator[bytes]]:
        with _file_errors():
            node = self._check().node(path)
            if node.kind != "file":
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        end = len(node.data) if length is None else offset + length
        return FileTree.fields(node, path), self._chunks(node.data[offset:end])

    async def write_file(
        self, path: str, chunks: AsyncIterator[bytes], *, mode: int | None = None, parents: bool = False, user: str = ""
    ) -> GuestStat:
        data = b"".join([chunk async for chunk in chunks])
        with _file_errors():
            return FileTree.fields(self._check().write(path, data, mode=mode, parents=parents), path)

    async def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        with _file_errors():
            files = self._check()
            entries = list(files.walk(files.directory(path)))
        for name, node in entries:
            fields: list[tuple[str, str | int]] = [("KIND", node.kind), ("NAME", name), ("MODE", node.mode)]
            fields += [("MTIME_NS", node.mtime_ns)]
            fields += [("SIZE", len(node.data))] if node.kind == "file" else []
            fields += [("LINK", node.link)] if node.kind == "symlink" else []
            head = b"".join(_pack_field(tag, value) for tag, value in fields)
            self._check()
            yield len(head).to_bytes(4, "little") + head
            async for chunk in self._chunks(node.data):
                yield chunk
        yield bytes(4)

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, user: str = "") -> tuple[int, int]:
        stream = memoryview(b"".join([chunk async for chunk in chunks]))
        with _file_errors():
            return _unpack(self._check(), path.rstrip("/"), stream)

    async def watch(self, path: str, *, recursive: bool = False, user: str = "") -> AsyncIterator[tuple[str, str]]:
        files = self._check()
        with _file_errors():
            files.directory(path)
        watch = Watch(path.rstrip("/") or "/", recursive)
        files.watches.append(watch)
        try:
            while True:
                while watch.events:
                    yield watch.events.popleft()
                self._check()
                watch.arrived.clear()
                await watch.arrived.wait()
        finally:
            files.watches.remove(watch)

    async def dial(self, port: int, host: str = "127.0.0.1") -> GuestStream:
        self._check()
        if port != ECHO_PORT:
            raise GuestError("file", f"{host}:{port}: Connection refused", errno.ECONNREFUSED)
        return _EchoStream(self._machine, self._ended)

    async def shutdown(self, grace_ms: int) -> None:
        self._check()
        self._machine.end()

    async def aclose(self) -> None:
        self._machine.disconnect(self._ended)

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    async def wait_closed(self) -> None:
        await self._ended.wait()

    async def _chunks(self, data: bytes) -> AsyncIterator[bytes]:
        for position in range(0, len(data), CHUNK_BYTES):
            self._check()
            yield data[position : position + CHUNK_BYTES]
            await asyncio.sleep(0)


def _pack_field(tag: str, value: str | int) -> bytes:
    data = value.to_bytes(8, "little") if isinstance(value, int) else value.encode("utf-8", "surrogateescape")
    return _FIELD.pack(_TAGS[tag], 0, len(data)) + data


def _read_entry(head: memoryview) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    while head:
        tag, _, length = _FIELD.unpack_from(head)
        fields[tag] = bytes(head[_FIELD.size : _FIELD.size + length])
        head = head[_FIELD.size + length :]
    return fields


def _unpack(files: FileTree, root: str, stream: memoryview) -> tuple[int, int]:
    files.mkdir(root or "/", mode=0o755, parents=True)
    count = size_total = position = 0
    while position + 4 <= len(stream):
        length = int.from_bytes(stream[position : position + 4], "little")
        fields = _read_entry(stream[position + 4 : position + 4 + length])
        position += 4 + length
        if not fields:
            return count, size_total
        path = f"{root}/{_safe_name(fields[_TAGS['NAME']])}"
        mode = int.from_bytes(fields.get(_TAGS["MODE"], b""), "little")
        kind = fields[_TAGS["KIND"]]
        if kind == b"directory":
            files.mkdir(path, mode=mode, parents=True)
        elif kind == b"symlink":
            files.symlink(path, fields[_TAGS["LINK"]].decode("utf-8", "surrogateescape"))
        else:
            size = int.from_bytes(fields[_TAGS["SIZE"]], "little")
            files.write(path, bytes(stream[position : position + size]), mode=mode, parents=False)
            position += size
            size_total += size
            count += 1
    raise GuestError("protocol", "the tree stream was cut", errno.EPROTO)


def _safe_name(name: bytes) -> str:
    text = name.decode("utf-8", "surrogateescape")
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise GuestError("protocol", f"{text!r} is not a name in a tree", errno.EINVAL)
    return text


class _EchoStream(GuestStream):
    """Port 7: what is written comes back."""

    def __init__(self, machine: Machine, ended: asyncio.Event) -> None:
        self._machine = machine
        self._ended = ended
        self._data = bytearray()
        self._finished = False
        self._arrived = asyncio.Event()
        machine.streams.add(self._arrived)

    async def read(self) -> bytes:
        while not self._data and not self._finished:
            if self._ended.is_set():
                raise GuestLostError("the connection to the dummy sandbox has ended")
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._data)
        self._data.clear()
        return data

    async def write(self, data: bytes) -> None:
        if self._ended.is_set():
            raise GuestLostError("the connection to the dummy sandbox has ended")
        self._data += data
        self._arrived.set()

    async def write_eof(self) -> None:
        self._finished = True
        self._arrived.set()

    async def aclose(self) -> None:
        self._machine.streams.discard(self._arrived)
        self._finished = True
        self._arrived.set()
