"""Programs this process starts, and processes it watches: spawn, run to the end, wait, signal.

The only file that uses `subprocess` and `posix_spawn`; nothing here ever forks the calling process (a fork copies its
page tables, 30 CPU-ms at 200 MB). It knows nothing of sandboxes. Processes are held by pidfd; one remembered across a
restart is held by `ProcessIdentity`, so that a pid which now belongs to somebody else is never signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from opendsec.linux.collecting import Collected, exchange

_MINIMAL_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
}
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""Of each stream of a program whose output is collected; one that writes more is ended."""
_STDERR_TAIL_BYTES = 2000
_GATE = 'read -r _ || exit 1; exec "$@" </dev/null'


class ProgramError(OSError):
    """A program ended with a status other than 0.

    `status` is as `subprocess` has it (negative: the signal), `stderr` its last words.
    """

    def __init__(self, argv: Sequence[str], status: int, stderr: bytes) -> None:
        self.argv = tuple(argv)
        self.status = status
        self.stderr = stderr[-_STDERR_TAIL_BYTES:]
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        words = self.stderr.decode(errors="replace").strip()
        super().__init__(errno.EIO, f"{argv[0]} {how}" + (f": {words}" if words else ""))

    def __str__(self) -> str:
        return str(self.strerror)


class OutputTooLongError(OSError):
    """A program wrote more than its caller would keep; it was killed, and nothing of its output is told."""

    def __init__(self, argv: Sequence[str], limit: int) -> None:
        super().__init__(errno.EFBIG, f"{argv[0]} wrote more than {limit} bytes, and was ended")

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has ended."""

    status: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process beyond its pid: `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot), so one pid in
    two lives is two identities.
    """

    pid: int
    start_ticks: int


# ── running a program to its end ────────────────────────────────────────────────────────────────────────────────────


async def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    limit: int = MAX_OUTPUT_BYTES,
) -> Finished:
    """Run a program in a session of its own and return when it has ended and its output is complete.

    `env` defaults to a PATH and a UTF-8 locale only. `limit`: bytes of stdout and of stderr that are kept at most.
    Raises ProgramError (`check`), OutputTooLongError, TimeoutError, FileNotFoundError.
    On a time-out, cancellation or too much output the program's whole process group is killed and reaped first.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(_MINIMAL_ENV if env is None else env),
        cwd=cwd,
        start_new_session=True,
    )
    stdout, stderr = (Collected(limit, partial(_kill_group, process.pid)) for _ in range(2))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(
                _feed(process.stdin, stdin), _drain(process.stdout, stdout), _drain(process.stderr, stderr)
            )
            await process.wait()
    except BaseException:
        _kill_group(process.pid)
        await process.wait()
        raise
    status = process.returncode if process.returncode is not None else -1
    return _finished(argv, status, stdout, stderr, check=check, limit=limit)


async def _feed(pipe: asyncio.StreamWriter | None, data: bytes) -> None:
    if pipe is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it wants no more of it
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _drain(pipe: asyncio.StreamReader | None, into: Collected) -> None:
    assert pipe is not None
    while chunk := await pipe.read(65536):
        into.add(chunk)


def _finished(
    argv: Sequence[str], status: int, stdout: Collected, stderr: Collected, *, check: bool, limit: int
) -> Finished:
    if stdout.is_too_long or stderr.is_too_long:
        raise OutputTooLongError(argv, limit)
    if check and status != 0:
        raise ProgramError(argv, status, stderr.take())
    return Finished(status, stdout.take(), stderr.take())


def run_sync(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    limit: int = MAX_OUTPUT_BYTES,
) -> Finished:
    """`run` for callers without an event loop: same promises."""
    until = time.monotonic() + timeout_s
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(_MINIMAL_ENV if env is None else env),
        cwd=cwd,
        start_new_session=True,
    ) as process:
        stdout, stderr = (Collected(limit, partial(_kill_group, process.pid)) for _ in range(2))
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            feeding = None if process.stdin is None else _own_end(process.stdin)
            exchange(feeding, stdin, {process.stdout.fileno(): stdout, process.stderr.fileno(): stderr}, until=until)
            process.wait(max(0.0, until - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            _kill_group(process.pid)
            raise TimeoutError(errno.ETIMEDOUT, f"{argv[0]} did not end within {timeout_s:g} s") from None
        except BaseException:
            _kill_group(process.pid)
            raise
    return _finished(argv, process.returncode, stdout, stderr, check=check, limit=limit)


def _own_end(pipe: IO[bytes]) -> int:
    """The same end of a pipe, not blocking, without its file object."""
    fd = os.dup(pipe.fileno())
    os.set_blocking(fd, False)
    pipe.close()
    return fd


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# ── programs that stay ──────────────────────────────────────────────────────────────────────────────────────────────


def spawn(
    program: Path,
    *,
    argv: Sequence[str] = (),
    fds: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, int]:
    """Start a program in a session of its own and return (pid, pidfd); the caller reaps the pid (`reap`) and closes
    the pidfd.

    `fds` maps the child's descriptor numbers to ours; every other inheritable descriptor of ours stays as it is.
    Signals are reset to their defaults.
    """
    wanted = dict(fds or {})
    if any(target in wanted.values() and wanted[target] != target for target in wanted):
        raise ValueError("fds: a target is also another target's source")
    pid = os.posix_spawn(
        program,
        [str(program), *argv],
        dict(_MINIMAL_ENV if env is None else env),
        file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for target, source in wanted.items()],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    )
    return pid, os.pidfd_open(pid)


def spawn_at_gate(
    program: Path, *, argv: Sequence[str] = (), fds: Mapping[int, int] | None = None
) -> tuple[int, int, int]:
    """As `spawn`, and the program is not executed before something is written to the third of what this returns, its
    gate, which the caller closes: (pid, pidfd, gate). Closed without a word, also by the caller's death, the process
    ends: so one that must be in a control group is in it, or gone.

    The program's standard input is /dev/null. A shell waits in its place, for a millisecond of processor time.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        given = ["-c", _GATE, "gate", str(program), *argv]
        pid, pidfd = spawn(Path("/bin/sh"), argv=given, fds={**(fds or {}), 0: reader})
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    return pid, pidfd, writer


