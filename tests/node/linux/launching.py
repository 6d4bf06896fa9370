"""A place to launch test sandboxes in: a small tree as the layer, `probe_guest.c` as the agent, cgroups of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opendsec.linux.launch import Bind, IdMap, LaunchPlan, Tmpfs
from opendsec.linux.mount import mountinfo

OUTSIDE = 268435456
DOCKER_CAPS = 0xA80425FB
CAP_SYS_PTRACE = 1 << 19
PROBE_SOURCE = Path(__file__).with_name("probe_guest.c")
DEADLINE_S = 30.0


def build_probe(directory: Path) -> Path:
    program = directory / "probe_guest"
    subprocess.run(["gcc", "-static", "-O1", "-Wall", "-Wextra", "-o", program, PROBE_SOURCE], check=True, timeout=120)
    program.chmod(0o711)
    return program


def cgroup2_root() -> Path:
    return Path(next(entry.target for entry in mountinfo() if entry.fstype == "cgroup2"))


def cgroup1_root(controller: str) -> Path | None:
    found = (entry for entry in mountinfo() if entry.fstype == "cgroup" and controller in entry.super_options)
    return next((Path(entry.target) for entry in found), None)


@dataclass(slots=True)
class Place:
    """What one sandbox needs of its own."""

    state: Path
    cgroup: Path
    plan: LaunchPlan

    @property
    def upper(self) -> Path:
        return self.state / "upper"

    def is_blocked(self) -> bool:
        """Its process waits for room in a pipe (see `Site.blocking_fd`)."""
        try:
            return any("pipe_write" in Path(f"/proc/{pid}/wchan").read_text() for pid in self.pids())
        except (FileNotFoundError, ProcessLookupError):
            return False

    def pids(self) -> list[int]:
        return [int(word) for word in (self.cgroup / "cgroup.procs").read_text().split()]

    async def ask(self, line: str) -> str:
        """One request to the probe; its answer, `ok …` or `errno N`."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            async with asyncio.timeout(DEADLINE_S):
                await loop.sock_connect(connection, str(self.state / "agent.sock"))
                await loop.sock_sendall(connection, line.encode())
                answer = b""
                while chunk := await loop.sock_recv(connection, 65536):
                    answer += chunk
        return answer.decode()

    async def said(self, line: str) -> str:
        """The probe's answer to something that must work."""
        answer = await self.ask(line)
        assert answer.startswith("ok "), f"{line}: {answer}"
        return answer[3:]


class Site:
    """Makes places; on exit ends what runs in them and removes them, or fails when a cgroup cannot be removed."""

    def __init__(self, root: Path, probe: Path) -> None:
        self.root = root
        self._cgroups = cgroup2_root() / f"opendsec-test-launch-{os.getpid()}"
        self._probe = probe
        self._stack = ExitStack()
        self.places: list[Place] = []

    def __enter__(self) -> Self:
        self._cgroups.mkdir()
        self._stack.callback(self._cgroups.rmdir)
        self.lower = self.root / "lower"
        for name in ("proc", "dev", "sys", "tmp", "etc"):
            (self.lower / name).mkdir(parents=True)
        (self.lower / "tmp").chmod(0o1777)
        (self.lower / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
        (self.lower / "etc" / "resolv.conf").symlink_to("/run/nowhere")
        shutil.copy(self._probe, self.lower / "probe")
        (self.lower / "probe").chmod(0o4755)
        self.dev = self.root / "dev"
        for name in ("pts", "shm"):
            (self.dev / name).mkdir(parents=True)
        os.mknod(self.dev / "null", 0o20666, os.makedev(1, 3))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            for place in self.places:
                (place.cgroup / "cgroup.kill").write_text("1")
            for place in self.places:
                remove_cgroup(place.cgroup)

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        return self.keep(os.open(path, flags | os.O_CLOEXEC))

    def blocking_fd(self) -> int:
        """A full pipe: whoever writes to it waits, so a start that has it as a v1 cgroup stops exactly there."""
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while os.write(writing, bytes(4096)):
                pass
        os.set_blocking(writing, True)
        self.keep(reading)
        return self.keep(writing)

    def keep(self, fd: int) -> int:
        """Close it on exit."""
        self._stack.callback(os.close, fd)
        return fd

    def place(self, **changes: Any) -> Place:
        """A new place; `changes` replace fields of its plan."""
        name = f"s{len(self.places)}"
        state, cgroup = self.root / name, self._cgroups / name
        for directory in ("upper", "work"):
            (state / directory).mkdir(parents=True)
        cgroup.mkdir()
        for file in ("", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(cgroup / file, OUTSIDE, OUTSIDE)
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(state / "agent.sock"))
        listener.listen(8)
        fields: dict[str, Any] = {
            "lower": (self.open(self.lower),),
            "upper": state / "upper",
            "work": state / "work",
            "idmap": IdMap(0, OUTSIDE, 65536),
            "cgroup2": self.open(cgroup),
            "listen": listener.fileno(),
            "guest": self.open(self._probe),
            "binds": (Bind(fd=self.open(self.dev), target="/dev", devices=True),),
            "tmpfs": (Tmpfs(target="/dev/shm", options="mode=1777,size=1m"),),
            "masks": ("/proc/uptime", "/proc/bus", "/proc/not-there"),
            "caps": DOCKER_CAPS | CAP_SYS_PTRACE,
        }
        place = Place(state, cgroup, LaunchPlan(**(fields | changes)))
        self.places.append(place)
        return place


def wait_until(condition: Any, what: str, *, within_s: float = DEADLINE_S) -> None:
    """Poll until true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.002)


def remove_cgroup(directory: Path) -> None:
    """Remove it and its children once their last process is gone."""

    def removed() -> bool:
        try:
            for child in directory.iterdir():
                if child.is_dir():
                    child.rmdir()
            directory.rmdir()
        except OSError:
            return False
        return True

    wait_until(removed, f"{directory} is empty")
