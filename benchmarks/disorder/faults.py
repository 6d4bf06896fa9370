"""What is done to the platform and to its clients while they work: SIGKILL and SIGSTOP at random moments.

Only processes of this run are touched: the platform's by their pid files, the clients as our own children.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared.platforms import Platform

from opendsec.host import processes
from opendsec.host.local import APISERVER, EDGE, SUPERVISOR

STOPPED_S = 1.0
START_S = 120.0


@dataclass(slots=True)
class Client:
    """One worker: its present process and how often it began."""

    worker: int
    process: subprocess.Popen[bytes] | None = None
    life: int = 0


@dataclass(slots=True)
class Disorder:
    """Everything that can go wrong, and what did."""

    platform: Platform
    environment: dict[str, str]
    folder: Path
    seed: int
    until: float
    clients: list[Client] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    """Which lives of which workers were killed: `w0l1`."""
    done: Counter[str] = field(default_factory=Counter)
    failed_lives: list[str] = field(default_factory=list)

    def start_client(self, client: Client) -> None:
        """One more life of a worker."""
        client.life += 1
        words = [sys.executable, "-m", "benchmarks.disorder.worker", "--image", self.platform.image]
        words += ["--worker", str(client.worker), "--life", str(client.life), "--seed", str(self.seed)]
        words += ["--until", str(self.until), "--diary", str(self.folder / f"worker-{client.worker}")]
        with (self.folder / f"worker-{client.worker}.err").open("ab") as errors:
            client.process = subprocess.Popen(words, env=self.environment, stderr=errors)

    def look_after_clients(self) -> bool:
        """Whether any still works. One that failed by itself is remembered."""
        for client in self.clients:
            if client.process is not None and client.process.poll() is not None:
                if client.process.returncode:
                    self.failed_lives.append(f"worker {client.worker}, life {client.life}: {client.process.returncode}")
                    self.killed.add(f"w{client.worker}l{client.life}")
                client.process = None
        return any(client.process is not None for client in self.clients)

    def strike(self, rng: random.Random) -> None:
        """One fault."""
        strikes: dict[str, tuple[int, Callable[[], bool]]] = {
            "edge killed": (30, lambda: self._kill(EDGE)),
            "apiserver killed": (22, lambda: self._kill(APISERVER)),
            "both killed": (8, lambda: self._kill(EDGE) and self._kill(APISERVER)),
            "supervisor killed": (5, lambda: self._kill_supervisor(rng)),
            "all three killed": (3, lambda: self._kill_all(rng)),
            "edge halted": (8, lambda: self._halt(EDGE)),
            "apiserver halted": (6, lambda: self._halt(APISERVER)),
            "client killed": (18, lambda: self._kill_client(rng)),
        }
        name = rng.choices(list(strikes), weights=[weight for weight, _ in strikes.values()])[0]
        if strikes[name][1]():
            self.done[name] += 1

    def restore(self) -> None:
        """The platform is whole again."""
        self._opendsec("up", "-d")

    # ── faults ──

    def _signal(self, name: str, number: int) -> bool:
        """By pidfd: a pid that is somebody else's by now is not signalled."""
        assert self.platform.local is not None
        with contextlib.suppress(FileNotFoundError):
            pidfd = processes.find(self.platform.local, name)
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
                os.close(pidfd)
                return True
        return False

    def _kill(self, name: str) -> bool:
        return self._signal(name, signal.SIGKILL)

    def _halt(self, name: str) -> bool:
        if not self._signal(name, signal.SIGSTOP):
            return False
        time.sleep(STOPPED_S)
        return self._signal(name, signal.SIGCONT)

    def _kill_supervisor(self, rng: random.Random) -> bool:
        if not self._kill(SUPERVISOR):
            return False
        if rng.random() < 0.5:
            self._kill(EDGE)
        time.sleep(rng.uniform(0, 2))
        self.restore()
        return True

    def _kill_all(self, rng: random.Random) -> bool:
        hit = [self._kill(name) for name in (SUPERVISOR, EDGE, APISERVER)]
        time.sleep(rng.uniform(0, 2))
        self.restore()
        return any(hit)

    def _kill_client(self, rng: random.Random) -> bool:
        client = rng.choice(self.clients)
        if client.process is None or client.process.poll() is not None:
            return False
        client.process.kill()
        client.process.wait(30)
        self.killed.add(f"w{client.worker}l{client.life}")
        self.start_client(client)
        return True

    def _opendsec(self, *words: str) -> None:
        command = [sys.executable, "-m", "opendsec.main", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode and "running already" not in done.stdout + done.stderr:
            raise RuntimeError(f"opendsec {' '.join(words)}: {done.stdout}{done.stderr}")
