"""QEMU's command line for a PC of the q35 kind: any operating system, with firmware, a display and input. Pure.

All files and sockets are descriptors that QEMU is started with, so it needs no path but those of its own installation.
A machine that goes on from a saved one has the very same devices. It refuses a disk smaller than its image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opendsec.errors import InvalidSpecError
from opendsec.model.image import Devices, DiskFormat, Firmware, Graphics, Machine
from opendsec.vm.base import Accelerator
from opendsec.vm.qemu_line import escaped

MIB = 1 << 20
UEFI_CODE = "/usr/share/OVMF/OVMF_CODE_4M.fd"
UEFI_VARIABLES = "/usr/share/OVMF/OVMF_VARS_4M.fd"
SERIAL_PORT = "org.opendsec.agent"
"""Name of the virtio-serial port a guest agent answers on."""
TRANSLATED_MIB = 128
"""TCG's cache of translated code."""
VIDEO_MIB = 32
"""Of the display adapter: the largest picture is 4096 x 2048. What a guest asks for beyond that it does not get."""
MAX_GPU_MIB = 256
"""Memory virtio-gpu may take for a guest's pictures."""
OVERHEAD_MIB = 256
"""What a machine may take beyond its own memory: QEMU itself, its threads, buffers of disk and network."""
DISPLAY, DISK, CARD, NET = "display0", "disk0", "card0", "net0"
"""Ids of devices that are spoken of later."""

MONITOR_FD, SERIAL_FD, AGENT_FD = 40, 41, 42
OVERLAY_FD, OVERLAY_READ_FD = 43, 44
VARIABLES_FD, VARIABLES_READ_FD, TPM_FD, STATE_FD = 46, 47, 48, 49
DISKS_FD = 100
"""Descriptors of the new process; from the last one on, the files of its image's disk, lowest first."""
_OVERLAY_SET, _VARIABLES_SET, _DISKS_SET = 1, 3, 100
_CONFINEMENT = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_QUIETLY = ("-global", "migration.announce-rounds=0")
"""Asked to announce itself after a restore, a Linux guest may deadlock when its network card goes down right then
(6.12); nothing on its way has to learn where it is."""
_ERRORS = "werror=report,rerror=report"
"""A guest whose host has no room gets an I/O error; the default would stop it for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Q35Spec:
    """One machine."""

    machine: Machine
    """What its image says."""
    accelerator: Accelerator
    memory_mib: int
    cpus: int
    screen: tuple[int, int]
    """Size in pixels the display says it likes best; a guest may choose another."""
    mac: str
    disks: int = 1
    """Files the image's disk is made of: the lowest has the machine's format, all above are qcow2."""
    disk_bytes: int = 0
    """Size of the disk as the guest sees it; 0: as its image says."""
    restored: bool = False
    """It goes on from the state that comes through STATE_FD."""


def memory_limit_mib(spec: Q35Spec) -> int:
    """What the whole machine may take of the host's memory."""
    gpu = MAX_GPU_MIB if spec.machine.graphics is Graphics.VIRTIO else 0
    emulated = TRANSLATED_MIB if spec.accelerator is Accelerator.TCG else 0
    return spec.memory_mib + OVERHEAD_MIB + VIDEO_MIB + gpu + emulated


def cpus_of(machine: Machine, limit: float | None) -> int:
    """Processors of a machine whose sandbox may use so many cores; None: what its image says."""
    return machine.cpus if limit is None else max(1, math.ceil(limit))


