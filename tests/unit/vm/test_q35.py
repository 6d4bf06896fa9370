"""The command line of a PC, and what a saved one is bound to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from opendsec.errors import InvalidSpecError, NodeError, SnapshotInvalidError
from opendsec.model.image import Devices, DiskFormat, Firmware, Graphics, Machine
from opendsec.vm.base import Accelerator, Binding
from opendsec.vm.display import size_of_png
from opendsec.vm.q35_line import Q35Spec, arguments, cpus_of, disk_bytes, memory_limit_mib
from opendsec.vm.q35_saved import check_saved, describe, read_saved, write_saved

PLAIN = Machine(format=DiskFormat.QCOW2, virtual_bytes=1 << 30)
SPEC = Q35Spec(
    machine=PLAIN, accelerator=Accelerator.TCG, memory_mib=64, cpus=2, screen=(1280, 800), mac="52:54:00:00:00:01"
)
BINDING = Binding(vmm="qemu-q35", version="7.2.1", accelerator=Accelerator.TCG, cpu_model="max")


def test_no_file_of_the_host_is_named_and_qemu_is_confined() -> None:
    full = replace(
        PLAIN, firmware=Firmware.UEFI, tpm=True, agent=True, graphics=Graphics.VIRTIO, devices=Devices.VIRTIO
    )
    for machine in (PLAIN, full, replace(PLAIN, format=DiskFormat.RAW)):
        words = arguments(replace(SPEC, machine=machine))
        paths = {part.partition("=")[2] for word in words for part in word.split(",") if "=/" in part}
        assert all(path.startswith(("/dev/fdset/", "/usr/share/OVMF/")) for path in paths), paths
        assert "elevateprivileges=deny" in words[words.index("-sandbox") + 1]
        assert "-S" in words


def test_each_file_of_a_disk_is_told_what_is_below_it() -> None:
    """Whatever a qcow2 file says of it; a raw one says nothing."""

    def nodes(format_: DiskFormat, disks: int) -> list[str]:
        words = arguments(replace(SPEC, machine=replace(PLAIN, format=format_), disks=disks))
        return [words[at + 1] for at, word in enumerate(words) if word == "-blockdev"]

    lowest, middle, highest, overlay = nodes(DiskFormat.QCOW2, 3)
    assert all("read-only=on" in one for one in (lowest, middle, highest))
    assert "node-name=layer0," in lowest
    assert lowest.endswith(",backing=")  # nothing
    assert middle.startswith("driver=qcow2,node-name=layer1,")
    assert middle.endswith(",backing=layer0")
    assert highest.endswith(",backing=layer1")
    assert "backing=layer2," in overlay
    raw, overlay = nodes(DiskFormat.RAW, 1)
    assert "backing" not in raw
    assert raw.startswith("driver=raw,")
    assert "backing=layer0," in overlay


def test_a_limit_of_the_disk_is_its_size_and_not_below_the_image() -> None:
    machine = replace(PLAIN, virtual_bytes=(1 << 30) + 512)
    assert disk_bytes(machine, None) == machine.virtual_bytes
    assert disk_bytes(machine, 2048) == 2 << 30
    with pytest.raises(InvalidSpecError, match="disk_limit_mb: 1024 MiB is less than the image's disk, which has 1025"):
        disk_bytes(machine, 1024)


def test_a_restored_machine_has_the_same_devices() -> None:
    restored = arguments(replace(SPEC, restored=True))
    assert [word for word in restored if word not in ("-incoming", "fd:49")] == arguments(SPEC)


def test_limits_round_up_and_leave_room_for_qemu() -> None:
    assert [cpus_of(PLAIN, limit) for limit in (None, 0.2, 1.0, 1.5, 4)] == [1, 1, 1, 2, 4]
    assert memory_limit_mib(SPEC) > SPEC.memory_mib + 256
    assert memory_limit_mib(replace(SPEC, machine=replace(PLAIN, graphics=Graphics.VIRTIO))) > memory_limit_mib(SPEC)


def test_a_saved_machine_is_refused_for_whatever_differs(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"state")
    (tmp_path / "disk.qcow2").write_bytes(b"disk")
    write_saved(tmp_path, describe(BINDING, SPEC, tmp_path))
    saved = read_saved(tmp_path)
    check_saved(saved, BINDING, SPEC)
    others = {
        "VMM version": (replace(BINDING, version="9.0"), SPEC),
        "accelerator": (replace(BINDING, accelerator=Accelerator.KVM), SPEC),
        "processor model": (replace(BINDING, cpu_model="host"), SPEC),
        "memory in MiB": (BINDING, replace(SPEC, memory_mib=65)),
        "number of processors": (BINDING, replace(SPEC, cpus=1)),
        "chain of disks": (BINDING, replace(SPEC, disks=2)),
        "devices": (BINDING, replace(SPEC, machine=replace(PLAIN, tpm=True))),
    }
    for what, (binding, spec) in others.items():
        with pytest.raises(SnapshotInvalidError, match=what) as caught:
            check_saved(saved, binding, spec)
        assert caught.value.remedy
    (tmp_path / "state").write_bytes(b"stat")
    with pytest.raises(SnapshotInvalidError, match="state is gone or has another size"):
        read_saved(tmp_path)
    (tmp_path / "saved.json").write_bytes(msgspec.json.encode({"format": 1}))
    with pytest.raises(SnapshotInvalidError, match="cannot be read"):
        read_saved(tmp_path)


def test_what_is_no_png_is_no_picture() -> None:
    png = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + b"IHDR" + (640).to_bytes(4, "big") + (400).to_bytes(4, "big")
    size = size_of_png(png)
    assert (size.width, size.height) == (640, 400)
    for cut in (b"", png[:20], b"P6" + png):
        with pytest.raises(NodeError, match="no PNG"):
            size_of_png(cut)
