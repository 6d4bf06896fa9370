"""Which files of an image get drives of their own, the disk of the others, and how long it stays."""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from pathlib import Path

import pytest

from opendsec.backends.microvm_layers import PACKED_FILE, LayerDisks, LayerDrives, layer_drives, smallest, write_disk
from opendsec.errors import StartError
from opendsec.model.image import Layer
from opendsec.store.loading.base import LayerFiles
from opendsec.vm.firecracker import MAX_DRIVES
from opendsec.vm.qemu_drives import HEAD_SECTORS, SECTOR, Part

pytestmark = pytest.mark.anyio


def image(root: Path, count: int) -> tuple[list[Layer], list[LayerFiles]]:
    """Layers of two files; the later, the larger."""
    layers, files = [], []
    for number in range(count):
        meta, data = root / f"{number}.meta", root / f"{number}.data"
        meta.write_bytes(bytes([number]) * (4096 + number))
        data.write_bytes(bytes([100 + number]) * (100_000 + 1000 * number))
        layers.append(Layer(digest=f"sha256:{number:064x}", size_bytes=104_096))
        files.append(LayerFiles(meta=meta, data=data))
    return layers, files


def test_few_layers_are_drives_as_they_are(tmp_path: Path) -> None:
    layers, files = image(tmp_path, 6)
    found = layer_drives(layers, files, room=MAX_DRIVES - 1)
    assert len(found.own) == 12
    assert (found.packed, found.key) == ((), "")
    assert found.given(tmp_path) == found.own
    assert layer_drives(*image(tmp_path, 30), room=None).packed == ()


@pytest.mark.parametrize("count", [7, 12, 32, 70])
def test_the_largest_files_stay_drives_of_their_own(tmp_path: Path, count: int) -> None:
    layers, files = image(tmp_path, count)
    found = layer_drives(layers, files, room=MAX_DRIVES - 1)
    given = found.given(tmp_path)
    assert len(given) == MAX_DRIVES - 1
    assert all(drive.read_only for drive in given)
    assert [drive.parted for drive in given] == [False] * (MAX_DRIVES - 2) + [True]
    names = {drive.name for drive in found.own} | {part.name for part in found.packed}
    assert names == {f"l{number}-{kind}" for number in range(count) for kind in ("meta", "data")}
    assert max(part.size for part in found.packed) <= min(drive.path.stat().st_size for drive in found.own)


def test_too_many_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="the image has 142 files, and a machine has room for 140"):
        layer_drives(*image(tmp_path, 71), room=MAX_DRIVES - 1)


def test_of_equal_ones_the_choice_is_always_the_same() -> None:
    assert smallest({"a": 5, "b": 5, "c": 1, "d": 5}, 2) == {"c", "a"}


def test_another_layer_is_another_disk(tmp_path: Path) -> None:
    layers, files = image(tmp_path, 7)
    other = [Layer(digest="sha256:" + "f" * 64, size_bytes=1), *layers[1:]]
    keys = {layer_drives(each, files, room=room).key for each in (layers, other) for room in (5, 6)}
    assert len(keys) == 4


def test_the_disk_holds_each_file_where_its_table_says(tmp_path: Path) -> None:
    drives = layer_drives(*image(tmp_path, 7), room=5)
    write_disk(tmp_path / "disk", drives.packed)
    disk = (tmp_path / "disk").read_bytes()
    assert disk[SECTOR : SECTOR + 8] == disk[-SECTOR : -SECTOR + 8] == b"EFI PART"
    table = disk[2 * SECTOR : 34 * SECTOR]
    assert struct.unpack_from("<I", disk, SECTOR + 88) == (zlib.crc32(table),)
    for number, part in enumerate(drives.packed):
        entry = table[128 * number : 128 * (number + 1)]
        first, last = struct.unpack_from("<QQ", entry, 32)
        assert entry[56:].decode("utf-16-le").rstrip("\0") == part.name
        content = disk[first * SECTOR : (last + 1) * SECTOR]
        assert content == Path(part.path).read_bytes().ljust(len(content), b"\0")
        assert first >= HEAD_SECTORS


def test_a_file_that_is_not_as_long_as_it_was_makes_no_disk(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(4096))
    with pytest.raises(OSError, match="4096 bytes and was said to have 8192"):
        write_disk(tmp_path / "disk", [Part(name="l0-meta", path=str(tmp_path / "short"), size=8192)])


async def test_it_is_made_once_and_stays_while_anybody_holds_it(tmp_path: Path) -> None:
    disks = LayerDisks(tmp_path / "layers", most_bytes=0)
    disks.open()
    drives = layer_drives(*image(tmp_path, 7), room=5)
    homes = [tmp_path / f"home{number}" for number in range(3)]
    for home in homes:
        home.mkdir()
    await asyncio.gather(*(disks.hold(drives, home) for home in homes))
    await disks.hold(drives, homes[0])
    inodes = {(home / PACKED_FILE).stat().st_ino for home in homes}
    assert len(inodes) == 1
    await another(disks, tmp_path)
    assert (tmp_path / "layers" / drives.key).exists()
    for home in homes:
        (home / PACKED_FILE).unlink()
    await another(disks, tmp_path)
    assert not (tmp_path / "layers" / drives.key).exists()
    await disks.hold(drives, homes[0])  # and it can be made again
    assert (homes[0] / PACKED_FILE).read_bytes()[SECTOR : SECTOR + 8] == b"EFI PART"


async def another(disks: LayerDisks, root: Path) -> LayerDrives:
    """A different disk is made, which is when old ones go."""
    place = root / os.urandom(4).hex()
    place.mkdir()
    layers, files = image(place, 8)
    drives = layer_drives([Layer(digest=f"sha256:{place.name * 8}", size_bytes=1), *layers[1:]], files, room=5)
    await disks.hold(drives, place)
    return drives


def test_nothing_half_made_and_nothing_unsynced_is_believed(tmp_path: Path) -> None:
    disks = LayerDisks(tmp_path / "layers")
    disks.open()
    (tmp_path / "layers" / ".abc.1234").touch()
    (tmp_path / "layers" / "abc").touch()
    disks.open()
    assert [path.name for path in (tmp_path / "layers").iterdir() if not path.name.startswith(".boot")] == ["abc"]
    (mark,) = (tmp_path / "layers").glob(".boot-*")
    mark.rename(mark.with_name(".boot-another"))
    disks.open()
    assert len(list((tmp_path / "layers").iterdir())) == 1
