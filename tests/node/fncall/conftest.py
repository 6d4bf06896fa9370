"""One store with `debian` and `languages` for all of these tests, and for each module a ground to make engines on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.node.fncall.places import LANGUAGES, Ground, borrow, ground, make_languages

from opendsec.store.images import ImageStore


@pytest.fixture(scope="session")
def store() -> Iterator[ImageStore]:
    """On the machine's disk."""
    disk = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    made = ImageStore(disk / "store")
    borrow(made, "debian")
    yield made
    shutil.rmtree(disk)


@pytest.fixture(scope="module")
async def place(store: ImageStore) -> AsyncIterator[Ground]:
    """With the machine's `debian`."""
    async with ground(store, [store.get("debian")]) as made:
        yield made


@pytest.fixture(scope="module")
async def languages(store: ImageStore) -> AsyncIterator[Ground]:
    """With compilers and interpreters."""
    image = store.get(LANGUAGES) if LANGUAGES in store.names() else make_languages(store)
    async with ground(store, [image]) as made:
        yield made
