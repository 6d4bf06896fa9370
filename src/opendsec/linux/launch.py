"""Starting container sandboxes: the Python side of `native/launch` (docs/reference/launcher.md).

A `LaunchPlan` is data; `encode` turns it into one request; `Launcher` owns the launcher process, sends requests and
resolves answers. It makes no decision about a sandbox, and starts nothing by itself. A launcher that died is started
again by the next launch.

What is promised: a launch ends in `Launched`, or in LaunchError and then nothing of it runs. A cancelled launch is
killed by its cgroup at once, and by its pidfd should it have been under way in the launcher.
"""

from __future__ import annotations

import asyncio
import errno as errno_numbers
import hashlib
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from opendsec.linux import process

LAUNCHER_PATH = Path(__file__).resolve().parent.parent / "_native" / "opendsec-launch"
GUEST_PATH = Path(__file__).resolve().parent.parent / "_native" / "opendsec-guest"

MAX_REQUEST_BYTES = 64 * 1024
MAX_REQUEST_FDS = 250
_ANSWER_BYTES = 4096
_CLOSE_TIMEOUT_S = 10.0

SEND_BUFFER_BYTES = 1 << 20


class LaunchError(OSError):
    """A start that did not happen; nothing of it is left.

    `step` names what failed as launcher.md lists it (`launcher`: the launcher process itself died), `errno` and
    `strerror` are the kernel's.
    """

    def __init__(self, step: str, errno: int, message: str) -> None:
        super().__init__(errno, message)
        self.step = step

    def __str__(self) -> str:
        name = errno_numbers.errorcode.get(self.errno or 0, self.errno)
        return f"launch failed at step {self.step}: {self.strerror} [{name}]"


@dataclass(frozen=True, slots=True)
class IdMap:
    """Ids `inside` … `inside + count - 1` of the sandbox are `outside` … on the host.

    Used for users and groups alike.
    """

    inside: int
    outside: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A tree attached inside. `fd` names a mounted tree of the launcher's mount namespace or (kernel ≥ 6.15) a
    detached one; it is cloned, with its submounts.

    Always nosuid; nodev unless `devices`. `target` is made when missing (a directory for a directory, else an empty
    file).
    """

    fd: int
    target: str
    read_only: bool = True
    devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tmpfs:
    """A fresh tmpfs inside, owned by the sandbox's root, nosuid and nodev. `options` as in tmpfs(5), e.g.

    `size=64m,mode=1777`.
    """

    target: str
    options: str = "mode=755"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One start, complete. Descriptors stay the caller's: they may be closed once `launch` has returned or raised."""

    lower: tuple[int, ...]
    """Directories of mounted layers, topmost first; at least one."""
    upper: Path
    work: Path
    """Two empty directories in one parent directory, owned by host root. Files in `upper` are owned by 0-based ids."""
    idmap: IdMap
    cgroup2: int
    """Directory of the sandbox in the unified tree."""
    cgroup1: tuple[int, ...] = ()
    """`cgroup.procs` files opened for writing, one per v1 hierarchy used."""
    listen: int
    """Listening Unix socket: the agent's descriptor 3."""
    guest: int
    """The agent's executable (see `install_guest`)."""
    args: tuple[str, ...] = ()
    hostname: str = "sandbox"
    binds: tuple[Bind, ...] = ()
    """Attached in this order, before tmpfs, devpts and proc."""
    tmpfs: tuple[Tmpfs, ...] = ()
    devpts: str = "/dev/pts"
    """Where a private devpts is mounted; empty for none."""
    masks: tuple[str, ...] = ()
    """Paths to hide after everything is mounted; missing ones are skipped."""
    overlay: tuple[str, ...] = ("volatile",)
    """Further options of the root overlay, `name` or `name=value`.

    `volatile`: no fsync inside reaches the disk, and the end of a sandbox does not write back the whole file system of
    `upper`; after a crash of the host nobody asks for it.
    """
    root: str = ""
    """`ro`, `nosuid` or both, comma-separated: what the root becomes when everything is attached."""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    """Of the sandbox's IPC namespace: name with slashes (`kernel/shmmni`) → value."""
    caps: int
    """Bounding set of everything that runs inside, as a bit mask."""
    rlimits: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """`resource.RLIMIT_*` → (soft, hard); values above what the host allows are lowered to that."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The agent has been executed. `pid` as seen on the host; the pidfd is the caller's to close."""

    pid: int
    pidfd: int


