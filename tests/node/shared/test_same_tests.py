"""The store's own tests pass with their stores on a shared file system as they do on a disk of this machine.

Without those of imports and exports, whose trees lie on this machine whatever the store is on, and of other loaders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.shared.conftest import NodeView

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.moosefs, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
TESTS = "tests/node/store"
NOT_STORED = (
    "importers",
    "exporters",
    "loading",
    "test_diff.py",
    "test_erofs.py",
    "test_full_disk.py",
    "test_tree_view.py",
)
"""Most of what they do is not done in the store."""


def test_they_pass(nodes: tuple[NodeView, NodeView]) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not slow", TESTS]
    words += [f"--ignore={TESTS}/{folder}" for folder in NOT_STORED]
    environment = {**os.environ, "OPENDSEC_TEST_DISK": str(nodes[0].shared)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
