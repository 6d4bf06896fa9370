"""The sync SDK is what the generator makes of the async one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "unasync.py"


def test_sync_sdk_is_current() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