def encode(plan: LaunchPlan, *, seq: int) -> tuple[bytes, list[int]]:
    """The request packet and the descriptors that go with it.

    Raises ValueError naming the field that cannot be sent.
    """
    fds: list[int] = []

    def attach(fd: int) -> str:
        fds.append(fd)
        return f"@{len(fds) - 1}"

    idmap = plan.idmap
    pairs: list[tuple[str, str]] = [
        ("seq", str(seq)),
        *(("lower", attach(fd)) for fd in plan.lower),
        ("upper", os.fspath(plan.upper)),
        ("work", os.fspath(plan.work)),
        ("idmap", f"{idmap.inside} {idmap.outside} {idmap.count}"),
        ("hostname", plan.hostname),
        ("cgroup2", attach(plan.cgroup2)),
        *(("cgroup1", attach(fd)) for fd in plan.cgroup1),
        ("listen", attach(plan.listen)),
        ("guest", attach(plan.guest)),
        *(("arg", text) for text in plan.args),
        *(("bind", f"{attach(bind.fd)} {_bind_options(bind)} {bind.target}") for bind in plan.binds),
        *(("tmpfs", f"{tmpfs.options} {tmpfs.target}") for tmpfs in plan.tmpfs),
        *((("devpts", plan.devpts),) if plan.devpts else ()),
        *(("mask", path) for path in plan.masks),
        *(("overlay", text) for text in plan.overlay),
        ("caps", f"{plan.caps:x}"),
        *(("rlimit", f"{number} {soft} {hard}") for number, (soft, hard) in plan.rlimits.items()),
        *((("root", plan.root),) if plan.root else ()),
        *(("sysctl", f"{name} {value}") for name, value in plan.sysctls.items()),
        ("netns", "new"),
    ]
    for key, value in pairs:
        if "\0" in value:
            raise ValueError(f"{key}: contains a NUL byte")
    packet = b"".join(os.fsencode(f"{key}={value}\0") for key, value in pairs)
    if len(packet) > MAX_REQUEST_BYTES:
        raise ValueError(f"plan: {len(packet)} bytes, at most {MAX_REQUEST_BYTES} fit one request")
    if len(fds) > MAX_REQUEST_FDS:
        raise ValueError(f"plan: {len(fds)} descriptors, at most {MAX_REQUEST_FDS} fit one request")
    return packet, fds


def _bind_options(bind: Bind) -> str:
    return ("ro" if bind.read_only else "rw") + (",dev" if bind.devices else "")


def parse_answer(packet: bytes) -> dict[str, str]:
    """`key=value` strings of an answer."""
    return dict(part.split("=", 1) for part in packet.rstrip(b"\0").decode(errors="replace").split("\0"))


def install_guest(state_dir: Path, *, binary: Path = GUEST_PATH) -> Path:
    """Put the agent's program at `<state_dir>/bin/opendsec-guest-<digest>`, mode 0711, and return that path.
    Idempotent.

    Mode 0711 and an owner outside every sandbox's user range are what makes the running agent unreadable and
    unptraceable from inside: the kernel marks a process not dumpable when its user cannot read its program.
    `state_dir` must be on a file system that allows execution.
    """
    content = binary.read_bytes()
    target = state_dir / "bin" / f"opendsec-guest-{hashlib.sha256(content).hexdigest()[:16]}"
    if target.exists():
        return target
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o711)
            file.flush()
            os.fsync(fd)
        temporary.rename(target)
    except OSError:
        temporary.unlink()
        raise
    return target


@dataclass(slots=True, eq=False)
class _Process:
    """One life of the launcher program."""

    pid: int
    pidfd: int
    sock: socket.socket
    ready: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Pending:
    packet: bytes
    fds: list[int]
    answer: asyncio.Future[Launched]


