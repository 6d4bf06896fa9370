"""QEMU's command line, the disk of many files, and what a saved machine is bound to: all without a machine."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opendsec.errors import SnapshotInvalidError
from opendsec.vm.base import Accelerator, Binding, Card, Drive, MachineSpec
from opendsec.vm.guest_memory import Run, runs_of
from opendsec.vm.qemu_drives import HEAD_SECTORS, MAX_PARTITIONS, SECTOR, TAIL_SECTORS, Part, description, ends_of
from opendsec.vm.qemu_line import Line, arguments, check_slots, numbers_of, version_of
from opendsec.vm.qemu_saving import save_devices
from opendsec.vm.qmp import Monitor
from opendsec.vm.saved import MANIFEST, check_saved, describe, write_manifest

DISK = Drive(name="disk", path=Path("/s/disk,img"), read_only=False)
SPEC = MachineSpec(
    kernel=Path("/k"),
    initrd=Path("/i"),
    command_line="quiet x=1",
    memory_mib=128,
    cpus=2,
    drives=(Drive(name="l0-meta", path=Path("/l/0")), Drive(name="l0-data", path=Path("/l/1")), DISK),
    card=Card(tap="tap0", mac="02:00:00:00:00:01"),
)
LINE = Line(
    directory=Path("/run/p"),
    accelerator=Accelerator.TCG,
    memory=Path("/m"),
    restored=False,
    host_id=5,
    version=(7, 2),
    qmp_fd=20,
    agent_fd=21,
)
BINDING = Binding(vmm="qemu-microvm", version="7.2", accelerator=Accelerator.TCG, cpu_model="max")


def devices(argv: list[str]) -> list[str]:
    return [value for option, value in itertools.pairwise(argv) if option == "-device"]


class KeepingMonitor(Monitor):
    """QEMU's side of a save, which does not let go of its file."""

    kept = -1

    def __init__(self) -> None:
        """There is no connection."""

    async def add_fd(self, fd: int) -> int:
        self.kept = os.dup(fd)
        return 1

    async def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, *, timeout_s: float = 0
    ) -> Any:
        if command != "remove-fd":
            os.write(self.kept, b"devices")


@pytest.mark.anyio
async def test_who_writes_the_devices_has_not_what_others_start_from(tmp_path: Path) -> None:
    qemu = KeepingMonitor()
    await save_devices(qemu, tmp_path / "devices")
    os.pwrite(qemu.kept, b"DEVICES and more", 0)
    os.close(qemu.kept)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("devices", b"devices")]


def test_a_restored_machine_has_the_devices_of_the_booted_one() -> None:
    booted, restored = arguments(SPEC, LINE), arguments(SPEC, replace(LINE, restored=True))
    assert devices(booted) == devices(restored)
    assert "-kernel" in booted
    assert "-kernel" not in restored
    assert restored[restored.index("-incoming") + 1] == "defer"
    assert "-S" in restored
    by_itself = arguments(SPEC, replace(LINE, restored=True, devices_fd=22))
    assert by_itself[by_itself.index("-incoming") + 1] == "fd:22"
    assert "-S" not in by_itself
    assert "share=on" in booted[booted.index("-object") + 1]
    assert restored[restored.index("-object") + 1].endswith("share=off")
    newer = arguments(SPEC, replace(LINE, restored=True, version=(8, 2)))
    assert newer[newer.index("-object") + 1].endswith("share=off,readonly=on,rom=off")


def test_kernels_that_find_devices_by_tables_only_get_tables() -> None:
    assert ",acpi=off," in arguments(SPEC, LINE)[1]
    assert ",acpi=on," in arguments(replace(SPEC, acpi=True), LINE)[1]


def test_a_disk_of_partitions_is_a_device_of_its_own() -> None:
    parted = Drive(name="layers", path=Path("/s/layers.img"), parted=True)
    argv = arguments(replace(SPEC, drives=(SPEC.drives[0], parted, DISK)), LINE)
    (line,) = (word for word in argv if "/s/layers.img" in word)
    assert "read-only=on" in line
    assert "discard" not in line
    assert any(word.startswith("virtio-blk-device,drive=disk0,serial=layers") for word in argv)


def test_paths_with_commas_are_one_value() -> None:
    assert any("file.filename=/s/disk,,img" in word for word in arguments(SPEC, LINE))


@pytest.mark.parametrize(("version", "option"), [((7, 2), "-runas"), ((10, 0), "-run-with")])
def test_root_is_dropped_in_the_way_of_the_version(version: tuple[int, int], option: str) -> None:
    assert option in arguments(SPEC, replace(LINE, version=version))
    assert option not in arguments(SPEC, replace(LINE, version=version, host_id=0))
    assert "-sandbox" in arguments(SPEC, replace(LINE, version=version, host_id=0))


