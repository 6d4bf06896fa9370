"""A platform with full VMs and nothing else, as `opendsec up` runs it, and a disk to start them from."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.boot_disk import make_boot_disk
from tests.contract.harness import disks

import opendsec.sync
from opendsec import DSecFullVMRunArgs
from opendsec.model.image import Devices, DiskFormat, Firmware, Graphics, Machine
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.images import ImageStore

WAIT_S = 45.0
"""For what takes a second on a quiet machine."""
BOOT_S = 200.0
"""For a boot of Linux on a machine that does much else."""


@dataclass
class Platform:
    """A running one."""

    state: Path
    run: Path
    environment: dict[str, str]
    client: opendsec.sync.DSecClient
    url: str
    key: str

    def start(self, image: str = "boot", **given: object) -> opendsec.sync.Sandbox:
        """A machine, once its operating system has said so (it may not, if it is not ours)."""
        sandbox = self.client.run_fullvm(DSecFullVMRunArgs(image=image, **given), timeout=60)  # type: ignore[arg-type]
        until(lambda: sandbox.serial.read().startswith(b"boot\n"))
        return sandbox

    def pid(self, name: str) -> int:
        """Of one of its processes."""
        return int((self.run / f"{name}.pid").read_text().split()[0])


def until(true: Callable[[], bool], what: str = "") -> None:
    """Wait for it."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what or "it did not become so in time"
        time.sleep(0.05)


def take_linux(state: Path, image_name: str, *, as_name: str) -> str:
    """A disk made of an image of the contract suite, in the store of the platform in `state`."""
    place, images = disks()
    image = images[image_name]
    assert image.config.machine is not None
    file = ImageStore(place / "store").blob_path(image.layers[0].digest)
    request = DiskRequest(name=as_name, path=file, machine=image.config.machine, config=image.config)
    import_disk(ImageStore(state / "store"), request)
    return as_name


def words(sandbox: opendsec.sync.Sandbox, line: str, **given: object) -> str:
    """What a command says that must end well."""
    return sandbox.run_shell(line, check=True, timeout=60, **given).stdout  # type: ignore[arg-type]


def command(environment: dict[str, str], *words: str, timeout_s: float = 120) -> str:
    """Run `opendsec` and give its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "opendsec", *words], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="package")
def up() -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """State, run directory and environment of the platform."""
    state = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    run = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OPENDSEC_")},
        "OPENDSEC_STATE_DIR": str(state),
        "OPENDSEC_RUN_DIR": str(run),
        "OPENDSEC_LISTEN": f"127.0.0.1:{port}",
        "OPENDSEC_EDGE_BACKENDS": "fullvm",
        "OPENDSEC_EDGE_MEMORY_FLOOR_MB": "0",
        "OPENDSEC_EDGE_DISK_FLOOR_MB": "0",
        "OPENDSEC_EDGE_CGROUP": f"opendsec-fullvm-{os.getpid()}",
    }
    try:
        _import_disks(state)
        command(environment, "up", "-d")
        try:
            yield state, run, environment
        finally:
            command(environment, "down")
    finally:
        shutil.rmtree(state)
        shutil.rmtree(run, ignore_errors=True)


@pytest.fixture
def platform(up: tuple[Path, Path, dict[str, str]]) -> Iterator[Platform]:
    """With a client of the test's own."""
    state, run, environment = up
    known = msgspec.json.decode((run / "local.json").read_bytes())
    with opendsec.sync.DSecClient(known["api_url"], known["api_key"], timeout=60) as client:
        yield Platform(state, run, environment, client, known["api_url"], known["api_key"])


def _import_disks(state: Path) -> None:
    store = ImageStore(state / "store")
    disk = make_boot_disk(state / "boot.img")
    plain = Machine(format=DiskFormat.RAW, virtual_bytes=512, memory_mb=16)
    import_disk(store, DiskRequest(name="boot", path=disk, machine=plain))
    modern = Machine(
        format=DiskFormat.RAW,
        virtual_bytes=512,
        firmware=Firmware.UEFI,
        tpm=True,
        graphics=Graphics.VIRTIO,
        devices=Devices.VIRTIO,
        memory_mb=64,
        cpus=2,
    )
    import_disk(store, DiskRequest(name="modern", path=disk, machine=modern))


@pytest.fixture
def machine(platform: Platform) -> Iterator[opendsec.sync.Sandbox]:
    """One that runs."""
    sandbox = platform.start()
    yield sandbox
    sandbox.stop()


def noted(machine: opendsec.sync.Sandbox) -> str:
    """What its operating system reads from its disk."""
    at = len(machine.serial.read())
    machine.keyboard.press("f4")
    until(lambda: len(machine.serial.read(at)) == 1)
    return machine.serial.read(at).decode("latin-1")


def note(machine: opendsec.sync.Sandbox, character: str) -> None:
    """It writes the character to its disk."""
    at = len(machine.serial.read())
    machine.keyboard.press(character)
    machine.keyboard.press("f3")
    until(lambda: len(machine.serial.read(at)) == 2)
    assert machine.serial.read(at) == character.encode() * 2
