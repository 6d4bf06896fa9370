"""A whole platform with real containers, found by the SDK as a user's program would find it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR

import opendsec

EDGE = "sdktest"
OPENDSEC = (sys.executable, "-m", "opendsec.main")
Kill = Callable[[str], None]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Variables of a running platform that has this machine's images."""
    state = STATE_DIR.parent / f"opendsec-{EDGE}-{os.getpid()}"
    run = tmp_path_factory.mktemp("run")
    state.mkdir()
    (state / "store").symlink_to(STATE_DIR / "store")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")} | {
        "OPENDSEC_STATE_DIR": str(state),
        "OPENDSEC_RUN_DIR": str(run),
        "OPENDSEC_LISTEN": f"unix:{run}/api.sock",
        "OPENDSEC_EDGE": EDGE,
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
    }
    try:
        subprocess.run([*OPENDSEC, "up", "-d"], env=variables, check=True, timeout=120)
        yield variables
    finally:
        subprocess.run([*OPENDSEC, "down"], env=variables, check=True, timeout=120)
        shutil.rmtree(state)


@pytest.fixture
def kill(platform: Mapping[str, str]) -> Kill:
    """Kills the process of that name (`edge`, `apiserver`) without a goodbye; the supervisor starts the next."""

    def kill_now(name: str) -> None:
        status = subprocess.run(
            [*OPENDSEC, "status", "--json"], env=dict(platform), stdout=subprocess.PIPE, timeout=120
        )
        os.kill(json.loads(status.stdout)["pids"][name], signal.SIGKILL)

    return kill_now


@pytest.fixture
async def client(platform: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[opendsec.DSecClient]:
    for name in ("OPENDSEC_API_URL", "OPENDSEC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENDSEC_RUN_DIR", platform["OPENDSEC_RUN_DIR"])
    async with opendsec.DSecClient() as opened:
        yield opened
        async for status in opened.list(state="running"):
            await opened.stop(status.sandbox_id)
