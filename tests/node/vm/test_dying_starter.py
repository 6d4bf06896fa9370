"""Who starts a VMM may be killed at any moment: what is in no control group yet is gone, for nobody would find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.linux import process

STARTER = Path(__file__).with_name("dying_starter.py")


def gone(pid: int, *, within_s: float = 20.0) -> bool:
    """Whether it ends by itself; ended in any case."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        found = process.identify(pid)
        if found is None:
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ods-", dir="/run") as path:  # short enough for sockets
        yield Path(path)


@pytest.mark.root
@pytest.mark.qemu
@pytest.mark.timeout(120)
def test_a_qemu_in_no_group_ends_with_its_starter(directory: Path) -> None:
    said = subprocess.run([sys.executable, STARTER, directory], capture_output=True, timeout=100, check=False)
    assert said.returncode == -signal.SIGKILL, said.stderr.decode()
    assert gone(int(said.stdout))


def test_what_waits_at_a_gate_has_executed_nothing_and_goes_on_when_told(tmp_path: Path) -> None:
    made = tmp_path / "it's made"
    pid, pidfd, gate = process.spawn_at_gate(Path("/bin/touch"), argv=[str(made)])
    try:
        time.sleep(0.2)
        assert not process.has_ended(pidfd)
        assert not made.exists()
        os.write(gate, b"go\n")
        os.waitpid(pid, 0)
        assert made.exists()
    finally:
        os.close(gate)
        os.close(pidfd)


def test_what_waits_at_a_gate_that_is_closed_ends(tmp_path: Path) -> None:
    made = tmp_path / "made"
    pid, pidfd, gate = process.spawn_at_gate(Path("/bin/touch"), argv=[str(made)])
    os.close(gate)
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    assert os.waitstatus_to_exitcode(status) == 1
    assert not made.exists()