def reap(pid: int) -> int | None:
    """Collect a child that has ended: its status as `subprocess` has it.

    None: it still runs, or is not ours to reap.
    """
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def was_killed(pidfd: int) -> bool:
    """Whether SIGKILL has ended a child of ours, which stays to be reaped. False also of one that is not ours."""
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGKILL


# ── processes by pidfd and by identity ──────────────────────────────────────────────────────────────────────────────


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a live or unreaped process. None: there is none of this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessIdentity(pid, parse_start_ticks(stat))


def parse_start_ticks(stat: bytes) -> int:
    """Field 22 of /proc/PID/stat (proc(5)); the command name in field 2 may hold blanks and parentheses."""
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def open_process(identity: ProcessIdentity) -> int | None:
    """A pidfd of exactly this process. None: it has ended (whoever has its pid now)."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if identify(identity.pid) != identity or has_ended(pidfd):
        os.close(pidfd)
        return None
    return pidfd


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended (it may be unreaped)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(pidfd: int, number: int = signal.SIGKILL) -> bool:
    """Signal the process; False when it had ended already."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


async def wait_ended(pidfd: int, *, timeout_s: float | None = None) -> None:
    """Return when the process has ended. Raises TimeoutError.

    Any number of waiters, each on its own duplicate of the pidfd.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    own = os.dup(pidfd)
    loop.add_reader(own, _resolve, ended)
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    finally:
        loop.remove_reader(own)
        os.close(own)


async def ends_soon(pidfd: int, *, within_s: float = 1.0) -> bool:
    """Whether it ends within that time: an ending process loses its sockets first, and is gone a moment later."""
    try:
        await wait_ended(pidfd, timeout_s=within_s)
    except TimeoutError:
        return False
    return True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def children(pid: int) -> Iterator[int]:
    """Direct children of a process, by a walk over /proc (works without CONFIG_PROC_CHILDREN)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = (entry / "stat").read_bytes()
                if int(stat[stat.rindex(b")") + 2 :].split()[1]) == pid:
                    yield int(entry.name)
