"""A store of its own for each test, on the machine's own disk: EROFS files cannot be mounted from tmpfs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.store.images import ImageStore


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on /var's file system."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(disk: Path) -> ImageStore:
    """An empty store."""
    return ImageStore(disk / "store")
