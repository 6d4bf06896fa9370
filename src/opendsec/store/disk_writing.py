"""A whole disk written from a tree of files: a PC's BIOS starts it by syslinux, and its system lies on ext4.

mkfs.ext4 and mtools write it into a file, with nothing mounted and no loop device. The first partition is FAT with
syslinux, kernel and initial RAM disk; the second is the system, labelled `system`. It knows nothing of what the system
is (`desktop`, and `opendsec.vm.disk_building` of images).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import HostCapabilityError, InvalidSpecError, NodeError
from opendsec.model.image import DiskFormat, Image, ImageConfig, Machine
from opendsec.store.disks import FIRST_FD, SECTOR, DiskRequest, import_disk
from opendsec.store.durable import disk_full, disk_full_named
from opendsec.store.images import ImageStore
from opendsec.store.programs import find_program, run_program
from opendsec.store.progress import OnProgress, Progress

MIB = 1024 * 1024
BOOT_AT, BOOT_MIB = MIB, 128
ROOT_AT = BOOT_AT + BOOT_MIB * MIB
ROOT_LABEL, ROOT_PARTITION = "system", 2
AGENT_PORT = "org.opendsec.agent"
"""Name of the virtio-serial port a guest agent answers on."""
TIMEOUT_S = 1800.0
MBR_CODE = Path("/usr/lib/syslinux/mbr/mbr.bin")
_TOOLS = ("syslinux", "mformat", "mcopy", "sfdisk", "mkfs.ext4", "debugfs", "qemu-img")
_HOST_IS_FULL = "No space left on device"
_TOO_SMALL = ("Could not allocate block", "Could not allocate inode")
"""What mkfs.ext4 says when the tree does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemDisk:
    """What is written."""

    tree: Path
    """Directory with the whole system."""
    kernel: Path
    initrd: Path
    options: str
    """The kernel's command line."""
    size_mib: int
    """Of the whole disk; what is not used takes no room."""
    fd: int = -1
    """A descriptor of the tree, where it has no other name."""


def check_tools(agent: Path) -> None:
    """Raises HostCapabilityError naming what is missing; `agent` is the guest agent's program."""
    for program in _TOOLS:
        find_program(program)
    for file, remedy in ((MBR_CODE, "apt-get install syslinux-common"), (agent, "make -C native install")):
        if not file.is_file():
            raise HostCapabilityError(f"{file} is missing", detail={"probe": file.name}, remedy=remedy)


def publish_disk(
    store: ImageStore,
    name: str,
    system: SystemDisk,
    *,
    machine: Machine,
    config: ImageConfig,
    work: Path,
    source: str,
    replace: bool,
    on_progress: OnProgress,
) -> Image:
    """Write, pack and publish. `work` is a staging directory of the store; `machine.format` and its size are found out.

    Raises InvalidSpecError (the tree does not fit), NodeError with a program's words, DiskFullError, ConflictError.
    """
    raw, disk = work / "raw", work / "qcow2"
    with disk_full_named(store.root):
        write_disk(system, raw, work, on_progress)
        on_progress(Progress(phase="packing the disk"))
        run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk), place=work)
    raw.unlink()
    request = DiskRequest(
        name=name,
        path=disk,
        machine=machine,
        format=DiskFormat.QCOW2,
        config=config,
        replace=replace,
        source=source,
    )
    return import_disk(store, request, on_progress=on_progress)


def write_disk(system: SystemDisk, raw: Path, work: Path, on_progress: OnProgress) -> None:
    """Into the new file `raw`. Raises as `publish_disk` does."""
    on_progress(Progress(phase="writing the disk"))
    boot = _boot_partition(system, work)
    with raw.open("xb") as file:
        file.truncate(system.size_mib * MIB)
    table = work / "table"
    first = f"start={BOOT_AT // SECTOR}, size={BOOT_MIB * MIB // SECTOR}, type=c, bootable"
    table.write_text(f"label: dos\n{first}\nstart={ROOT_AT // SECTOR}, type=83\n", encoding="ascii")
    run("sh", "-c", 'exec sfdisk --quiet --no-reread --no-tell-kernel "$0" <"$1"', str(raw), str(table), place=work)
    with raw.open("r+b") as file:
        file.write(MBR_CODE.read_bytes()[:440])
        file.seek(BOOT_AT)
        with boot.open("rb") as source_file:
            shutil.copyfileobj(source_file, file, MIB)
    boot.unlink()
    _root_partition(system, raw, work)


def _boot_partition(system: SystemDisk, work: Path) -> Path:
    boot, config = work / "boot.fat", work / "syslinux.cfg"
    geometry = ("-T", str(BOOT_MIB * MIB // SECTOR), "-h", "255", "-s", "63", "-v", "BOOT")
    run("mformat", "-C", "-i", str(boot), *geometry, "::", place=work)
    config.write_text(_syslinux(system.options), encoding="ascii")
    for source, name in ((system.kernel, "vmlinuz"), (system.initrd, "initrd.img"), (config, "syslinux.cfg")):
        run("mcopy", "-i", str(boot), str(source), f"::{name}", place=work)
    run("syslinux", "--install", str(boot), place=work)
    return boot


def _syslinux(options: str) -> str:
    lines = ("DEFAULT linux", "PROMPT 0", "TIMEOUT 0", "LABEL linux", "  LINUX /vmlinuz", "  INITRD /initrd.img")
    return "".join(f"{line}\n" for line in (*lines, f"  APPEND {options}"))


def _root_partition(system: SystemDisk, raw: Path, work: Path) -> None:
    kib = (system.size_mib * MIB - ROOT_AT) // 1024
    options = f"offset={ROOT_AT},root_owner=0:0,lazy_itable_init=1,nodiscard"
    tree, fds = str(system.tree), {}
    if system.fd >= 0:
        tree, fds = f"/proc/self/fd/{FIRST_FD}", {FIRST_FD: system.fd}
    # An inode for every 8 KiB: whoever asked for the size counted a block for each file, and one for its content.
    how = ("-q", "-F", "-b", "4096", "-i", "8192", "-m", "0", "-L", ROOT_LABEL, "-E", options)
    run("mkfs.ext4", *how, "-d", tree, str(raw), f"{kib}k", place=work, fds=fds)
    # mkfs.ext4 gives the root its own mode.
    status = system.tree.stat()
    fields = {"mode": f"0{status.st_mode:o}", "uid": status.st_uid, "gid": status.st_gid}
    commands = work / "root.debugfs"
    commands.write_text("".join(f"set_inode_field <2> {name} {value}\n" for name, value in fields.items()))
    run("debugfs", "-w", "-f", str(commands), f"{raw}?offset={ROOT_AT}", place=work)


def run(*argv: str, place: Path, fds: Mapping[int, int] | None = None) -> None:
    """A program to its end; it writes at `place`. Raises DiskFullError, InvalidSpecError, NodeError with its words."""
    ended = run_program([find_program(argv[0]), *argv[1:]], timeout_s=TIMEOUT_S, fds=fds or {})
    if ended.status == 0:
        return
    words = " ".join(ended.tail[-6:])[-1500:]
    if any(_HOST_IS_FULL in line for line in ended.tail):
        raise disk_full(place)
    if any(one in line for one in _TOO_SMALL for line in ended.tail):
        raise InvalidSpecError(
            f"size_mb: the files of the image do not fit on a disk of that size: {words}",
            detail={"field": "size_mb"},
            remedy="name a larger one with --size-mb",
        )
    raise NodeError(
        f"{argv[0]} ended with status {ended.status}: {words}",
        detail={"program": argv[0], "status": ended.status},
        retryable=False,
    )
