"""A whole platform with real containers, started and stopped by the command line itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.capabilities import STATE_DIR

NAME = "clitest"
OPENDSEC = (sys.executable, "-m", "opendsec.main")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables under which the command line finds a running platform with this machine's images and kernels."""
    state = STATE_DIR.parent / f"opendsec-{NAME}-{os.getpid()}"
    run = tmp_path_factory.mktemp("run")
    state.mkdir()
    for name in ("store", "kernels"):
        (state / name).symlink_to(STATE_DIR / name)
    variables = os.environ | {
        "OPENDSEC_STATE_DIR": str(state),
        "OPENDSEC_RUN_DIR": str(run),
        "OPENDSEC_LISTEN": f"unix:{run}/api.sock",
        "OPENDSEC_EDGE": NAME,
        "OPENDSEC_EDGE_CGROUP": f"opendsec-{NAME}",
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "TERM": "xterm",
    }
    for name in ("OPENDSEC_API_URL", "OPENDSEC_API_KEY"):
        variables.pop(name, None)
    try:
        subprocess.run([*OPENDSEC, "up", "-d"], env=variables, check=True, timeout=120)
        yield variables
    finally:
        subprocess.run([*OPENDSEC, "down"], env=variables, check=True, timeout=120)
        shutil.rmtree(state)
