"""QEMU's command line for a microvm machine. Pure.

Everything a guest's saved devices depend on is the same at its boot and at every restore: only memory, files, sockets
and the tap differ. A restored machine is given neither kernel nor initrd: they are in its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.vm.base import Accelerator, Drive, MachineSpec
from opendsec.vm.guest_setup import SERIAL_PORT

QMP_SOCKET, AGENT_SOCKET, CONSOLE, EMPTY_ROOT = "qmp.sock", "agent.sock", "console", "root"
LAYERS_DISK, LAYERS_HEAD, LAYERS_TAIL = "layers.vmdk", "layers.head", "layers.tail"
SLOTS = 8
"""virtio-mmio transports of the machine without ACPI (hw/i386/microvm.c); with it, there are more."""
CONSOLE_BYTES = 65_536
TRANSLATED_MIB = 64
"""TCG's cache of translated code: as much as is used becomes memory."""
_MACHINE = "microvm,x-option-roms=off,rtc=on,isa-serial=off,auto-kernel-cmdline=on,suppress-vmdesc=on"
"""rtc: without it the kernel waits two seconds for one."""
_MIGRATION = ("-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0")
"""What is saved here are the devices and nothing else. And asked to announce itself, a guest's kernel (6.12) takes its
network's lock in a work item that closing a card waits for, with the lock held: whoever takes eth0 down then hangs, and
all networking with it."""
_SANDBOX = "on,obsolete=deny,spawn=deny,resourcecontrol=deny"
"""`elevateprivileges` stays, or QEMU could not drop root itself; what it installs sets no_new_privs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a command line is made of, beyond the machine."""

    directory: Path
    accelerator: Accelerator
    memory: Path
    """The file memory is mapped from."""
    restored: bool
    """Memory is mapped privately, and the machine waits for its devices' state."""
    host_id: int
    version: tuple[int, int]
    qmp_fd: int
    agent_fd: int
    """Listening sockets the VMM is started with."""
    devices_fd: int = -1
    """The devices' state it reads as soon as it can, and runs then; -1: it waits to be told."""


def check_slots(spec: MachineSpec) -> str:
    """Why this machine does not fit, or ""."""
    alone = [drive for drive in spec.drives if not is_behind_one(drive)]
    used = 1 + len(alone) + (len(alone) < len(spec.drives)) + (spec.card is not None) + spec.balloon
    return f"{used} devices, the machine has {SLOTS} slots" if used > SLOTS else ""


def is_behind_one(drive: Drive) -> bool:
    """Whether it is a partition of the one disk of all such drives."""
    return drive.read_only and not drive.parted


def arguments(spec: MachineSpec, line: Line) -> list[str]:
    """All arguments."""
    acpi = "on" if spec.acpi else "off"
    argv = ["-M", f"{_MACHINE},acpi={acpi},memory-backend=mem0", *_accelerator(line)]
    argv += ["-smp", str(spec.cpus), "-m", f"{spec.memory_mib}M", "-object", _memory(spec, line)]
    argv += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    argv += _MIGRATION
    if line.devices_fd == -1:
        argv += ["-S"]
    argv += ["-chardev", f"socket,id=qmp,fd={line.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    argv += ["-chardev", f"socket,id=agent,fd={line.agent_fd},server=on,wait=off", "-chardev", _console(line)]
    argv += ["-device", "virtio-serial-device", "-device", "virtconsole,chardev=console"]
    argv += ["-device", f"virtserialport,chardev=agent,name={SERIAL_PORT}"]
    argv += _drives(spec, line.directory)
    if spec.card is not None:
        argv += ["-netdev", f"tap,id=net0,ifname={spec.card.tap},script=no,downscript=no,vhost=off"]
        argv += ["-device", f"virtio-net-device,netdev=net0,mac={spec.card.mac}"]
    if spec.balloon:
        argv += ["-device", "virtio-balloon-device,free-page-reporting=on"]
    if line.restored:
        argv += ["-incoming", "defer" if line.devices_fd == -1 else f"fd:{line.devices_fd}"]
    else:
        argv += ["-kernel", str(spec.kernel), "-initrd", str(spec.initrd), "-append", spec.command_line]
    return argv + _confinement(line)


def _accelerator(line: Line) -> list[str]:
    if line.accelerator is Accelerator.KVM:
        return ["-accel", "kvm", "-cpu", "host,migratable=on"]
    return ["-accel", f"tcg,tb-size={TRANSLATED_MIB}", "-cpu", "max"]


def _memory(spec: MachineSpec, line: Line) -> str:
    text = f"memory-backend-file,id=mem0,size={spec.memory_mib}M,mem-path={escaped(str(line.memory))}"
    if not line.restored:
        return f"{text},share=on"
    return f"{text},share=off" + (",readonly=on,rom=off" if line.version >= (8, 2) else "")


def _console(line: Line) -> str:
    """A booting machine runs nobody's programs, so its file stays small; later anybody may write to the console."""
    if line.restored:
        return f"ringbuf,id=console,size={CONSOLE_BYTES}"
    return f"file,id=console,path={escaped(str(line.directory / CONSOLE))}"


def _drives(spec: MachineSpec, directory: Path) -> list[str]:
    argv: list[str] = []
    errors = (
        "werror=report,rerror=report"  # a guest whose host has no room gets EIO; the default would stop it for ever
    )
    if any(is_behind_one(drive) for drive in spec.drives):
        disk = escaped(str(directory / LAYERS_DISK))
        argv += ["-blockdev", f"driver=vmdk,node-name=layers,read-only=on,file.driver=file,file.filename={disk}"]
        argv += ["-device", f"virtio-blk-device,drive=layers,serial=layers,{errors}"]
    for number, drive in enumerate(each for each in spec.drives if not is_behind_one(each)):
        ways = "read-only=on" if drive.read_only else "discard=unmap,file.discard=unmap"
        file = f"driver=raw,node-name=disk{number},{ways},file.driver=file"
        argv += ["-blockdev", f"{file},file.filename={escaped(str(drive.path))}"]
        argv += ["-device", f"virtio-blk-device,drive=disk{number},serial={drive.name},{errors}"]
    return argv


def _confinement(line: Line) -> list[str]:
    argv = ["-sandbox", _SANDBOX]
    if not line.host_id:
        return argv
    root = line.directory / EMPTY_ROOT
    if line.version >= (9, 1):
        return [*argv, "-run-with", f"chroot={escaped(str(root))},user={line.host_id}:{line.host_id}"]
    return [*argv, "-chroot", str(root), "-runas", f"{line.host_id}:{line.host_id}"]


def escaped(value: str) -> str:
    """A value among others between commas."""
    return value.replace(",", ",,")


def version_of(output: str) -> str:
    """`QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)` → all after `version `. Raises ValueError."""
    first = output.splitlines()[0] if output else ""
    _, found, version = first.partition("version ")
    if not found:
        raise ValueError(f"no version in {first!r}")
    return version.strip()


def numbers_of(version: str) -> tuple[int, int]:
    """Major and minor. Raises ValueError."""
    major, minor, *_ = version.split(" ", maxsplit=1)[0].split(".")
    return int(major), int(minor)


def words_of(stderr: bytes) -> str:
    """QEMU's last words, without its name before each."""
    lines: Sequence[str] = stderr.decode(errors="replace").strip().splitlines()
    return "; ".join(line.removeprefix("qemu-system-x86_64: ") for line in lines[-5:])