def test_read_only_drives_take_one_slot_together() -> None:
    many = tuple(Drive(name=f"l{number}-meta", path=Path("/l")) for number in range(100))
    assert check_slots(replace(SPEC, drives=(*many, DISK))) == ""
    disks = tuple(replace(DISK, name=f"d{number}") for number in range(6))
    assert "8 slots" in check_slots(replace(SPEC, drives=(*many, *disks)))


def test_versions() -> None:
    said = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright"
    assert version_of(said) == "7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)"
    assert numbers_of(version_of(said)) == (7, 2)
    with pytest.raises(ValueError, match="no version"):
        version_of("sh: not found")


def test_a_disk_of_files() -> None:
    parts = [Part(name="a", path="/a", size=4096), Part(name="b-data", path="/b", size=5000)]
    disk = ends_of(parts)
    assert (len(disk.head), len(disk.tail)) == (HEAD_SECTORS * SECTOR, TAIL_SECTORS * SECTOR)
    table = disk.head[2 * SECTOR : 34 * SECTOR]
    assert table == disk.tail[: 32 * SECTOR]
    for header in (disk.head[SECTOR : SECTOR + 92], disk.tail[-SECTOR:][:92]):
        (own,) = struct.unpack_from("<I", header, 16)
        assert own == zlib.crc32(header[:16] + bytes(4) + header[20:])
        assert struct.unpack_from("<I", header, 88) == (zlib.crc32(table),)
    assert struct.unpack_from("<QQ", table, 32) == (2048, 2055)
    assert struct.unpack_from("<QQ", table, 128 + 32) == (2056, 2065)
    assert table[128 + 56 : 128 + 68].decode("utf-16-le") == "b-data"
    lines = description(parts, head="/h", tail="/t").splitlines()
    assert [line for line in lines if line.startswith("RW")] == [
        'RW 2048 FLAT "/h" 0',
        'RW 8 FLAT "/a" 0',
        'RW 10 FLAT "/b" 0',
        'RW 33 FLAT "/t" 0',
    ]
    assert "" not in lines


def test_disks_that_cannot_be() -> None:
    part = Part(name="a", path="/a", size=512)
    with pytest.raises(ValueError, match="at most 128"):
        ends_of([part] * (MAX_PARTITIONS + 1))
    with pytest.raises(ValueError, match="cannot be named"):
        description([replace(part, path='/a"b')], head="/h", tail="/t")


def test_runs() -> None:
    assert list(runs_of([])) == []
    assert list(runs_of([3])) == [Run(3, 1)]
    assert list(runs_of([0, 1, 2, 7, 9, 10])) == [Run(0, 3), Run(7, 1), Run(9, 2)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "devices").write_bytes(b"devices")
    (tmp_path / "memory").write_bytes(bytes(8192))
    write_manifest(tmp_path, describe(BINDING, SPEC, tmp_path, ["devices"], base=""))
    return tmp_path


@pytest.mark.parametrize(
    ("binding", "spec", "named"),
    [
        (replace(BINDING, vmm="firecracker"), SPEC, "VMM"),
        (replace(BINDING, version="8.0"), SPEC, "VMM version"),
        (replace(BINDING, accelerator=Accelerator.KVM), SPEC, "accelerator"),
        (replace(BINDING, cpu_model="EPYC"), SPEC, "processor model"),
        (BINDING, replace(SPEC, memory_mib=256), "memory"),
        (BINDING, replace(SPEC, cpus=1), "number of processors"),
        (BINDING, replace(SPEC, drives=(DISK,)), "drives"),
        (BINDING, replace(SPEC, card=None), "network card"),
        (BINDING, replace(SPEC, balloon=True), "balloon"),
    ],
)
def test_what_differs_is_named(saved: Path, binding: Binding, spec: MachineSpec, named: str) -> None:
    with pytest.raises(SnapshotInvalidError, match=named):
        check_saved(saved, binding, spec)


def test_files_are_checked(saved: Path) -> None:
    assert check_saved(saved, BINDING, SPEC).memory_mib == 128
    (saved / "devices").write_bytes(b"devicez")
    with pytest.raises(SnapshotInvalidError, match="checksum"):
        check_saved(saved, BINDING, SPEC)
    (saved / "devices").write_bytes(b"devices")
    (saved / "memory").write_bytes(bytes(4096))
    with pytest.raises(SnapshotInvalidError, match="memory"):
        check_saved(saved, BINDING, SPEC)
    (saved / MANIFEST).write_text("{}")
    with pytest.raises(SnapshotInvalidError, match=MANIFEST):
        check_saved(saved, BINDING, SPEC)
