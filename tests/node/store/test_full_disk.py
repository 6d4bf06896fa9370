"""A disk that fills up at any point: what was published stays, nothing half-written is seen, and room can be made."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.errors import DiskFullError
from opendsec.model.image import ImageConfig
from opendsec.store.disk_changes import make_overlay
from opendsec.store.fsck import check
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.leases import Leases

pytestmark = [pytest.mark.root, pytest.mark.loop]


@pytest.fixture
def small(disk: Path) -> Iterator[Path]:
    """An ext4 of 8 MiB."""
    (disk / "image").write_bytes(b"")
    os.truncate(disk / "image", 8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m0", "-N2000", disk / "image"], check=True, timeout=120)
    place = disk / "small"
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", disk / "image", place], check=True, timeout=120)
    yield place
    subprocess.run(["umount", place], check=True, timeout=120)


def publish(store: ImageStore, name: str, seed: int, *, size: int = 200_000) -> None:
    content = bytes([seed]) * size
    with store.staging() as work:
        (work / "meta").write_bytes(b"meta %d" % seed)
        (work / "data").write_bytes(content)
        store.publish(
            name, layers=[store.stage_layer(work / "meta", work / "data")], config=ImageConfig(), replace=True
        )


def publish_for_ever(store: ImageStore, numbers: Iterator[int]) -> None:
    for number in numbers:
        publish(store, f"image-{number}", number)


def fill(place: Path, leave: int) -> Path:
    """A file that takes all room but so many blocks."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        size = file.tell() // 4096 * 4096
        file.truncate(max(0, size - leave * 4096))
        os.fsync(file.fileno())
    return filler


def test_publish_until_it_is_full_then_make_room(small: Path) -> None:
    store = ImageStore(small / "store")
    numbers = itertools.count(1)
    with pytest.raises(DiskFullError, match="no space left") as caught:
        publish_for_ever(store, numbers)
    assert "opendsec image gc" in caught.value.remedy
    published = next(numbers) - 2
    assert 10 < published < 99
    assert sorted(image.name for image in store.list()) == sorted(f"image-{n}" for n in range(1, published + 1))
    assert list((store.root / "staging").iterdir()) == []
    assert check(store).findings == ()
    fill(small, 0)
    for number in range(1, published):
        store.remove(f"image-{number}")
    done = collect(store, grace_s=0)
    assert done.size_bytes > 200_000 * (published - 1)
    publish(store, "image-100", 100)
    assert check(store).findings == ()


def test_so_little_room_that_any_step_may_fail(small: Path, tmp_path: Path) -> None:
    store = ImageStore(small / "store")
    publish(store, "x", 200, size=100)
    failed = succeeded = 0
    for leave in range(24):
        before = store.get("x").digest
        filler = fill(small, leave)
        try:
            publish(store, "x", leave + 1, size=20_000)
            succeeded += 1
            assert store.get("x").digest != before
        except DiskFullError:
            failed += 1
            assert store.get("x").digest == before
        assert check(store).findings == ()
        assert list((store.root / "staging").iterdir()) == []
        collect(store, grace_s=0)
        assert check(store).findings == ()
        filler.unlink()
    assert failed > 3
    assert succeeded > 3


def test_a_lease_that_cannot_be_written_is_an_error_and_the_old_one_stays(small: Path, tmp_path: Path) -> None:
    store = ImageStore(small / "store")
    for number in range(30):
        publish(store, "x", number + 1, size=100)
        Leases(store.layout, tmp_path).take(store.get("x").layers[0])
    publish(store, "y", 99, size=100)
    filler = fill(small, 0)
    with pytest.raises(DiskFullError):
        Leases(store.layout, tmp_path).take(store.get("y").layers[0])
    filler.unlink()
    collect(store, grace_s=0)
    assert len(list((store.root / "data/sha256").iterdir())) == 31


def test_a_disk_without_room_for_an_overlay_is_named(small: Path) -> None:
    with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    with pytest.raises(DiskFullError):
        make_overlay(small / "overlay", 1 << 30)
