"""A store of its own for each test, on the machine's own disk: EROFS files cannot be mounted from tmpfs.

OPENDSEC_TEST_DISK names a directory of another file system for the stores, as OPENDSEC_STORE does for a platform: so
these tests qualify a shared one. Trees, copies of metadata and mounts stay on the machine's disk.

OPENDSEC_TEST_EROFS names a directory whose mkfs.erofs makes all layers instead of the installed one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.store.images import ImageStore
from opendsec.store.programs import ENVIRONMENT

SHARED = os.environ.get("OPENDSEC_TEST_DISK", "")
EROFS = os.environ.get("OPENDSEC_TEST_EROFS", "")


@pytest.fixture(autouse=True)
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store looks for programs first: the parameter (`tests.erofs_versions`), or OPENDSEC_TEST_EROFS."""
    place = getattr(request, "param", "") or EROFS
    if place:
        monkeypatch.setitem(ENVIRONMENT, "PATH", f"{place}:{ENVIRONMENT['PATH']}")


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty directory on /var's file system."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(disk: Path) -> Iterator[ImageStore]:
    """An empty store, on `disk` or below OPENDSEC_TEST_DISK."""
    if not SHARED:
        yield ImageStore(disk / "store")
        return
    place = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir=SHARED))
    yield ImageStore(place / "store", scratch=disk / "scratch")
    shutil.rmtree(place)
