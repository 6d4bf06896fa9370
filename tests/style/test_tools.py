"""The tools every change must pass, run as tests: format, lint, types, import contracts, spelling, generated code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOOLS = {
    "ruff": [sys.executable, "-m", "ruff", "check"],
    "format": [sys.executable, "-m", "ruff", "format", "--check"],
    "mypy": [sys.executable, "-m", "mypy"],
    "imports": [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
    "spelling": [sys.executable, "-m", "codespell_lib"],
    "cli reference": [sys.executable, "scripts/cli_reference.py", "--check"],
    "backends table": [sys.executable, "scripts/backends_table.py", "--check"],
    "unasync": [sys.executable, "scripts/unasync.py", "--check"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", TOOLS)
def test_tool_is_content(tool: str) -> None:
    done = subprocess.run(TOOLS[tool], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
