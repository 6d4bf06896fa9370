"""The dummy backend's sandbox: commands, sessions and counters, alive whether or not anyone is connected.

Nothing runs by itself: a command advances when its timer fires, when input arrives, when output is acknowledged,
and never while the sandbox is paused. So there is no task to lose, and a test sees the same order every time.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opendsec.backends.dummy_files import FileTree
from opendsec.backends.dummy_shell import (
    VERBS,
    Ended,
    ForkDeniedError,
    Killed,
    NeedRoom,
    NeedStdin,
    ProcessIo,
    Program,
    ShellState,
    Sleep,
    Wait,
    run_argv,
    run_script,
)
from opendsec.guest.base import (
    CHUNK_BYTES,
    CommandEvent,
    Exit,
    GuestError,
    GuestLostError,
    Output,
    StartCommand,
    StdinTaken,
)

SIGTERM, SIGKILL = 15, 9
REASON_TIMEOUT, REASON_KILLED, REASON_SESSION = 1, 2, 3
MAX_COMMANDS = 1024
MAX_SESSIONS = 64


@dataclass(slots=True)
class Buffer:
    """One output stream: what was written and not yet acknowledged."""

    base: int = 0
    data: bytearray = field(default_factory=bytearray)
    sent: int = 0

    @property
    def total(self) -> int:
        return self.base + len(self.data)

    def acknowledge(self, offset: int) -> None:
        done = min(max(offset - self.base, 0), len(self.data))
        del self.data[:done]
        self.base += done

    def take(self) -> Output | None:
        """The next bytes not yet sent on this connection."""
        start = max(self.sent, self.base)
        chunk = bytes(self.data[start - self.base : start - self.base + CHUNK_BYTES])
        self.sent = start + len(chunk)
        return Output(0, start, chunk) if chunk else None


@dataclass(slots=True)
class Session:
    """A named shell: what it remembers, and whose turn it is."""

    state: ShellState
    queue: deque[object] = field(default_factory=deque)
    """Who waits, first come first; the first one goes when the shell is not busy."""
    busy: bool = False
    used: bool = False
    gone: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class Command:
    """One program in the dummy sandbox."""

    def __init__(self, machine: Machine, pid: int, start: StartCommand, session: Session | None) -> None:
        self.pid = pid
        self.streams = {1: Buffer(), 2: Buffer()}
        self.exit: Exit | None = None
        self.changed = asyncio.Event()
        self.attached = True
        self.session = session
        self.stdin_closed = not start.stdin
        self.stdin_total = 0
        self.memory_bytes = 0
        self._first = session is not None and not session.used
        self._machine = machine
        self._stdin = bytearray()
        self._stdin_told = -1 if start.stdin else 0
        self._wait: Wait | None = None
        self._due = False
        self._reason = 0
        self._started_ns = time.monotonic_ns()
        self._timers: list[asyncio.TimerHandle] = []
        state = session.state if session else ShellState(cwd=start.cwd, env=dict(start.env))
        self._io = ProcessIo(machine.files, state, self._write, self._read, self._allocate, machine.fork)
        self._program: Program = (
            run_script(self._io, start.script) if start.script is not None else run_argv(self._io, start.argv)
        )
        if session is not None:
            session.used = True
        if start.timeout_ms:
            self._after(start.timeout_ms / 1000, self.kill, start.grace_ms, REASON_TIMEOUT)

    def advance(self) -> None:
        """Run until it waits for something that is not there, or ends."""
        while self.exit is None and not self._machine.frozen and self._ready():
            try:
                self._wait = next(self._program)
            except StopIteration as stop:
                self._finish(code=int(stop.value or 0))
            except Ended as ended:
                self._finish(code=ended.code, session_gone=self.session is not None)
            except Killed:
                self._finish(signal=SIGKILL)
            else:
                if isinstance(self._wait, Sleep):
                    self._due = False
                    self._after(self._wait.seconds, self._wake)

    def kill(self, grace_ms: int, reason: int = REASON_KILLED) -> None:
        """SIGTERM, and SIGKILL after the grace for who ignores it."""
        if self.exit is not None:
            return
        self._reason = reason
        if self._io.ignores_term:
            self._after(grace_ms / 1000, self.end_by, SIGKILL)
        else:
            self.end_by(SIGTERM)

    def end_by(self, signal: int) -> None:
        """The signal ends it now; SIGTERM may be ignored."""
        if self.exit is None and not (signal == SIGTERM and self._io.ignores_term):
            self._program.close()
            self._finish(signal=signal)

    def lose_session(self) -> None:
        """Its shell was ended under it."""
        if self.exit is None:
            self._reason = REASON_SESSION
            self._program.close()
            self._finish(signal=SIGKILL, session_gone=True)

    def detach(self) -> None:
        """A new connection hears nothing of this command before it attaches."""
        self.attached = False

    def feed(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Bytes below what was accepted are skipped; a gap is an error."""
        accepted = self.stdin_total + len(self._stdin)
        if offset > accepted:
            raise GuestError("gap", f"stdin continues at {accepted}, not at {offset}")
        if not self.stdin_closed and self.exit is None:
            self._stdin += data[accepted - offset :]
            self.stdin_closed = eof
        self.changed.set()
        self.advance()

    def stdin_room(self) -> int:
        return CHUNK_BYTES if self.exit is not None or self.stdin_closed else CHUNK_BYTES - len(self._stdin)

    def acknowledge(self, stdout: int, stderr: int) -> None:
        self.streams[1].acknowledge(stdout)
        self.streams[2].acknowledge(stderr)
        self.advance()

    def attach(self, stdout: int, stderr: int) -> None:
        """Send again from these offsets."""
        for stream, offset in ((1, stdout), (2, stderr)):
            if offset < self.streams[stream].base:
                raise GuestError(
                    "gone", f"stream {stream} is held from offset {self.streams[stream].base}, not {offset}"
                )
            self.streams[stream].sent = offset
        self._stdin_told = -1
        self.attached = True
        self.changed.set()

    def next_event(self) -> CommandEvent | None:
        """What the reader has not seen, in order; None: nothing now."""
        for stream, buffer in self.streams.items():
            output = buffer.take()
            if output is not None:
                return Output(stream, output.offset, output.data)
        if self._stdin_told != self.stdin_total:
            self._stdin_told = self.stdin_total
            return StdinTaken(self.stdin_total, self.stdin_closed and not self._stdin)
        return self.exit

    def _ready(self) -> bool:
        match self._wait:
            case Sleep():
                return self._due
            case NeedStdin():
                return bool(self._stdin) or self.stdin_closed
            case NeedRoom(stream):
                return len(self.streams[stream].data) < CHUNK_BYTES
            case None:
                return True

    def _wake(self) -> None:
        self._due = True
        self.advance()

    def _after(self, delay_s: float, call: Callable[..., None], *args: int) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, call, *args))

    def _write(self, stream: int, data: bytes) -> int:
        buffer = self.streams[stream]
        taken = data[: CHUNK_BYTES - len(buffer.data)]
        buffer.data += taken
        self.changed.set()
        return len(taken)

    def _read(self) -> bytes | None:
        data = bytes(self._stdin)
        self._stdin.clear()
        self.stdin_total += len(data)
        if data:
            self.changed.set()
        return None if not data and self.stdin_closed else data

    def _allocate(self, size_bytes: int) -> None:
        self.memory_bytes += size_bytes
        if not self._machine.memory_fits():
            self._machine.oom_kills += 1
            raise Killed

    def _finish(self, *, code: int | None = None, signal: int = 0, session_gone: bool = False) -> None:
        for timer in self._timers:
            timer.cancel()
        self.memory_bytes = 0
        self.exit = Exit(
            exit_code=code,
            signal=signal,
            reason=self._reason,
            stdout_total=self.streams[1].total,
            stderr_total=self.streams[2].total,
            duration_ns=time.monotonic_ns() - self._started_ns,
            session_started=self._first,
            session_gone=session_gone,
        )
        self._machine.command_ended(self, session_gone=session_gone)
        self.changed.set()


