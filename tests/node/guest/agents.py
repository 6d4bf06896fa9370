"""Real guest agents for tests: each pid 1 of its own pid and mount namespaces, in its own cgroup, on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.guest.base import Exit, Output, StartCommand, StdinTaken
from opendsec.guest.channel import Channel, connect

ROOT = Path(__file__).parents[3]
PLAIN = ROOT / "src/opendsec/_native/opendsec-guest"
SANITIZED = ROOT / "native/build/asan/opendsec-guest"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
WAIT_S = 30.0


def cgroup2_root() -> Path:
    """Where cgroup2 is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    raise AssertionError("no cgroup2 mount")


def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


@dataclass
class Result:
    """What came of one command."""

    exit: Exit
    stdout: bytes
    stderr: bytes


@dataclass
class Agent:
    """One running agent. `setup` is shell text run inside its namespaces first; `root`: chroot there."""

    binary: Path
    folder: Path
    setup: str = ""
    root: str = ""
    namespaces: bool = True
    cgroup: bool = True
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def socket_path(self) -> str:
        return str(self.folder / "agent.sock")

    @property
    def cgroup_path(self) -> Path:
        return cgroup2_root() / f"guest-test-{os.getpid()}-{self.folder.name}"

    def launch(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.socket_path)
        listener.listen(8)
        fds = [listener.fileno()]
        agent = [
            "/agent" if self.root else str(self.binary),
            *(self.arguments or (f"--listen-fd={listener.fileno()}",)),
        ]
        enter = ""
        if self.cgroup:
            self.cgroup_path.mkdir()
            fds.append(os.open(self.cgroup_path, os.O_RDONLY | os.O_DIRECTORY))
            agent.append(f"--cgroup-fd={fds[-1]}")
            enter = f"echo 0 > {self.cgroup_path}/cgroup.procs && "
        inner = "exec " + (f"chroot {self.root} " if self.root else "") + " ".join(agent)
        if self.namespaces:
            script = f"mount -t proc proc /proc && {self.setup.strip() or ':'} && "
            if self.root:
                script += f"touch {self.root}/agent && mount --bind {self.binary} {self.root}/agent && "
            script += inner
            command = ["unshare", "-mpf", "--kill-child", "sh", "-c", script]
            outer = ["sh", "-c", enter + 'exec "$@"', "sh", *command]
        else:
            outer = ["sh", "-c", enter + inner]
        environ = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
        log = (self.folder / "agent.log").open("wb")
        self.process = subprocess.Popen(
            outer, pass_fds=fds, stderr=log, stdout=log, stdin=subprocess.DEVNULL, env=environ
        )
        log.close()
        listener.close()
        for fd in fds[1:]:
            os.close(fd)

    def pid(self) -> int:
        """The agent's own pid, seen from here."""
        if not self.namespaces:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        until(lambda: bool(children.read_text().split()), "the agent's process")
        return int(children.read_text().split()[0])

    def command_cgroups(self) -> list[str]:
        return sorted(path.name for path in self.cgroup_path.iterdir() if path.is_dir())

    def processes(self) -> list[int]:
        """All pids of the sandbox but the agent's."""
        found: list[int] = []
        for path in [self.cgroup_path, *(p for p in self.cgroup_path.rglob("*") if p.is_dir())]:
            with contextlib.suppress(FileNotFoundError):  # it goes while we look
                found += [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
        return [pid for pid in found if pid not in {self.pid(), self.process.pid}]

    def dirty_kb(self) -> int:
        """Private dirty memory of the agent, KiB."""
        lines = Path(f"/proc/{self.pid()}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

    def log(self) -> str:
        return (self.folder / "agent.log").read_text(errors="replace")

    async def channel(self) -> Channel:
        return await connect(self.socket_path, WAIT_S)

    def close(self) -> None:
        """End everything; the agent must not have died of itself, and the cgroup must be removable."""
        died = self.process.poll()
        if died is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)
        if self.cgroup:
            (self.cgroup_path / "cgroup.kill").write_text("1")
            until(lambda: "populated 0" in (self.cgroup_path / "cgroup.events").read_text(), "an empty cgroup")
            for path in sorted(self.cgroup_path.rglob("*"), reverse=True):
                if path.is_dir():
                    path.rmdir()
            self.cgroup_path.rmdir()
        log = self.log()
        assert "Sanitizer" not in log, log
        assert "runtime error" not in log, log
        assert died in (None, 0), f"the agent died: {died}\n{log}"


async def drain(channel: Channel, command_id: int, stdout: int = 0, stderr: int = 0) -> Result:
    """Read a command to its end, acknowledging everything, and release it."""
    parts: dict[int, list[bytes]] = {1: [], 2: []}
    totals = {1: stdout, 2: stderr}
    async for event in channel.events(command_id):
        match event:
            case Output(stream, offset, data):
                assert offset == totals[stream]
                parts[stream].append(data)
                totals[stream] += len(data)
                channel.ack(command_id, totals[1], totals[2])
            case StdinTaken():
                pass
            case Exit():
                assert (event.stdout_total, event.stderr_total) == (totals[1], totals[2])
                channel.release(command_id)
                return Result(event, b"".join(parts[1]), b"".join(parts[2]))
    raise AssertionError("events ended without Exit")


async def timed_out(run: Callable[..., Awaitable[Result]], script: str, *, ready: bytes, **more: object) -> Result:
    """What came of a script that was overtaken by its time limit after it had said it was ready: a slow machine gets
    longer limits."""
    for timeout_ms in (200, 1000, 5000):
        result = await run(script, timeout_ms=timeout_ms, **more)
        assert result.exit.reason == 1
        if ready in result.stdout:
            return result
    raise AssertionError(f"not even ready within 5 s: {script}")


Connect = Callable[..., Awaitable[Channel]]
"""The `connect` fixture: a channel to an agent, closed at the end."""


class Shell:
    """Runs command lines on one channel, with fresh ids."""

    def __init__(self, channel: Channel, first_id: int = 1) -> None:
        self.channel = channel
        self.next_id = first_id

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    async def run(self, script: str, *, env: Mapping[str, str] = ENV, **more: object) -> Result:
        command_id = self.new_id()
        await self.channel.start(command_id, StartCommand(script=script, env=env, **more))  # type: ignore[arg-type]
        return await drain(self.channel, command_id)

    async def argv(self, *argv: str, env: Mapping[str, str] = ENV, **more: object) -> Result:
        command_id = self.new_id()
        await self.channel.start(command_id, StartCommand(argv=argv, env=env, **more))  # type: ignore[arg-type]
        return await drain(self.channel, command_id)
