"""The cache on a disk that is really full: what is there is right, what is not is not kept, and nothing is raised."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.store.loading.faulty import blob_of, pieces_of
from tests.unit.store.loading.test_cache import content_of

from opendsec.store.loading.cache import SLOT_BYTES, ChunkCache

pytestmark = [pytest.mark.root, pytest.mark.loop]


@pytest.fixture
def small(disk: Path) -> Iterator[Path]:
    """An ext4 of 8 MB."""
    subprocess.run(["truncate", "-s", "8M", disk / "image"], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk / "image"], check=True)
    (disk / "small").mkdir()
    subprocess.run(["mount", "-o", "loop", disk / "image", disk / "small"], check=True)
    yield disk / "small"
    subprocess.run(["umount", disk / "small"], check=True)


def test_a_full_disk_takes_what_it_can_by_eviction(small: Path) -> None:
    content = content_of(200)
    pieces = pieces_of(content)
    with ChunkCache(small / "cache", limit_bytes=1 << 30, reserve_bytes=0) as cache:
        blob = cache.open(*blob_of(content))
        assert all(blob.write(number, piece) for number, piece in enumerate(pieces)), "old slots make room"
        assert cache.counts.evicted_bytes > 0
        kept = blob.check_all()
        assert kept
        assert cache.counts.damaged == 0
        assert all(blob.read(number) in (None, piece) for number, piece in enumerate(pieces))


def test_a_disk_filled_by_others_is_no_error(small: Path) -> None:
    content = content_of(12)
    pieces = pieces_of(content)
    with ChunkCache(small / "cache", limit_bytes=1 << 30, reserve_bytes=0) as cache:
        blob = cache.open(*blob_of(content))
        with (small / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        assert not any(blob.write(number, piece) for number, piece in enumerate(pieces))
        assert cache.counts.refused == 12
        assert cache.used_bytes == 0
        (small / "filler").unlink()
        assert all(blob.write(number, piece) for number, piece in enumerate(pieces))
        assert cache.used_bytes == 3 * SLOT_BYTES
