"""Chains of disks: what a guest sees through any number of differences, merged or not, is what was written, byte for
byte; and what a hostile overlay says is not believed."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from pathlib import Path

import pytest

from opendsec.errors import DiskFullError, ImageInvalidError, InvalidSpecError
from opendsec.model.image import DiskFormat, Image, Machine
from opendsec.store import disk_changes
from opendsec.store.disk_changes import Written, make_overlay, on_top_of, pack_change, stage_change
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.fsck import check
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.merge import settle

pytestmark = [pytest.mark.root, pytest.mark.qemu]
CLUSTER = 1 << 16


def chain(files: list[Path], base: str) -> str:
    """QEMU's words for a chain of files, lowest first, each opened as what it is and nothing a header says."""
    words = f"driver={base},file.driver=file,file.filename={files[0]}"
    for file in files[1:]:
        below = ",".join(f"backing.{word}" for word in words.split(","))
        words = f"driver=qcow2,file.driver=file,file.filename={file},{below}"
    return words


def shown(files: list[Path], base: str, target: Path) -> bytes:
    """All a guest would read."""
    argv = ["qemu-img", "convert", "-U", "--image-opts", "-O", "raw", chain(files, base), str(target)]
    subprocess.run(argv, check=True)
    try:
        return target.read_bytes()
    finally:
        target.unlink()


def write(overlay: Path, below: list[Path], base: str, random_: random.Random, disk: bytearray) -> None:
    """Some writes, as a guest's, and the same into `disk`: data, zeros in place of data, and nothing at all."""
    commands = []
    for _ in range(6):
        at = random_.randrange(0, len(disk) // 512) * 512
        length = min(random_.choice([512, 4096, CLUSTER, 3 * CLUSTER + 512]), len(disk) - at)
        kind = random_.choice(["data", "zeros", "holes"])
        byte = random_.randrange(1, 256) if kind == "data" else 0
        commands.append(f"write -z {at} {length}" if kind == "holes" else f"write -P {byte} {at} {length}")
        disk[at : at + length] = bytes([byte]) * length
    given = [word for command in commands for word in ("-c", command)]
    argv = ["qemu-io", *given, "--image-opts", chain([*below, overlay], base)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def disk_image(store: ImageStore, disk: Path, kind: DiskFormat, content: bytes) -> Image:
    raw = disk / "content"
    raw.write_bytes(content)
    source = raw
    if kind is DiskFormat.QCOW2:
        source = disk / "content.qcow2"
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(source)], check=True)
    machine = Machine(format=kind, virtual_bytes=512)
    return import_disk(store, DiskRequest(name="base", path=source, machine=machine, format=kind))


@pytest.mark.parametrize("kind", [DiskFormat.RAW, DiskFormat.QCOW2])
def test_what_is_shown_is_what_was_written(store: ImageStore, disk: Path, kind: DiskFormat) -> None:
    random_ = random.Random(7)
    content = bytearray(random_.randbytes(9 * CLUSTER + 1536))
    layers = list(disk_image(store, disk, kind, bytes(content)).layers)
    for number in range(7):
        if number in (1, 4):
            content += bytes(5 * CLUSTER + 512)  # a larger disk than before
        files = [store.blob_path(layer.digest) for layer in layers]
        overlay = disk / f"overlay{number}"
        make_overlay(overlay, len(content))
        write(overlay, files, kind.value, random_, content)
        assert shown([*files, overlay], kind.value, disk / "shown") == content
        with store.staging() as work:
            change = stage_change(store, work, overlay, size_bytes=len(content))
            assert change is not None
            chain_ = on_top_of(store, work, layers, change, files=files, size_bytes=len(content), most=4)
            made = store.publish("packed", layers=chain_, config=store.get("base").config, replace=True)
        layers = list(made.layers)
        now = [store.blob_path(layer.digest) for layer in layers]
        assert shown(now, kind.value, disk / "shown") == content
        assert {(path.stat().st_mode & 0o7777, path.stat().st_uid) for path in now} == {(0o444, 0)}
    assert len(layers) <= 4
    assert layers[0] == store.get("base").layers[0]


def test_what_was_never_written_is_no_layer(store: ImageStore, disk: Path) -> None:
    overlay = disk / "overlay"
    make_overlay(overlay, 1 << 30)
    with store.staging() as work:
        assert stage_change(store, work, overlay, size_bytes=1 << 30) is None