class Machine:
    """One dummy sandbox."""

    def __init__(self, *, memory_limit_bytes: int | None, pids_limit: int | None, disk_limit_bytes: int | None) -> None:
        self.files = FileTree(disk_limit_bytes)
        self.commands: dict[int, Command] = {}
        self.sessions: dict[str, Session] = {}
        self.frozen = False
        self.ended = asyncio.Event()
        self.streams: set[asyncio.Event] = set()
        """Of dialled connections: set when there is something to see."""
        self.oom_kills = 0
        self.pids_denied = 0
        self.live_connection: asyncio.Event = asyncio.Event()
        """Set when the connection it belongs to is closed; a new connection brings a new one."""
        self._memory_limit_bytes = memory_limit_bytes
        self._pids_limit = pids_limit
        self._last_pid = 1

    def connect(self) -> asyncio.Event:
        """A new live connection: the event that ends it. The one before ends now."""
        self.disconnect(self.live_connection)
        self.live_connection = asyncio.Event()
        for command in self.commands.values():
            command.detach()
        return self.live_connection

    def disconnect(self, connection: asyncio.Event) -> None:
        """End it and wake everyone who may be waiting on it."""
        connection.set()
        for waiting in (
            *(command.changed for command in self.commands.values()),
            *(session.freed for session in self.sessions.values()),
            *(watch.arrived for watch in self.files.watches),
            *self.streams,
        ):
            waiting.set()

    def memory_bytes(self) -> int:
        return self.files.used_bytes + sum(command.memory_bytes for command in self.commands.values())

    def memory_fits(self) -> bool:
        return self._memory_limit_bytes is None or self.memory_bytes() <= self._memory_limit_bytes

    def fork(self, count: int) -> None:
        """Raises ForkDeniedError when `count` processes more would not fit."""
        running = sum(command.exit is None for command in self.commands.values())
        if self._pids_limit is not None and running + count > self._pids_limit:
            self.pids_denied += 1
            raise ForkDeniedError

    async def start(self, command_id: int, start: StartCommand, connection: asyncio.Event) -> int:
        """Its pid; waits for the session's turn as long as the connection lives. Raises GuestError,
        GuestLostError."""
        known = self.commands.get(command_id)
        if known is not None:
            known.attach(known.streams[1].base, known.streams[2].base)
            return known.pid
        self._check(start)
        session = await self._session(start, connection) if start.session else None
        self._last_pid += 1
        command = Command(self, self._last_pid, start, session)
        self.commands[command_id] = command
        command.advance()
        return command.pid

    def command(self, command_id: int) -> Command:
        command = self.commands.get(command_id)
        if command is None:
            raise GuestError("no_command", f"no command {command_id} here", errno.ESRCH)
        return command

    def command_ended(self, command: Command, *, session_gone: bool) -> None:
        session = command.session
        if session is None:
            return
        if session_gone:
            self._forget(session)
        session.busy = False
        session.freed.set()

    def _forget(self, session: Session) -> None:
        session.gone = True
        self.sessions = {name: found for name, found in self.sessions.items() if found is not session}
        session.freed.set()

    def end_session(self, name: str) -> None:
        """End its shell and what runs in it; unknown names are no error."""
        session = self.sessions.get(name)
        if session is None:
            return
        self._forget(session)
        for command in self.commands.values():
            if command.session is session:
                command.lose_session()

    def thaw(self) -> None:
        self.frozen = False
        for command in list(self.commands.values()):
            command.advance()

    def end(self) -> None:
        """Everything ends, as when pid 1 exits."""
        for command in self.commands.values():
            command.end_by(SIGKILL)
        self.ended.set()
        self.disconnect(self.live_connection)

    def _check(self, start: StartCommand) -> None:
        if start.pty is not None:
            raise GuestError("unsupported", "the dummy backend has no terminals")
        if start.user not in ("", "root", "0", "0:0", "root:root"):
            raise GuestError("no_user", f"no user {start.user!r}; the dummy backend knows root only", errno.ENOENT)
        try:
            self.files.directory(start.cwd)
        except OSError as error:
            raise GuestError("bad_cwd", f"{start.cwd}: {error.strerror}", error.errno or 0) from error
        if start.script is None and start.argv[0].rpartition("/")[2] not in VERBS:
            raise GuestError("exec", f"{start.argv[0]}: No such file or directory", errno.ENOENT)
        if sum(command.exit is None for command in self.commands.values()) >= MAX_COMMANDS:
            raise GuestError("limit", f"{MAX_COMMANDS} commands are running")
        try:
            self.fork(1)
        except ForkDeniedError:
            raise GuestError("pids_limit", "the pids limit forbids another process", errno.EAGAIN) from None

    async def _session(self, start: StartCommand, connection: asyncio.Event) -> Session:
        while True:
            session = self.sessions.get(start.session)
            if session is None:
                if len(self.sessions) >= MAX_SESSIONS:
                    raise GuestError("limit", f"{MAX_SESSIONS} sessions are open")
                session = Session(ShellState(cwd=start.cwd, env=dict(start.env)))
                self.sessions[start.session] = session
            ticket = object()
            session.queue.append(ticket)
            try:
                while session.busy or session.queue[0] is not ticket:
                    session.freed.clear()
                    await session.freed.wait()
                    if connection.is_set():
                        raise GuestLostError("the connection to the dummy sandbox has ended")
            finally:
                session.queue.remove(ticket)
                session.freed.set()
            if not session.gone:
                session.busy = True
                return session
