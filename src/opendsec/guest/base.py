"""What an edge can ask of the inside of a sandbox, whatever carries the bytes.

`guest.channel.Channel` speaks the guest protocol to a real agent; `backends.dummy` answers from memory.
Both keep these promises:

* Commands survive the connection. After a reconnect `list_commands` names them and `attach` continues their output
  without a gap.
* A call never hangs for ever: when the connection ends, every waiting call raises `GuestLostError`.
* `GuestError` is the agent's own refusal and carries its code; nothing else is raised for what happens inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from opendsec.guest.machine import GuestSetup, GuestUsage, Identity

CHUNK_BYTES = 256 * 1024
"""Largest payload of one data frame, and the initial window of every stream."""


class GuestError(Exception):
    """The agent refused: `code` is one of the protocol's error codes, `errno` a number or 0."""

    def __init__(self, code: str, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.errno = errno


class GuestLostError(Exception):
    """The connection to the agent is gone; whether the agent is too is for the backend to find out."""


class GuestGoneError(GuestLostError):
    """And it will not be met again: nobody need ask once more. The message says what is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """START: everything the agent needs; environment, directory and user are complete, the agent has no defaults."""

    script: str | None = None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = ""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    """rows, cols"""
    timeout_ms: int = 0
    """0 = none"""
    grace_ms: int = 2000
    session: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes of one stream (1 stdout or pty, 2 stderr) starting at `offset`."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StdinTaken:
    """The program's stdin has taken `taken` bytes in all."""

    taken: int
    closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """EXIT: the last event of a command. `exit_code` is None when a signal ended it."""

    exit_code: int | None
    signal: int = 0
    reason: int = 0
    """0 exited or signaled, 1 timeout, 2 killed on request, 3 session ended"""
    stdout_total: int = 0
    stderr_total: int = 0
    duration_ns: int = 0
    user_us: int = 0
    system_us: int = 0
    max_rss_kb: int = 0
    session_started: bool = False
    session_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCommand:
    """One entry of LIST."""

    id: int
    pid: int
    ended: bool
    stdout_base: int
    stderr_base: int
    stdout_total: int
    stderr_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestStat:
    """Fields of one path, as the protocol has them; `path` is PATH or NAME."""

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    link: str | None = None


CommandEvent = Output | StdinTaken | Exit


class Guest(ABC):
    """One live connection to one guest agent."""

    @abstractmethod
    async def ping(self) -> float:
        """Round trip in seconds."""

    @abstractmethod
    async def start(self, command_id: int, command: StartCommand) -> int:
        """Start it, or find it already started; returns its pid inside. Then read `events`. Raises GuestError."""

    @abstractmethod
    def events(self, command_id: int) -> AsyncIterator[CommandEvent]:
        """Events of a command started or attached on this connection, in the agent's order, ending with Exit.

        One reader at a time.

        Un-acknowledged output is bounded by the agent's window, so a slow reader stalls this command only.
        """

    @abstractmethod
    def ack(self, command_id: int, stdout: int, stderr: int) -> None:
        """The host has everything below these offsets for good. Never blocks."""

    @abstractmethod
    async def attach(self, command_id: int, stdout: int, stderr: int) -> None:
        """Take over a command of an earlier connection from these offsets; then read `events`.

        Raises GuestError (`no_command`, `gone`).
        """

    @abstractmethod
    async def write_stdin(self, command_id: int, offset: int, data: bytes, *, eof: bool) -> None:
        """Send; waits while 256 KiB are on the way and not taken. Raises GuestError."""

    @abstractmethod
    async def kill(self, command_id: int, grace_ms: int) -> None:
        """End the whole tree; the end arrives as Exit. Unknown or ended commands are no error."""

    @abstractmethod
    async def signal(self, command_id: int, signal: int) -> None: ...

    @abstractmethod
    async def resize(self, command_id: int, rows: int, cols: int) -> None: ...

    @abstractmethod
    def release(self, command_id: int) -> None:
        """After Exit has been recorded: the agent may forget it. Never blocks."""

    @abstractmethod
    async def list_commands(self) -> list[KnownCommand]: ...

    @abstractmethod
    async def end_session(self, name: str) -> None: ...

    @abstractmethod
    async def stat(self, path: str, *, user: str = "") -> GuestStat: ...

    @abstractmethod
    async def list_dir(self, path: str, *, user: str = "") -> list[GuestStat]:
        """Its entries, in no order. EOVERFLOW for more than can be held in memory."""

    @abstractmethod
    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, user: str = "") -> None: ...

    @abstractmethod
    async def move(self, path: str, target: str, *, overwrite: bool = True, user: str = "") -> None: ...

    @abstractmethod
    async def remove(self, path: str, *, recursive: bool = False, user: str = "") -> None: ...

    @abstractmethod
    async def chmod(self, path: str, mode: int, *, user: str = "") -> None: ...

    @abstractmethod
    async def open_read(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str = ""
    ) -> tuple[GuestStat, AsyncIterator[bytes]]:
        """The file's fields, then its bytes. An iterator that ends early raises; abandoning it (`aclose`) cancels."""

    @abstractmethod
    async def write_file(
        self, path: str, chunks: AsyncIterator[bytes], *, mode: int | None = None, parents: bool = False, user: str = ""
    ) -> GuestStat:
        """Atomic: the old file stays until everything has arrived. An exception from `chunks` cancels it."""

    @abstractmethod
    def pack(self, path: str, *, user: str = "") -> AsyncIterator[bytes]:
        """The tree below `path` as a tree stream."""

    @abstractmethod
    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, user: str = "") -> tuple[int, int]:
        """Make a tree from a tree stream; returns files and bytes."""

    @abstractmethod
    def watch(self, path: str, *, recursive: bool = False, user: str = "") -> AsyncIterator[tuple[str, str]]:
        """(event name, path) until abandoned."""

    @abstractmethod
    async def dial(self, port: int, host: str = "127.0.0.1") -> GuestStream:
        """A byte stream to a port inside."""

    @abstractmethod
    async def shutdown(self, grace_ms: int) -> None:
        """End every command and the agent. The connection ends; that is no error here.

        An agent that is init of a virtual machine writes the disks out and powers the machine off.
        """

    # Of an agent that is init of a virtual machine (HELLO says `machine`); any other answers `unsupported`.

    @property
    def is_machine(self) -> bool:
        """Whether it is such a one."""
        return False

    async def setup(self, setup: GuestSetup) -> None:
        """Make the sandbox's root and enter it; no command is taken before. Once per machine.

        Raises GuestError `setup`: the machine is of no use then.
        """
        raise _no_machine()

    async def renew(self, identity: Identity) -> None:
        """After every restore, before anybody else gets at it: wall clock, kernel randomness, names, addresses,
        generation. Raises GuestError `setup`.
        """
        raise _no_machine()

    def frozen(self, *, timeout_ms: int = 30_000) -> AbstractAsyncContextManager[None]:
        """Inside the block no process of the sandbox runs, and the writable drive is whole on the disk and does not
        change. Ends by itself after `timeout_ms`, and with the connection; a block left later than that raises
        GuestError `file` with ETIMEDOUT: what was copied may be torn.
        """
        raise _no_machine()

    def pack_upper(self) -> AsyncIterator[bytes]:
        """All that was written to the root, exactly as the overlay keeps it: a raw tree stream.

        Inside `frozen` it is one moment's. `opendsec.vm.upper` rebuilds it.
        """
        raise _no_machine()

    @property
    def usage(self) -> GuestUsage | None:
        """Counters as the agent told them last; None: it tells none. It tells before every EXIT."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connection only. Commands go on."""

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    async def wait_closed(self) -> None:
        """Returns when the connection has ended, for whatever reason."""


class GuestStream(ABC):
    """A dialled connection."""

    @abstractmethod
    async def read(self) -> bytes:
        """b"" at the end."""

    @abstractmethod
    async def write(self, data: bytes) -> None: ...

    @abstractmethod
    async def write_eof(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...


def _no_machine() -> GuestError:
    return GuestError("unsupported", "this guest agent is not init of a virtual machine")
