"""The command line as a program, against an edge process that answers from memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

Cli = Callable[..., "subprocess.CompletedProcess[bytes]"]
START_S = 60.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables under which the command line finds the edge of this module."""
    folder = tmp_path_factory.mktemp("cli")
    socket = folder / "run/edge-local.sock"
    variables = os.environ | {
        "OPENDSEC_STATE_DIR": str(folder / "state"),
        "OPENDSEC_RUN_DIR": str(folder / "run"),
        "OPENDSEC_EDGE_BACKENDS": "dummy,fncall",
        "OPENDSEC_API_URL": f"unix:{socket}",
        "OPENDSEC_API_KEY": "",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "COLUMNS": "200",
    }
    for name in ("state", "run"):
        (folder / name).mkdir()
    log = folder / "edge.log"
    with log.open("wb") as out:
        edge = subprocess.Popen([sys.executable, "-m", "opendsec.edge"], env=variables, stderr=out)
    try:
        wait_for(socket, edge, log)
        yield variables
    finally:
        edge.terminate()
        edge.wait(60)


def wait_for(socket: Path, edge: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not socket.exists():
        assert edge.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.fixture
def cli(environment: dict[str, str]) -> Cli:
    """`cli("ls", "--json")` runs the command line; `stdin=b"…"`."""

    def run(*words: str, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "opendsec.main", *words]
        return subprocess.run(argv, input=stdin, env=environment | more, capture_output=True, timeout=120)

    return run


@pytest.fixture
def sandbox(environment: dict[str, str]) -> Iterator[str]:
    """Id of a running sandbox in which a command has run, stopped afterwards."""
    transport = httpx.HTTPTransport(uds=environment["OPENDSEC_API_URL"].removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://edge", timeout=60) as edge:
        made = edge.post("/v1/sandboxes", json={"spec": {"image": "debian", "backend": "dummy"}})
        assert made.status_code == 201, made.text
        place = f"/v1/sandboxes/{made.json()['sandbox_id']}"
        assert edge.post(f"{place}/commands", json={"argv": ["true"]}).status_code == 200
        yield made.json()["sandbox_id"]
        assert edge.delete(place).status_code == 200
