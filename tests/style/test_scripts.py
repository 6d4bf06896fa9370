"""The shell scripts parse, may be executed, and stop at the first failure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / ".ci").iterdir()]
    if path.is_file() and not path.suffix
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_sound(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n#")
    assert "\nset -euo pipefail\n" in text
    assert os.access(ROOT / name, os.X_OK)
    done = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
