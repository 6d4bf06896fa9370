"""Whole disks as images: what is taken, what is refused, and that nobody takes one for a tree of files."""

from __future__ import annotations

import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.edge.admission import check_image
from opendsec.errors import ConflictError, ImageInvalidError, InvalidSpecError
from opendsec.model.image import Devices, DiskFormat, Firmware, Graphics, ImageConfig, LayerRole, Machine
from opendsec.model.spec import BackendKind, SandboxSpec
from opendsec.store.disks import DiskRequest, import_disk, parse_qcow2
from opendsec.store.images import ImageStore
from opendsec.store.manifest import Manifest, decode_manifest, encode_manifest
from opendsec.store.mounts import check_mountable

pytestmark = [pytest.mark.root, pytest.mark.qemu]
MACHINE = Machine(
    format=DiskFormat.RAW,
    virtual_bytes=512,
    firmware=Firmware.UEFI,
    tpm=True,
    agent=True,
    graphics=Graphics.VIRTIO,
    devices=Devices.VIRTIO,
    memory_mb=64,
    cpus=2,
)


def qcow2(path: Path, *options: str, size: str = "8M") -> Path:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), size], check=True)
    return path


def test_a_qcow2_disk_and_a_raw_one_become_images(store: ImageStore, disk: Path) -> None:
    """Format and size are found out, all else is as it was said; holes are not filled on the way."""
    made = import_disk(store, DiskRequest(name="q", path=qcow2(disk / "q.qcow2"), machine=MACHINE))
    assert made.config.machine == replace(MACHINE, format=DiskFormat.QCOW2, virtual_bytes=8 << 20)
    assert [layer.role for layer in made.layers] == [LayerRole.DISK]
    raw = disk / "r.img"
    with raw.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"here")
    kept = import_disk(store, DiskRequest(name="r", path=raw, machine=MACHINE))
    assert kept.config.machine == replace(MACHINE, virtual_bytes=64 << 20)
    blob = store.blob_path(kept.layers[0].digest)
    assert blob.read_bytes() == raw.read_bytes()
    with (store.layout.root / "holes").open("wb") as file:
        file.truncate(64 << 20)
        shows_holes = os.fstat(file.fileno()).st_blocks == 0  # not every shared file system does
    Path(file.name).unlink()
    assert not shows_holes or blob.stat().st_blocks * 512 < 1 << 20
    assert store.compose("r").config == kept.config
    with pytest.raises(ConflictError, match="exists with other content"):
        import_disk(store, DiskRequest(name="r", path=disk / "q.qcow2", machine=MACHINE))


def test_what_names_other_files_is_refused(store: ImageStore, disk: Path) -> None:
    """Nothing of what was refused stays in the store."""
    secret = disk / "secret"
    secret.write_bytes(b"s" * 512)
    cases = {
        "backing file": qcow2(disk / "backed", "-b", str(secret), "-F", "raw"),
        "another file": qcow2(disk / "apart", "-o", f"data_file={disk}/data"),
        "is encrypted": _patched(qcow2(disk / "crypt"), 32, struct.pack(">I", 1)),
        "was not closed": _patched(qcow2(disk / "dirty"), 72, struct.pack(">Q", 1)),
        "not known": _patched(qcow2(disk / "new"), 72, struct.pack(">Q", 1 << 40)),
        "version 9": _patched(qcow2(disk / "v9"), 4, struct.pack(">I", 9)),
        "header is damaged": _patched(qcow2(disk / "l1"), 40, struct.pack(">Q", 1 << 50)),
        "not whole sectors up to 16 TiB": _patched(qcow2(disk / "huge"), 24, struct.pack(">Q", 1 << 60)),
        "tables are damaged": _patched(qcow2(disk / "torn"), 0x30000, b"\x80\0\0\0\xff\xff\xff\xff"),
        "whole sectors of 512": _file(disk / "odd", b"odd"),
    }
    for words, path in cases.items():
        with pytest.raises(ImageInvalidError, match=words) as caught:
            import_disk(store, DiskRequest(name="bad", path=path, machine=MACHINE))
        assert caught.value.remedy
    with pytest.raises(ImageInvalidError, match="no qcow2 disk"):
        import_disk(store, DiskRequest(name="bad", path=secret, machine=MACHINE, format=DiskFormat.QCOW2))
    with pytest.raises(InvalidSpecError, match="is not a file"):
        import_disk(store, DiskRequest(name="bad", path=disk / "nowhere", machine=MACHINE))
    assert store.names() == []
    assert not list((store.root / "blobs/sha256").iterdir())
    assert not list(store.layout.staging.iterdir())