class Launcher:
    """The launcher process and the launches under way. One per edge; use from one event loop."""

    def __init__(self, binary: Path = LAUNCHER_PATH) -> None:
        self._binary = binary
        self._process: _Process | None = None
        self._next_seq = 1
        self._pending: dict[int, _Pending] = {}
        self._unsent: deque[int] = deque()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The launcher process; None when it is not running."""
        return self._process.pid if self._process else None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the launcher process, after `close` too, and wait until it is ready.

        Raises OSError when its program is missing (build it with `make -C native install`), LaunchError when it cannot
        work on this host.
        """
        self._closed = False
        current = self._start_process()
        try:
            await asyncio.shield(current.ready)
        except LaunchError:
            self._lose_process(current)
            raise

    async def close(self) -> None:
        """End the launcher process. Launches under way fail; sandboxes stay."""
        self._closed = True
        current = self._process
        if current is not None:
            current.sock.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                await process.wait_ended(current.pidfd, timeout_s=_CLOSE_TIMEOUT_S)
            if self._process is current:
                process.send_signal(current.pidfd)
                self._drop_process("was closed")

    async def launch(self, plan: LaunchPlan) -> Launched:
        """Start one sandbox. Raises LaunchError (nothing is left of it) or ValueError (the plan cannot be encoded)."""
        if self._closed:
            raise LaunchError("launcher", errno_numbers.ESHUTDOWN, "the launcher was closed")
        seq = self._next_seq
        self._next_seq += 1
        packet, fds = encode(plan, seq=seq)
        if self._process is None:
            self._start_process()
        answer: asyncio.Future[Launched] = asyncio.get_running_loop().create_future()
        self._pending[seq] = _Pending(packet, fds, answer)
        self._unsent.append(seq)
        self._flush()
        try:
            return await answer
        except asyncio.CancelledError:
            kill_cgroup(plan.cgroup2)
            self._abandon(seq, answer)
            raise
        except LaunchError as error:
            if error.step == "launcher":
                kill_cgroup(plan.cgroup2)
            raise

    def _abandon(self, seq: int, answer: asyncio.Future[Launched]) -> None:
        """Not sent: it never will be. Sent: its answer still comes, and a sandbox in it is killed then (`_settle`)."""
        if seq in self._unsent:
            self._unsent.remove(seq)
        self._pending.pop(seq, None)
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            os.close(answer.result().pidfd)  # it came in the same turn of the loop as the cancellation

    def _start_process(self) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            try:
                pid, pidfd = process.spawn(self._binary, fds={0: theirs.fileno()})
            except BaseException:
                ours.close()
                raise
        loop = asyncio.get_running_loop()
        self._process = _Process(pid, pidfd, ours, loop.create_future())
        loop.add_reader(ours.fileno(), self._read, self._process)
        return self._process

    def _flush(self) -> None:
        """Send what the socket takes now; the rest when it is writable again."""
        current = self._process
        if current is None:
            return
        loop = asyncio.get_running_loop()
        while self._unsent:
            pending = self._pending[self._unsent[0]]
            try:
                socket.send_fds(current.sock, [pending.packet], pending.fds)
            except BlockingIOError:
                loop.add_writer(current.sock.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno in (errno_numbers.EPIPE, errno_numbers.ECONNRESET):
                    self._lose_process(current)
                    return
                seq = self._unsent.popleft()
                _fail(
                    self._pending.pop(seq),
                    LaunchError("request", error.errno or 0, f"the request could not be sent: {error.strerror}"),
                )
                continue
            self._unsent.popleft()
        loop.remove_writer(current.sock.fileno())

    def _read(self, current: _Process) -> None:
        """Take every answer that is there."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(current.sock, _ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet, fds = b"", []
            if not packet:
                self._lose_process(current)
                return
            answer = parse_answer(packet)
            if answer["seq"] == "0":
                _settle_ready(current.ready, answer)
            else:
                self._settle(answer, fds)

    def _settle(self, answer: Mapping[str, str], fds: list[int]) -> None:
        pending = self._pending.pop(int(answer["seq"]), None)
        wanted = pending is not None and not pending.answer.done()
        if answer["ok"] == "1" and not fds:
            # We had no descriptor left for the pidfd. The pid is good: its parent, the launcher, has just named it.
            os.kill(int(answer["pid"]), signal.SIGKILL)
            if wanted and pending is not None:
                error = LaunchError("answer", errno_numbers.EMFILE, "no descriptor is left for the sandbox's pidfd")
                pending.answer.set_exception(error)
        elif answer["ok"] == "1":
            if wanted and pending is not None:
                pending.answer.set_result(Launched(int(answer["pid"]), fds[0]))
                return
            process.send_signal(fds[0])
            os.close(fds[0])
        elif wanted and pending is not None:
            pending.answer.set_exception(_error(answer))

    def _lose_process(self, current: _Process) -> None:
        if self._process is current:
            process.send_signal(current.pidfd)
            self._drop_process("died")

    def _drop_process(self, how: str) -> None:
        current = self._process
        if current is None:
            return
        self._process = None
        loop = asyncio.get_running_loop()
        loop.remove_reader(current.sock.fileno())
        loop.remove_writer(current.sock.fileno())
        current.sock.close()
        os.waitpid(current.pid, 0)
        os.close(current.pidfd)
        error = LaunchError("launcher", errno_numbers.EPIPE, f"the launcher process {how} before it had answered")
        if not current.ready.done():
            current.ready.set_exception(error)
            current.ready.exception()  # seen: whoever launches gets it
        elif isinstance(unable := current.ready.exception(), LaunchError):
            error = unable
        self._unsent.clear()
        pending, self._pending = self._pending, {}
        for each in pending.values():
            _fail(each, error)


def _error(answer: Mapping[str, str]) -> LaunchError:
    return LaunchError(answer["step"], int(answer["errno"]), answer["message"])


def _settle_ready(ready: asyncio.Future[None], answer: Mapping[str, str]) -> None:
    if ready.done():
        return
    if answer["ok"] == "1":
        ready.set_result(None)
    else:
        ready.set_exception(_error(answer))
        ready.exception()  # seen: it is also what every launch under way will raise


def _fail(pending: _Pending, error: LaunchError) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)


def kill_cgroup(cgroup2: int) -> None:
    """SIGKILL to every process of the unified-tree directory, whatever is in it.

    A directory that is gone is no error.
    """
    with suppress(FileNotFoundError, OSError):
        fd = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=cgroup2)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)