def test_a_hostile_overlay_is_refused_by_name_and_nothing_of_it_stays(store: ImageStore, disk: Path) -> None:
    secret = disk / "secret"
    secret.write_bytes(b"s" * CLUSTER)
    size = 16 * CLUSTER

    def patched(name: str, at: int, content: bytes) -> Path:
        path = disk / name
        make_overlay(path, size)
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P 1 0 {2 * CLUSTER}", str(path)], check=True)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)
        return path

    backed = disk / "backed"
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(secret), "-F", "raw", str(backed), str(size)]
    subprocess.run(argv, check=True)
    fine = disk / "fine"
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", "cluster_size=4096", str(fine), str(size)]
    subprocess.run(argv, check=True)
    cases = {
        "backing file": backed,
        "another than it was started with: 1048576 bytes in clusters of 4096": fine,
        "another than it was started with: 2097152": patched("grown", 24, struct.pack(">Q", 2 * size)),
        "no qcow2 disk": patched("none", 0, b"none"),
        "tables are damaged": patched("torn", 4 * CLUSTER, struct.pack(">Q", 1 << 63 | 1 << 40)),
    }
    for words, overlay in cases.items():
        with store.staging() as work, pytest.raises(ImageInvalidError, match=words):
            stage_change(store, work, overlay, size_bytes=size)
    assert not [name for name in os.listdir(store.layout.staging) if not name.endswith(".lock")]


@pytest.mark.parametrize(
    ("at", "words"), [(8, "backing file"), (72, "another file"), (24, "another than it was started with")]
)
def test_what_the_program_made_that_read_it_is_not_believed(
    store: ImageStore, disk: Path, monkeypatch: pytest.MonkeyPatch, at: int, words: str
) -> None:
    """As if the overlay had taken over the program: its file names another one, or is larger."""
    overlay = disk / "overlay"
    make_overlay(overlay, 16 * CLUSTER)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", f"write -P 1 0 {CLUSTER}", str(overlay)], check=True)
    values = {8: 1 << 20, 72: 4, 24: 32 * CLUSTER}

    def taken_over(target: int, *_: object, **__: object) -> None:
        os.pwrite(target, struct.pack(">Q", values[at]), at)

    monkeypatch.setattr(disk_changes, "_lay_over", taken_over)
    with store.staging() as work, pytest.raises(ImageInvalidError, match=words):
        stage_change(store, work, overlay, size_bytes=16 * CLUSTER)


def test_what_a_chain_needs_is_kept_and_checked_and_then_it_goes(store: ImageStore, disk: Path) -> None:
    base = disk_image(store, disk, DiskFormat.RAW, bytes(4 * CLUSTER))
    overlay = disk / "overlay"
    make_overlay(overlay, 4 * CLUSTER)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 1 0 512", str(overlay)], check=True)
    with store.staging() as work:
        change = stage_change(store, work, overlay, size_bytes=4 * CLUSTER)
        assert change is not None
        made = store.publish("packed", layers=[*base.layers, change], config=base.config)
    store.remove("base")
    collect(store, grace_s=0)
    assert store.compose("packed").layers == made.layers
    assert check(store).sound
    with pytest.raises(InvalidSpecError, match="chain is merged when a sandbox of it is packed"):
        settle(store, "packed", lambda _: -1, most=1)
    with pytest.raises(InvalidSpecError, match="no base, workspace or toolkit"):
        store.compose("packed", toolkits=["packed"])
    store.blob_path(made.layers[1].digest).chmod(0o644)
    store.blob_path(made.layers[1].digest).write_bytes(b"")
    assert not check(store).sound
    store.remove("packed")
    collect(store, grace_s=0)
    assert not list((store.root / "blobs/sha256").iterdir())


@pytest.mark.parametrize("mebibytes", [2, 5], ids=["while it is copied", "while the layer is written"])
def test_a_full_disk_is_named_and_nothing_is_left(disk: Path, mebibytes: int) -> None:
    scratch = disk / "scratch"
    scratch.mkdir()
    store = ImageStore(disk / "store", scratch=scratch)
    base = disk_image(store, disk, DiskFormat.RAW, bytes(4 << 20))
    overlay = disk / "overlay"
    make_overlay(overlay, 4 << 20)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 1 0 3M", str(overlay)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(scratch)], check=True)
    try:
        written = Written(
            overlay=overlay,
            size_bytes=4 << 20,
            layers=base.layers,
            files=tuple(store.blob_path(layer.digest) for layer in base.layers),
        )
        read: list[bool] = []
        with pytest.raises(DiskFullError), store.staging() as work:
            pack_change(store, work, written, on_read=lambda: read.append(True))
        assert read == ([True] if mebibytes > 2 else [])
        assert not [path for path in scratch.iterdir() if path.name != ".lock"]
    finally:
        subprocess.run(["umount", str(scratch)], check=True)
    assert not list(store.layout.staging.iterdir())
