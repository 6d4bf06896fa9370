"""`Guest` over the guest protocol: one connection to one real agent.

    channel = await connect("/run/…/agent.sock", timeout_s=5)
    await channel.start(7, StartCommand(script="make test"))
    async for event in channel.events(7): ...

Everything the guest sends is checked against what it may send now; a guest that lies loses the connection, and every
waiting call raises GuestLostError. Commands survive that; a new channel takes them over with `attach`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from opendsec.guest import protocol
from opendsec.guest.base import (
    CommandEvent,
    Guest,
    GuestError,
    GuestLostError,
    GuestStream,
    KnownCommand,
    StartCommand,
)
from opendsec.guest.calls import Call, DialledStream
from opendsec.guest.files import FileCalls
from opendsec.guest.link import FrameLink
from opendsec.guest.machine_calls import MachineCalls
from opendsec.guest.machine_fields import decode_usage
from opendsec.guest.protocol import FieldError, pack_fields
from opendsec.guest.running import Running

_MAX_LISTED: Final = 16384
_MAX_PINGS: Final = 1024
_CLOSE_S: Final = 1.0
_SHUTDOWN_S: Final = 5.0
_LAST_CALL_ID: Final = (1 << 32) - 1


async def connect(path: str | os.PathLike[str], timeout_s: float = 10.0) -> Channel:
    """Connect to an agent's Unix socket and greet it. Raises GuestLostError, also after `timeout_s` seconds."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
    except OSError as exc:
        sock.close()
        raise GuestLostError(f"cannot connect to the guest agent: {exc!r}") from exc
    except asyncio.CancelledError:
        sock.close()
        raise
    return await greet(sock, timeout_s)


async def greet(sock: socket.socket, timeout_s: float = 10.0) -> Channel:
    """A channel over a connected stream socket, which it takes over. Raises GuestLostError."""
    channel = Channel()
    await asyncio.get_running_loop().create_connection(lambda: channel.link, sock=sock)
    greeted = False
    try:
        async with asyncio.timeout(timeout_s):
            await channel.hello()
        greeted = True
    except TimeoutError:
        raise GuestLostError(f"the guest agent did not answer HELLO within {timeout_s} seconds") from None
    finally:
        if not greeted:
            channel.link.fail("no HELLO")
            await channel.wait_closed()
    return channel


