"""`down` with an edge that runs and says nothing: it is replaced, and everything is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from opendsec.host import processes, stopping
from opendsec.host.local import EDGE, SUPERVISOR, chosen, lock

pytestmark = pytest.mark.anyio


async def test_a_silent_edge_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "EDGE_RETURNS_S", 8.0)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")}
    environment = {
        **kept,
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "OPENDSEC_STATE_DIR": str(tmp_path / "state"),
        "OPENDSEC_RUN_DIR": str(tmp_path / "run"),
        "OPENDSEC_LISTEN": f"unix:{tmp_path}/api.sock",
        "OPENDSEC_EDGE_BACKENDS": "dummy",
    }
    up = [sys.executable, "-m", "opendsec.main", "up", "-d"]
    subprocess.run(up, env=environment, check=True, timeout=120, stdout=subprocess.DEVNULL)
    local = chosen(environment)
    await processes.let_go(local, SUPERVISOR)
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    edge = processes.pid_of(local, EDGE)
    assert edge is not None
    os.kill(edge, signal.SIGSTOP)
    with lock(local):
        stopped = await stopping.stop_platform(local, environment)
    assert (stopped.processes, stopped.failed) == (2, ())
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        assert Path(f"/proc/{edge}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert processes.pid_of(local, EDGE) is None