def test_a_raw_disk_of_holes_without_end_is_refused_with_the_way_out(store: ImageStore, disk: Path) -> None:
    """Hashing what is no data would take hours; as a qcow2 it is taken at once, and the guest sees the same bytes."""
    raw = disk / "raw"
    with raw.open("wb") as file:
        file.write(b"data")
        file.truncate(10 << 40)
    with pytest.raises(ImageInvalidError, match="10239 GiB of holes") as caught:
        import_disk(store, DiskRequest(name="raw", path=raw, machine=MACHINE))
    assert "qemu-img convert -f raw -O qcow2" in caught.value.remedy
    assert "raw" not in store.names()
    small = disk / "small"
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(small)], check=True, timeout=300)
    made = import_disk(store, DiskRequest(name="raw", path=small, machine=MACHINE))
    assert made.config.machine == replace(MACHINE, format=DiskFormat.QCOW2, virtual_bytes=10 << 40)


@pytest.mark.parametrize("kind", ["vmdk", "vdi", "vhdx", "vpc", "qed", "parallels"])
def test_a_disk_in_another_format_is_not_taken_for_a_raw_one(store: ImageStore, disk: Path, kind: str) -> None:
    """It would start nothing, and nobody would know why."""
    path = disk / "other"
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, str(path), "1M"], check=True)
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 512) * 512)
    with pytest.raises(ImageInvalidError, match="is a disk in the format") as caught:
        import_disk(store, DiskRequest(name="other", path=path, machine=MACHINE))
    assert "qemu-img convert" in caught.value.remedy
    taken = import_disk(store, DiskRequest(name="other", path=path, machine=MACHINE, format=DiskFormat.RAW))
    assert taken.config.machine is not None
    assert taken.config.machine.format is DiskFormat.RAW


def _patched(path: Path, at: int, content: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    return path


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_headers_of_any_bytes_are_refused_or_understood(disk: Path) -> None:
    """Cut anywhere, and with any one field blown up, a header is a refusal and no crash."""
    path = qcow2(disk / "q")
    head, size = path.read_bytes()[:104], path.stat().st_size
    for length in range(len(head)):
        with pytest.raises(ImageInvalidError):
            parse_qcow2(head[:length], file_bytes=size)
    for at in range(4, 104, 4):
        blown = head[:at] + b"\xff\xff\xff\xff" + head[at + 4 :]
        try:
            assert parse_qcow2(blown, file_bytes=size) > 0
        except ImageInvalidError:
            continue


def test_a_disk_is_for_full_vms_and_nothing_else(store: ImageStore, disk: Path) -> None:
    image = import_disk(store, DiskRequest(name="d", path=_file(disk / "d", bytes(512)), machine=MACHINE))
    for kind in (BackendKind.CONTAINER, BackendKind.MICROVM, BackendKind.FNCALL):
        with pytest.raises(InvalidSpecError, match="is a whole disk") as caught:
            check_image(SandboxSpec(image="d", backend=kind), image)
        assert "fullvm" in caught.value.remedy
    check_image(SandboxSpec(image="d", backend=BackendKind.FULLVM), image)
    plain = replace(image, config=ImageConfig())
    with pytest.raises(InvalidSpecError, match="layers of files") as refused:
        check_image(SandboxSpec(image="d", backend=BackendKind.FULLVM), plain)
    assert "container" in refused.value.remedy
    with pytest.raises(InvalidSpecError, match="whole disk"):
        check_mountable(image)
    work = store.publish("w", layers=[replace(image.layers[0], role=LayerRole.WORKSPACE)], config=ImageConfig())
    assert work.layers[0].role is LayerRole.WORKSPACE
    with pytest.raises(InvalidSpecError, match="no base, workspace or toolkit"):
        store.compose("d", workspace="w")


def test_the_machine_is_part_of_the_manifest_and_others_keep_their_digest() -> None:
    manifest = Manifest(layers=(), config=ImageConfig(machine=MACHINE))
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert b"machine" not in encode_manifest(Manifest(layers=(), config=ImageConfig()))
    damaged = encode_manifest(manifest).replace(b'"cpus":2', b'"cpus":0')
    with pytest.raises(ImageInvalidError, match="damaged manifest"):
        decode_manifest(damaged)
