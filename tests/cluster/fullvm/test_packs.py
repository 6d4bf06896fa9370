"""What a machine has written becomes an image, of which any number start and which can be packed again; and its disk is
as large as it was asked to be."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.cluster.fullvm.conftest import Platform, command, note, noted, until

import opendsec.sync
from opendsec import DSecFullVMRunArgs, SandboxState
from opendsec.errors import InvalidSpecError
from opendsec.model.image import DiskFormat, LayerRole, Machine
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.images import ImageStore

pytestmark = [pytest.mark.root, pytest.mark.qemu, pytest.mark.cgroup, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def large(up: tuple[Path, Path, dict[str, str]]) -> str:
    """An image whose disk has 20 MiB."""
    state, _, _ = up
    disk = state / "large.img"
    disk.write_bytes((state / "boot.img").read_bytes())
    with disk.open("r+b") as file:
        file.truncate(20 << 20)
    machine = Machine(format=DiskFormat.RAW, virtual_bytes=512, memory_mb=16)
    import_disk(ImageStore(state / "store"), DiskRequest(name="large", path=disk, machine=machine))
    return "large"


def test_a_change_is_a_layer_and_a_chain_starts_as_it_was_left(platform: Platform) -> None:
    first = platform.start()
    with first.stopping():
        unchanged = first.pack_diff("nothing")
        assert not unchanged.changed
        assert unchanged.startswith("boot@sha256:")
        note(first, "a")
        packed = first.pack_diff("first")
        assert packed.changed
        assert packed.details.crash_consistent  # nobody inside was asked
        assert packed.details.layer_bytes > 0
        note(first, "b")  # it goes on, and what is packed does not
    second, other = platform.start(packed), platform.start("first")
    with second.stopping(), other.stopping():
        assert noted(second) == noted(other) == "a"
        note(second, "c")
        assert second.pause().state is SandboxState.PAUSED
        again = second.pack_diff("second")
        assert second.status().state is SandboxState.PAUSED
        note(other, "d")
        assert noted(second) == "c"  # woken by the key
    third, untouched = platform.start(again), platform.start()
    with third.stopping(), untouched.stopping():
        assert noted(third) == "c"
        assert noted(untouched) == "\0"
    details = platform.client.images.inspect("second")
    assert [one.layer.role for one in details.start_layers] == [LayerRole.DISK] * 3
    assert details.config.machine is not None
    assert details.config.machine.virtual_bytes == 1 << 20
    listed = command(platform.environment, "image", "inspect", "second")
    assert listed.count("disk") >= 3
    command(platform.environment, "image", "fsck")


def test_what_goes_with_files_only_is_refused_by_name(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    refused = (
        ("scrub: nobody looks for files", lambda: machine.pack_diff("x", scrub=["*.log"])),
        ("keep: nobody looks for files", lambda: machine.pack_diff("x", keep=["*.log"])),
        ("alone: what a full VM has written", lambda: machine.pack_diff("x", alone=True)),
        ("role: what a full VM has written", lambda: machine.pack_diff("x", role=LayerRole.TOOLKIT)),
    )
    for words, call in refused:
        with pytest.raises(InvalidSpecError, match=words):
            call()  # type: ignore[no-untyped-call]
    note(machine, "x")
    assert machine.pack_diff("to-export").changed
    with pytest.raises(AssertionError, match="is a whole disk"):
        command(platform.environment, "image", "export", "to-export", str(platform.state / "exported"))


def test_a_disk_is_as_large_as_its_limit(platform: Platform, large: str) -> None:
    with pytest.raises(InvalidSpecError, match="disk_limit_mb: 16 MiB is less than the image's disk, which has 20"):
        platform.start(large, disk_limit_mb=16)
    sandbox = platform.start(large, disk_limit_mb=32)
    with sandbox.stopping():
        assert _size(platform, sandbox) == 32 << 20
        note(sandbox, "s")
        packed = sandbox.pack_diff("larger")
        sandbox.snapshot("larger", timeout=60)
        again = platform.client.run_fullvm(DSecFullVMRunArgs(snapshot="larger"), timeout=60)
        with again.stopping():
            assert _size(platform, again) == 32 << 20
    with pytest.raises(InvalidSpecError, match="which has 32"):
        platform.start(packed, disk_limit_mb=20)
    with platform.start(packed).stopping() as fresh:
        assert noted(fresh) == "s"
        assert _size(platform, fresh) == 32 << 20
    platform.client.snapshots.remove("larger")


def _size(platform: Platform, sandbox: opendsec.sync.Sandbox) -> int:
    """Of the disk as QEMU shows it to the guest."""
    overlay = platform.state / "edge/local/sandboxes" / sandbox.id / "box/disk.qcow2"
    with overlay.open("rb") as file:
        return int(struct.unpack_from(">Q", file.read(32), 24)[0])


def test_a_screen_is_as_large_as_it_was_asked_to_be(platform: Platform) -> None:
    with pytest.raises(InvalidSpecError, match="screen: 9000x9000 is not between"):
        platform.client.run_fullvm(DSecFullVMRunArgs(image="boot", screen="9000x9000"))
    with platform.start().stopping() as plain:
        assert _likes(plain) == (1280, 800)
    started = command(
        platform.environment, "run", "--backend", "fullvm", "--screen", "1920x1080", "--keep", "boot"
    ).strip()
    sandbox = platform.client.connect(started)
    with sandbox.stopping():
        until(lambda: sandbox.serial.read() == b"boot\n")
        assert _likes(sandbox) == (1920, 1080)
        sandbox.snapshot("wide", timeout=60)
        with pytest.raises(InvalidSpecError, match="screen: is what it was"):
            platform.client.run_fullvm(DSecFullVMRunArgs(snapshot="wide", screen="800x600"))
        again = platform.client.run_fullvm(DSecFullVMRunArgs(snapshot="wide"), timeout=60)
        with again.stopping():
            assert again.status().spec.screen == "1920x1080"
            assert _likes(again) == (1920, 1080)
    platform.client.snapshots.remove("wide")


def _likes(sandbox: opendsec.sync.Sandbox) -> tuple[int, ...]:
    """Size its display tells the guest it likes best."""
    at = len(sandbox.serial.read())
    sandbox.keyboard.press("f5")
    until(lambda: len(sandbox.serial.read(at)) == 4)
    return struct.unpack(">HH", sandbox.serial.read(at))
