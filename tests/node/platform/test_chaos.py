"""A short run of the chaos benchmark: everything is killed, nothing may be false, lost or left over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.cgroup,
    pytest.mark.image,
    pytest.mark.erofs,
    pytest.mark.overlay,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
ROOT = Path(__file__).parents[3]


def test_nothing_is_false_lost_or_left_over() -> None:
    """A seed whose first eight faults are of all eight kinds, and pauses so short that these fit in."""
    options = ["--seconds", "20", "--pause", "2", "--seed", "20326992", "--workers", "2"]
    words = [sys.executable, "-m", "benchmarks.chaos", *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "\n0 findings\n" in done.stdout
