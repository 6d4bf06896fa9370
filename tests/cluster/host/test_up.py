"""`up`, `down` and `status` as a user has them: real processes, the in-memory backend, killed in every way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.ports import free_port

ROOT = Path(__file__).parents[3]


def is_free(port: int) -> bool:
    """Whether one could listen there."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Machine:
    """The `opendsec` command with directories of its own."""

    folder: Path
    port: int
    backends: str = "dummy"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENDSEC_")}
        return {
            **kept,
            "PYTHONPATH": str(ROOT / "src"),
            "OPENDSEC_RUN_DIR": str(self.run_dir),
            "OPENDSEC_STATE_DIR": str(self.folder / "state"),
            "OPENDSEC_LISTEN": f"127.0.0.1:{self.port}",
            "OPENDSEC_EDGE_BACKENDS": self.backends,
        }

    def opendsec(self, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "opendsec.main", *words]
        environment = {**self.environment, **changed}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)

    def json(self, *words: str) -> Any:
        done = self.opendsec(*words, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def client(self) -> httpx.Client:
        found = json.loads((self.run_dir / "local.json").read_bytes())
        headers = {"Authorization": f"Bearer {found['api_key']}"}
        return httpx.Client(base_url=found["api_url"], headers=headers, timeout=20)

    def pid(self, name: str) -> int:
        return int((self.run_dir / f"{name}.pid").read_text().split()[0])


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Stopped at the end, whatever the test did."""
    machine = Machine(tmp_path, free_port())
    try:
        yield machine
    finally:
        stopped = machine.opendsec("down")
        assert stopped.returncode == 0, stopped.stderr
        assert not machine.run_dir.exists()


def until(check: Callable[[], Any], *, timeout_s: float = 60.0) -> float:
    """Seconds until `check` is true."""
    begun = time.monotonic()
    while not check():
        assert time.monotonic() < begun + timeout_s
        time.sleep(0.01)
    return time.monotonic() - begun


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_up_down_and_what_they_say(machine: Machine) -> None:
    before = machine.opendsec("status")
    assert (before.returncode, "opendsec up -d" in before.stdout) == (3, True)
    started = machine.opendsec("up", "-d")
    assert started.returncode == 0, started.stderr
    assert f"http://127.0.0.1:{machine.port}" in started.stdout
    assert (machine.run_dir / "local.json").stat().st_mode & 0o777 == 0o600
    again = machine.opendsec("up", "-d")
    assert (again.returncode, "running already" in again.stdout) == (0, True)
    assert machine.opendsec("up").returncode == 1
    report = machine.json("status")
    assert report["ready"]
    assert report["node"]["backends"]["dummy"]["available"]
    with machine.client() as client:
        for _ in range(3):
            made = client.post("/v1/sandboxes", json={"spec": {"image": "debian", "backend": "dummy"}})
            assert made.status_code == 201
    pids = [machine.pid(name) for name in ("supervisor", "apiserver", "edge")]
    stopped = machine.json("down")
    assert (stopped["sandboxes"], stopped["processes"], stopped["failed"]) == (3, 2, [])
    until(lambda: not any(alive(pid) for pid in pids))
    assert not machine.run_dir.exists()
    assert "nothing to stop" in machine.opendsec("down").stdout


def test_a_restart_keeps_settings_and_key(machine: Machine) -> None:
    machine.opendsec("up", "-d", "--edge-name", "other")
    with machine.client() as client:
        before = [machine.pid(name) for name in ("supervisor", "apiserver", "edge")]
        again = machine.opendsec("up", "-d", "--restart", OPENDSEC_EDGE_BACKENDS="", OPENDSEC_LISTEN="")
        assert again.returncode == 0, again.stderr
        after = [machine.pid(name) for name in ("supervisor", "apiserver", "edge")]
        assert not set(before) & set(after)
        until(lambda: not any(alive(pid) for pid in before))
        assert client.get("/v1/sandboxes").status_code == 200
    assert machine.json("status")["node"]["backends"]["dummy"]["available"]
    assert (machine.run_dir / "edge-other.sock").exists()


def test_the_key_stays_the_same_while_it_works(machine: Machine) -> None:
    machine.opendsec("up", "-d")
    first = json.loads((machine.run_dir / "local.json").read_bytes())
    os.kill(machine.pid("supervisor"), signal.SIGKILL)
    started = machine.opendsec("up", "-d")
    assert started.returncode == 0, started.stderr
    assert json.loads((machine.run_dir / "local.json").read_bytes()) == first
    with machine.client() as client:
        assert len(client.get("/v1/keys").json()["items"]) == 1


@pytest.mark.parametrize("victim", ["apiserver", "edge"])
def test_what_is_killed_is_back_within_seconds(machine: Machine, victim: str) -> None:
    machine.opendsec("up", "-d")
    with machine.client() as client:
        for _ in range(2):
            killed = machine.pid(victim)
            os.kill(killed, signal.SIGKILL)

            def answers() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/v1/sandboxes").status_code == 200
                return False

            until(answers)
            until(lambda killed=killed: machine.pid(victim) != killed)  # type: ignore[misc]


def test_down_works_after_kill_9_of_everything(machine: Machine) -> None:
    machine.opendsec("up", "-d")
    with machine.client() as client:
        client.post("/v1/sandboxes", json={"spec": {"image": "debian", "backend": "dummy"}})
    pids = [machine.pid(name) for name in ("supervisor", "apiserver", "edge")]
    os.kill(pids[0], signal.SIGKILL)
    stopped = machine.json("down")
    assert (stopped["sandboxes"], stopped["processes"]) == (1, 2)
    assert not any(alive(pid) for pid in pids[1:])
    machine.opendsec("up", "-d")
    for name in ("supervisor", "apiserver", "edge"):
        os.kill(machine.pid(name), signal.SIGKILL)
    assert machine.json("down")["failed"] == []


def test_a_start_that_fails_says_why_and_leaves_nothing(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", machine.port)):
        failed = machine.opendsec("up", "-d")
    assert failed.returncode != 0
    assert f"listen: cannot listen on 127.0.0.1:{machine.port}: Address already in use" in failed.stderr
    assert "--listen" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not machine.run_dir.exists()
    wrong = machine.opendsec("up", "-d", OPENDSEC_EDGE_BACKENDS="telepathy")
    assert wrong.returncode != 0
    assert "OPENDSEC_EDGE_BACKENDS" in wrong.stderr
    bad = machine.opendsec("up", "-d", "--listen", "nowhere")
    assert bad.returncode != 0
    assert "listen" in bad.stderr
    assert machine.opendsec("up", "-d").returncode == 0


def test_a_start_that_fails_over_what_was_killed_does_not_forget_it(machine: Machine) -> None:
    machine.opendsec("up", "-d")
    with machine.client() as client:
        client.post("/v1/sandboxes", json={"spec": {"image": "debian", "backend": "dummy"}})
    for name in ("supervisor", "apiserver", "edge"):
        os.kill(machine.pid(name), signal.SIGKILL)
    until(lambda: is_free(machine.port))  # threads hold the socket a moment longer than the process lives
    with socket.create_server(("127.0.0.1", machine.port)):
        assert machine.opendsec("up", "-d").returncode != 0
    assert (machine.run_dir / "up.json").exists()
    assert machine.json("down")["failed"] == []
    assert not machine.run_dir.exists()
    assert not list((machine.folder / "state" / "edge" / "local" / "sandboxes").glob("*/box"))


def test_a_pid_of_somebody_else_is_never_signalled(machine: Machine) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as stranger:
        machine.run_dir.mkdir(parents=True)
        for name in ("supervisor", "apiserver", "edge"):
            (machine.run_dir / f"{name}.pid").write_text(f"{stranger.pid} 12345")
        assert machine.opendsec("down").returncode == 0
        assert stranger.poll() is None
        stranger.kill()


def test_the_foreground_ends_with_everything_on_sigterm(machine: Machine) -> None:
    command = [sys.executable, "-m", "opendsec.main", "up"]
    with subprocess.Popen(
        command, env=machine.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert b"is ready" in process.stdout.readline()
        edge = machine.pid("edge")
        process.send_signal(signal.SIGINT)
        assert b"Stopped" in process.stdout.readline()
        assert process.wait(60) == 0
    assert not alive(edge)


def test_down_finds_a_platform_whose_run_directory_was_lost(machine: Machine) -> None:
    assert machine.opendsec("up", "-d").returncode == 0
    with machine.client() as client:
        assert client.post("/v1/sandboxes", json={"spec": {"image": "debian", "backend": "dummy"}}).status_code == 201
    pids = [machine.pid(name) for name in ("supervisor", "apiserver", "edge")]
    shutil.rmtree(machine.run_dir)
    stopped = machine.json("down")
    assert (stopped["processes"], stopped["failed"]) == (2, [])
    until(lambda: not any(alive(pid) for pid in pids))
    assert is_free(machine.port)
    assert machine.json("down")["processes"] == 0