class Channel(MachineCalls, FileCalls, Guest):
    """One live connection. Made by `connect` or `greet`."""

    def __init__(self) -> None:
        self.link = FrameLink(self._on_frame, self._on_lost)
        self.agent = ""
        self.boot_id = b""
        self.capabilities: frozenset[str] = frozenset()
        self._running: dict[int, Running] = {}
        self._calls: dict[int, Call] = {}
        self._next_call = protocol.FIRST_CALL_ID
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._next_ping = 0
        self._greeted: asyncio.Future[None] | None = None
        self._listing: list[KnownCommand] | None = None
        self._listed: asyncio.Future[None] | None = None
        self._list_lock = asyncio.Lock()
        self._acks: dict[int, Running] = {}
        self._lost: GuestLostError | None = None
        self._on_type: dict[int, Callable[[int, int, memoryview], None]] = {
            protocol.STARTED: self._on_started,
            protocol.STDIN_ACK: self._on_stdin_ack,
            protocol.EXIT: self._on_exit,
            protocol.ERROR: self._on_error,
            protocol.PONG: self._on_pong,
            protocol.COMMAND: self._on_command,
            protocol.END: self._on_end,
            protocol.HELLO: self._on_hello,
            protocol.USAGE: self._on_usage,
        }

    # Frames in. Each raises FieldError for what the agent may not send now.

    def _on_frame(self, frame_type: int, frame_id: int, flags: int, payload: memoryview) -> None:
        if frame_type == protocol.OUT:
            self._command(frame_id).on_output(flags, payload)
        elif frame_id >= protocol.FIRST_CALL_ID and frame_type != protocol.COMMAND:
            call = self._calls.get(frame_id)
            if call is not None:
                call.on_frame(frame_type, payload)
            elif frame_id >= self._next_call:
                raise FieldError(f"a frame for call {frame_id}, which was never made")
        elif frame_type in self._on_type:
            self._on_type[frame_type](frame_id, flags, payload)
        else:
            raise FieldError(f"frame type {frame_type}")

    def _command(self, command_id: int) -> Running:
        running = self._running.get(command_id)
        if running is None:
            raise FieldError(f"a frame for command {command_id}, which is not on this connection")
        return running

    @property
    def is_machine(self) -> bool:
        return "machine" in self.capabilities

    def _on_hello(self, frame_id: int, _: int, payload: memoryview) -> None:
        if frame_id or self._greeted is None:
            raise FieldError("HELLO that nobody waits for")
        caps: list[str] = []
        fields = {}
        for tag, data in protocol.iter_fields(payload):
            fields[tag] = data
            if tag == protocol.T_CAPS:
                caps.append(protocol.bytes_to_text(data))
        if protocol.unsigned(fields, protocol.T_VERSION) != protocol.VERSION:
            raise FieldError("another version of the guest protocol")
        boot_id = fields.get(protocol.T_BOOT_ID, b"")
        if self.agent and not (boot_id == self.boot_id and self.is_machine):
            raise FieldError("HELLO that nobody waits for")
        self.boot_id = boot_id
        self.capabilities = frozenset(caps)
        self.agent = protocol.text(fields, protocol.T_AGENT)
        if not self._greeted.done():  # a serial port also brings the answer to a host that was here before
            self._greeted.set_result(None)

    def _on_started(self, frame_id: int, _: int, payload: memoryview) -> None:
        fields = protocol.unpack_fields(payload)
        known = bool(protocol.unsigned(fields, protocol.T_FLAGS, 0) & protocol.STARTED_KNOWN)
        self._command(frame_id).on_started(protocol.unsigned(fields, protocol.T_PID), known=known)

    def _on_stdin_ack(self, frame_id: int, flags: int, payload: memoryview) -> None:
        if len(payload) != 8:
            raise FieldError("STDIN_ACK without an offset")
        running = self._running.get(frame_id)
        if running is not None:  # it may cross a release
            running.on_stdin_taken(int.from_bytes(payload, "little"), closed=bool(flags & 1))

    def _on_exit(self, frame_id: int, _: int, payload: memoryview) -> None:
        self._command(frame_id).on_exit(protocol.decode_exit(payload))

    def _on_error(self, frame_id: int, _: int, payload: memoryview) -> None:
        error = protocol.decode_error(payload)
        if frame_id == 0:
            raise error
        running = self._running.get(frame_id)
        if running is not None:  # it may cross a release
            running.on_error(error)

    def _on_usage(self, frame_id: int, _: int, payload: memoryview) -> None:
        if frame_id:
            raise FieldError("USAGE with an id")
        self._usage = decode_usage(payload)

    def _on_pong(self, frame_id: int, _: int, payload: memoryview) -> None:
        waiter = self._pings.pop(int.from_bytes(payload, "little"), None)
        if frame_id or waiter is None:
            raise FieldError("PONG without PING")
        if not waiter.done():
            waiter.set_result(None)

    def _on_command(self, frame_id: int, _: int, payload: memoryview) -> None:
        if self._listing is None or len(self._listing) >= _MAX_LISTED:
            raise FieldError("COMMAND outside of a LIST, or too many")
        self._listing.append(protocol.decode_command(frame_id, payload))

    def _on_end(self, frame_id: int, _: int, payload: memoryview) -> None:
        if frame_id or len(payload) or self._listed is None or self._listed.done():
            raise FieldError("END that nobody waits for")
        self._listed.set_result(None)

    def _on_lost(self, error: GuestLostError) -> None:
        self._lost = error
        for waiter in (self._greeted, self._listed, *self._pings.values()):
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
        for running in self._running.values():
            running.on_lost(error)
        for call in list(self._calls.values()):
            call.fail(error)

    # The connection.

    async def hello(self) -> None:
        """Greet; called once by `greet`."""
        self._greeted = asyncio.get_running_loop().create_future()
        self.link.send(protocol.HELLO, 0, pack_fields([(protocol.T_VERSION, protocol.VERSION)]))
        await self._greeted

    async def ping(self) -> float:
        if len(self._pings) >= _MAX_PINGS:
            raise GuestLostError("the guest agent does not answer PING")
        self._next_ping += 1
        waiter = self._pings[self._next_ping] = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        self.link.send(protocol.PING, 0, self._next_ping.to_bytes(8, "little"))
        await waiter
        return time.perf_counter() - begin

    @property
    def closed(self) -> bool:
        return self._lost is not None or self.link.reason is not None

    async def wait_closed(self) -> None:
        await self.link.closed.wait()

    async def aclose(self) -> None:
        self._flush_acks()
        self.link.close()
        await self._closed_within(_CLOSE_S)

    async def shutdown(self, grace_ms: int) -> None:
        if not self.closed:
            self.link.send(protocol.SHUTDOWN, 0, pack_fields([(protocol.T_GRACE_MS, grace_ms)]))
        await self._closed_within(grace_ms / 1000 + _SHUTDOWN_S)

    async def _closed_within(self, timeout_s: float) -> None:
        """Waits for the end of the connection, and makes it one when the guest does not do its part."""
        if self.link.closed.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.link.closed.wait()
        except TimeoutError:
            self.link.fail("the guest agent does not let go")
            await self.link.closed.wait()

    # Commands.

    def _add(self, command_id: int) -> Running:
        if not 0 < command_id < protocol.FIRST_CALL_ID:
            raise ValueError(f"command_id: {command_id} is not within 1 to {protocol.FIRST_CALL_ID - 1}")
        if command_id in self._running:
            raise ValueError(f"command_id: {command_id} is on this connection already")
        if self._lost is not None:
            raise self._lost
        running = self._running[command_id] = Running()
        running.answer = asyncio.get_running_loop().create_future()
        return running

    async def _answered(self, command_id: int, running: Running) -> int:
        assert running.answer is not None
        try:
            return await running.answer
        except GuestError:
            del self._running[command_id]
            raise

    async def start(self, command_id: int, command: StartCommand) -> int:
        payload = protocol.encode_start(command)
        if len(payload) > protocol.MAX_TO_GUEST:
            raise GuestError("exec", f"script, arguments and environment take {len(payload)} bytes, at most 4 MiB", 7)
        running = self._add(command_id)
        self.link.send(protocol.START, command_id, payload)
        return await self._answered(command_id, running)

    async def attach(self, command_id: int, stdout: int, stderr: int) -> None:
        running = self._add(command_id)
        running.attach_at(stdout, stderr)
        payload = stdout.to_bytes(8, "little") + stderr.to_bytes(8, "little")
        self.link.send(protocol.ATTACH, command_id, payload)
        await self._answered(command_id, running)

    def events(self, command_id: int) -> AsyncIterator[CommandEvent]:
        running = self._running.get(command_id)
        if running is None:
            raise ValueError(f"command_id: {command_id} was neither started nor attached on this connection")
        return running.events()

    def ack(self, command_id: int, stdout: int, stderr: int) -> None:
        running = self._running.get(command_id)
        if running is None or self.closed:
            return
        running.on_ack(stdout, stderr)
        if not self._acks:  # one frame per command and turn of the loop, however often the host records
            asyncio.get_running_loop().call_soon(self._flush_acks)
        self._acks[command_id] = running

    def _flush_acks(self) -> None:
        acks, self._acks = self._acks, {}
        for command_id, running in acks.items():
            if self.closed:
                return
            payload = running.acked[0].to_bytes(8, "little") + running.acked[1].to_bytes(8, "little")
            self.link.send(protocol.ACK, command_id, payload)

    def release(self, command_id: int) -> None:
        self._acks.pop(command_id, None)
        if self._running.pop(command_id, None) is not None and not self.closed:
            self.link.send(protocol.RELEASE, command_id)

    async def write_stdin(self, command_id: int, offset: int, data: bytes, *, eof: bool) -> None:
        running = self._running.get(command_id)
        if running is None:
            raise GuestError("no_command", f"no command {command_id} on this connection")
        view = memoryview(data)
        while view or eof:
            if eof and not view and running.stdin_closed:
                return
            room = await running.stdin_room(offset)
            piece = view[:room]
            view = view[len(piece) :]
            last = eof and not len(view)
            self.link.send(protocol.STDIN, command_id, offset.to_bytes(8, "little") + piece, flags=int(last))
            offset += len(piece)
            if last:
                return

    async def kill(self, command_id: int, grace_ms: int) -> None:
        self.link.send(protocol.KILL, command_id, pack_fields([(protocol.T_GRACE_MS, grace_ms)]))

    async def signal(self, command_id: int, signal: int) -> None:
        self.link.send(protocol.SIGNAL, command_id, pack_fields([(protocol.T_SIGNAL, signal)]))

    async def resize(self, command_id: int, rows: int, cols: int) -> None:
        fields = pack_fields([(protocol.T_ROWS, rows), (protocol.T_COLS, cols)])
        self.link.send(protocol.RESIZE, command_id, fields)

    async def list_commands(self) -> list[KnownCommand]:
        async with self._list_lock:
            listing = self._listing = []
            self._listed = asyncio.get_running_loop().create_future()
            try:
                self.link.send(protocol.LIST, 0)
                await asyncio.shield(self._listed)
            finally:
                self._listing = None
        return listing

    # Calls.

    def _call(self, frame_type: int, fields: bytes) -> Call:
        if self._lost is not None:
            raise self._lost
        if self._next_call > _LAST_CALL_ID:
            raise GuestLostError("this connection has used up its call ids")
        call = Call(self._next_call, self.link.send, self._forget_call)
        self._next_call += 1
        self._calls[call.id] = call
        self.link.send(frame_type, call.id, fields)
        return call

    def _forget_call(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    async def end_session(self, name: str) -> None:
        with self._call(protocol.SESSION_END, pack_fields([(protocol.T_SESSION, name)])) as call:
            await call.answer()
            call.done()

    async def dial(self, port: int, host: str = "127.0.0.1") -> GuestStream:
        call = self._call(protocol.DIAL, pack_fields([(protocol.T_HOST, host), (protocol.T_PORT, port)]))
        with call.cancelled_on_failure():
            await call.answer()
        return DialledStream(call)