def disk_bytes(machine: Machine, limit_mb: int | None) -> int:
    """Size of the disk of a machine whose sandbox has such a limit, in MiB: it is made that large. Raises
    InvalidSpecError for one the image's disk does not fit into."""
    least = -(-machine.virtual_bytes // MIB)
    if limit_mb is None:
        return machine.virtual_bytes
    if limit_mb < least:
        raise InvalidSpecError(
            f"disk_limit_mb: {limit_mb} MiB is less than the image's disk, which has {least}",
            detail={"field": "disk_limit_mb", "least": least},
            remedy="leave it out, or give at least that",
        )
    return limit_mb * MIB


def size_of_disk(spec: Q35Spec) -> int:
    """In bytes, as the guest sees it."""
    return spec.disk_bytes or spec.machine.virtual_bytes


def arguments(spec: Q35Spec) -> list[str]:
    """All arguments but the program's name. The machine waits for `cont`."""
    machine = spec.machine
    argv = ["-M", "q35,hpet=off,smm=off", *_accelerator(spec), "-smp", str(spec.cpus), "-m", f"{spec.memory_mib}M"]
    argv += ["-nodefaults", "-no-user-config", "-display", "none", "-vnc", "none,share=force-shared", "-S"]
    argv += ["-chardev", f"socket,id=qmp,fd={MONITOR_FD},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    argv += ["-chardev", f"socket,id=serial,fd={SERIAL_FD},server=on,wait=off", "-serial", "chardev:serial"]
    argv += ["-rtc", "base=utc", "-boot", "strict=on,menu=off", *_QUIETLY]
    argv += _agent(machine) + _firmware(machine) + _tpm(machine)
    argv += _disk(spec) + _network(spec) + _display(spec) + _input(machine)
    argv += ["-device", "virtio-rng-pci"] if machine.devices is Devices.VIRTIO else []
    argv += ["-incoming", f"fd:{STATE_FD}"] if spec.restored else []
    return [*argv, "-sandbox", _CONFINEMENT]


def _accelerator(spec: Q35Spec) -> list[str]:
    if spec.accelerator is Accelerator.KVM:
        return ["-accel", "kvm", "-cpu", "host,migratable=on"]
    return ["-accel", f"tcg,thread=multi,tb-size={TRANSLATED_MIB}", "-cpu", "max"]


def _agent(machine: Machine) -> list[str]:
    if not machine.agent:
        return []
    return [
        *("-device", "virtio-serial-pci,id=ports"),
        *("-chardev", f"socket,id=agent,fd={AGENT_FD},server=on,wait=off"),
        *("-device", f"virtserialport,bus=ports.0,chardev=agent,name={SERIAL_PORT}"),
    ]


def _firmware(machine: Machine) -> list[str]:
    """SeaBIOS is what QEMU has by itself."""
    if machine.firmware is Firmware.BIOS:
        return []
    code = f"driver=raw,node-name=uefi-code,read-only=on,file.driver=file,file.filename={escaped(UEFI_CODE)}"
    variables = f"driver=raw,node-name=uefi-vars,file.driver=file,file.filename=/dev/fdset/{_VARIABLES_SET}"
    return [
        *("-add-fd", f"fd={VARIABLES_FD},set={_VARIABLES_SET}"),
        *("-add-fd", f"fd={VARIABLES_READ_FD},set={_VARIABLES_SET}"),
        *("-blockdev", code, "-blockdev", variables),
        *("-machine", "pflash0=uefi-code,pflash1=uefi-vars"),
    ]


def _tpm(machine: Machine) -> list[str]:
    if not machine.tpm:
        return []
    return [
        *("-chardev", f"socket,id=tpm,fd={TPM_FD}"),
        *("-tpmdev", "emulator,id=tpm0,chardev=tpm", "-device", "tpm-crb,tpmdev=tpm0"),
    ]


def _disk(spec: Q35Spec) -> list[str]:
    """An overlay of the sandbox's own on the files of the image, which are never written. Each names the one below it
    here: what a header says of others is never looked at, also that of an image a stranger has made."""
    argv: list[str] = []
    below = ""
    for number in range(spec.disks):
        kind = spec.machine.format if number == 0 else DiskFormat.QCOW2
        # A raw file names nothing; a qcow2 one might, and is told what is below it, or that nothing is.
        backing = f",backing={below}" if kind is DiskFormat.QCOW2 else ""
        place = f"file.driver=file,file.filename=/dev/fdset/{_DISKS_SET + number},file.locking=off"
        below = f"layer{number}"
        argv += ["-add-fd", f"fd={DISKS_FD + number},set={_DISKS_SET + number}"]
        argv += ["-blockdev", f"driver={kind.value},node-name={below},read-only=on,{place}{backing}"]
    overlay_file = f"file.driver=file,file.filename=/dev/fdset/{_OVERLAY_SET},file.discard=unmap"
    argv += ["-add-fd", f"fd={OVERLAY_FD},set={_OVERLAY_SET}", "-add-fd", f"fd={OVERLAY_READ_FD},set={_OVERLAY_SET}"]
    argv += ["-blockdev", f"driver=qcow2,node-name=overlay,backing={below},discard=unmap,{overlay_file}"]
    kind_of_device = "virtio-blk-pci" if spec.machine.devices is Devices.VIRTIO else "ide-hd"
    return [*argv, "-device", f"{kind_of_device},drive=overlay,id={DISK},bootindex=1,{_ERRORS}"]


def _network(spec: Q35Spec) -> list[str]:
    """A network that QEMU plays to the guest, from the namespace it runs in: what that may reach, the guest may."""
    kind = "virtio-net-pci" if spec.machine.devices is Devices.VIRTIO else "e1000e"
    return [
        *("-netdev", f"user,id={NET},ipv6=off"),
        *("-device", f"{kind},netdev={NET},id={CARD},mac={spec.mac},romfile="),
    ]


def _display(spec: Q35Spec) -> list[str]:
    width, height = spec.screen
    size = f"id={DISPLAY},edid=on,xres={width},yres={height}"
    if spec.machine.graphics is Graphics.VIRTIO:
        return ["-device", f"virtio-vga,{size},max_outputs=1,max_hostmem={MAX_GPU_MIB << 20}"]
    return ["-device", f"VGA,{size},vgamem_mb={VIDEO_MIB}"]


def _input(machine: Machine) -> list[str]:
    """Beside the PS/2 keyboard and mouse that every PC has."""
    if machine.devices is Devices.VIRTIO:
        return ["-device", "virtio-tablet-pci", "-device", "virtio-keyboard-pci"]
    return ["-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0"]
