"""A store of its own for each test, on the machine's own disk: EROFS files cannot be mounted from tmpfs.

OPENDSEC_TEST_DISK names a directory of another file system for it: so these tests qualify a shared one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.store.images import ImageStore


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on /var's file system, or below OPENDSEC_TEST_DISK."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir=os.environ.get("OPENDSEC_TEST_DISK", "/var/tmp")))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(disk: Path) -> ImageStore:
    """An empty store."""
    return ImageStore(disk / "store")
