"""Run the few external programs images are made with: mkfs.erofs, mmdebstrap, zstd, skopeo.

Output is read while the program runs, so that progress can be shown and the end of it kept for the error. A program
that takes too long is killed with all its descendants (it gets a session of its own). posix_spawn(3), so the caller's
size costs nothing. It refuses shells and inherits nothing but the environment it is given.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from opendsec.errors import HostCapabilityError, NodeError

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
"""What programs see of our environment: nothing, so the same input gives the same output."""

PACKAGES = {
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "zstd": "zstd",
    "skopeo": "skopeo",
    "qemu-img": "qemu-utils",
    "swtpm": "swtpm",
    "syslinux": "syslinux",
    "mformat": "mtools",
    "mcopy": "mtools",
    "sfdisk": "fdisk",
    "mkfs.ext4": "e2fsprogs",
    "debugfs": "e2fsprogs",
    "depmod": "kmod",
    "qemu-system-x86_64": "qemu-system-x86",
    "prlimit": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "apt-cache": "apt",
    "objcopy": "binutils",
    "nice": "coreutils",
    "env": "coreutils",
}
"""Debian and Ubuntu packages that hold the programs."""

_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended: its exit status (negative: the signal) and the last lines it printed."""

    status: int
    tail: tuple[str, ...]


def find_program(name: str) -> str:
    """Absolute path of a program. HostCapabilityError naming the package that holds it."""
    path = shutil.which(name, path=ENVIRONMENT["PATH"])
    if path is None:
        package = PACKAGES.get(name, name)
        raise HostCapabilityError(
            f"the program {name} is not installed",
            detail={"probe": name, "package": package},
            remedy=f"apt-get install {package}",
        )
    return path


def run_program(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] = ENVIRONMENT,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    output: Path | None = None,
    fds: Mapping[int, int] | None = None,
) -> Ended:
    """Run to the end; standard output and error are one stream of lines (`\\r` ends a line too).

    `fds`: descriptors the program gets, by the number they have there (3 or more); nobody else started meanwhile does.

    `output`: a new file that gets standard output as it is; the lines are of standard error alone then.

    `on_line` gets each line, `on_tick` is called about five times a second. NodeError when `timeout_s` passes.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(reader, "rb", buffering=0) as said:
        try:
            with output.open("xb") if output is not None else nullcontext() as file:
                stdout = writer if file is None else file.fileno()
                pid = _spawn(argv, environment, stdin=None, stdout=stdout, stderr=writer, fds=fds)
        finally:
            os.close(writer)
        with _reaped(pid) as wait:
            lines = _Lines(on_line)
            _pump(said, lines, deadline=time.monotonic() + timeout_s, on_tick=on_tick, program=argv[0])
            status = wait()
    return Ended(status=status, tail=lines.finish())


@contextmanager
def filtered(argv: Sequence[str], source_fd: int) -> Iterator[BinaryIO]:
    """Standard output of a program that reads `source_fd`. ChildProcessError if it failed and all was read."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(reader, "rb") as output:
        try:
            pid = _spawn(argv, ENVIRONMENT, stdin=source_fd, stdout=writer, stderr=None)
        finally:
            os.close(writer)
        with _reaped(pid) as wait:
            yield output
            at_end = output.read(1) == b""
            if at_end and (status := wait()) != 0:
                raise ChildProcessError(f"{Path(argv[0]).name} ended with status {status}")


def _spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | None,
    stdout: int,
    stderr: int | None,
    fds: Mapping[int, int] | None = None,
) -> int:
    with ExitStack() as stack:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, null)
        given = _out_of_the_way(fds or {}, stack)
        return os.posix_spawn(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, null if stderr is None else stderr, 2),
                *((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in given.items()),
            ],
            setsid=True,
        )


def _out_of_the_way(fds: Mapping[int, int], stack: ExitStack) -> dict[int, int]:
    """The same files under numbers that none of the program's has: a process with many open files has any number, and
    one would be overwritten before it is passed on."""
    given = {}
    for theirs, ours in fds.items():
        given[theirs] = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, max(fds) + 1)
        stack.callback(os.close, given[theirs])
    return given


@contextmanager
def _reaped(pid: int) -> Iterator[Callable[[], int]]:
    """Wait for the child in every case; leaving early kills its whole session first."""
    waited = False

    def wait() -> int:
        nonlocal waited
        _, status = os.waitpid(pid, 0)
        waited = True
        return os.waitstatus_to_exitcode(status)

    try:
        yield wait
    finally:
        if not waited:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _pump(
    output: BinaryIO, lines: _Lines, *, deadline: float, on_tick: Callable[[], None] | None, program: str
) -> None:
    poll = select.poll()
    poll.register(output, selectors.EVENT_READ)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise NodeError(f"{Path(program).name} did not end in time and was killed", retryable=True)
        if poll.poll(min(remaining, 0.2) * 1000):
            chunk = os.read(output.fileno(), 65536)
            if not chunk:
                return
            lines.feed(chunk)
        if on_tick is not None:
            on_tick()


class _Lines:
    """Bytes in, lines out; remembers the last few."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def feed(self, chunk: bytes) -> None:
        *whole, self._partial = (self._partial + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            self._take(line)

    def finish(self) -> tuple[str, ...]:
        self._take(self._partial)
        return tuple(self._tail)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").strip()
        if not text:
            return
        self._tail.append(text)
        if self._on_line is not None:
            self._on_line(text)
