"""What a microVM is made of, from what was asked for: its machine, its root, its names. Pure.

memory_limit_mb   the guest's memory, its kernel included; 128 or more, 256 unless named
cpu_cores_limit   processors of the guest, rounded up, and as a quota what was asked for; 1 unless named
pids_limit        kept inside the guest
disk_limit_mb     the writable disk, sparse on the host; 16 or more, 4096 unless named
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import msgspec

from opendsec.backends.microvm_layers import LayerDrives
from opendsec.errors import InvalidSpecError
from opendsec.guest.machine import ExtraDisk, GuestSetup, Identity, RootLayer
from opendsec.linux.cgroup import CgroupLimits
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image
from opendsec.model.spec import SandboxSpec, check_path
from opendsec.store.loading.base import LayerFiles
from opendsec.vm.base import Accelerator, Binding, Card, Drive, MachineSpec

MIB = 1024 * 1024
MIN_MEMORY_MIB, DEFAULT_MEMORY_MIB = 128, 256
DEFAULT_DISK_MIB = 4096
MAX_CPUS = 32
OVERHEAD_MIB = {Accelerator.KVM: 96, Accelerator.TCG: 224}
"""What a VMM may use beside the guest's memory: measured 10 to 30 MiB, and under emulation the translated code."""
WRITABLE, DISK = "disk", "disk.img"
DATA_DRIVE, DATA = "data", "data.img"
DATA_LABEL = "opendsec.data-disk"
"""Label of an image: where a disk of its own is mounted, for what cannot lie on an overlay (Docker's data root)."""
HOST_NAME = "sandbox"
MAC = "02:0d:5e:00:00:01"
"""Locally administered; what cards are made with. Each sandbox is told its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What machines must have in common to come from one template."""

    memory_mib: int
    cpus: int
    disk_mib: int
    pids: int
    """0: no limit."""
    online: bool
    data_disk: str = ""
    """Mount point of a second disk; "": there is none."""

    @property
    def disks(self) -> tuple[str, ...]:
        """Files of its writable disks, in the order of their drives."""
        return (DISK, DATA) if self.data_disk else (DISK,)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox's own file `vm.json`, and that of a snapshot: what it takes to start the machine again."""

    shape: Shape
    image: Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What every machine of this node boots from."""

    kernel: Path
    kernel_digest: str
    initrd: Path
    command_line: str
    acpi: bool = False
    """The kernel finds its devices by ACPI tables only."""


def shape_of(spec: SandboxSpec, image: Image) -> Shape:
    """The shape of what was asked for. Raises InvalidSpecError naming the field."""
    data_disk = image.config.labels.get(DATA_LABEL, "")
    if data_disk:
        check_path(data_disk, f"the image's label {DATA_LABEL}")
    wanted = spec.resources
    memory = wanted.memory_limit_mb or DEFAULT_MEMORY_MIB
    if memory < MIN_MEMORY_MIB:
        raise InvalidSpecError(
            f"memory_limit_mb: a microVM needs {MIN_MEMORY_MIB} MiB for itself and its kernel, {memory} were asked for",
            detail={"field": "memory_limit_mb"},
        )
    cpus = max(1, math.ceil(wanted.cpu_cores_limit or 1))
    if cpus > MAX_CPUS:
        raise InvalidSpecError(
            f"cpu_cores_limit: a microVM has at most {MAX_CPUS} processors", detail={"field": "cpu_cores_limit"}
        )
    return Shape(
        memory_mib=memory,
        cpus=cpus,
        disk_mib=wanted.disk_limit_mb or DEFAULT_DISK_MIB,
        pids=wanted.pids_limit or 0,
        online=is_online(spec),
        data_disk=data_disk,
    )


def is_online(spec: SandboxSpec) -> bool:
    """Whether it has a network."""
    return spec.network_rules.get("*", False)


def limits_of(spec: SandboxSpec, shape: Shape, accelerator: Accelerator) -> CgroupLimits:
    """Of the VMM's control group."""
    memory = (shape.memory_mib + OVERHEAD_MIB[accelerator]) * MIB
    return CgroupLimits(memory_bytes=memory, cpu_cores=spec.resources.cpu_cores_limit)


def template_key(image: Image, shape: Shape, boot: Boot, binding: Binding) -> str:
    """Name of the template: it differs whenever a machine restored from it would."""
    layers = [layer.digest for layer in image.layers]
    parts = [layers, shape, boot.kernel_digest, boot.initrd.name, boot.command_line, binding]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def machine(shape: Shape, boot: Boot, layers: LayerDrives, *, disks: Path, tap: str | None) -> MachineSpec:
    """The machine; `disks`: the directory of its writable ones, and of the one that was made of layers."""
    drives = list(layers.given(disks))
    for name, file in zip((WRITABLE, DATA_DRIVE), shape.disks, strict=False):
        drives.append(Drive(name=name, path=disks / file, read_only=False))
    return MachineSpec(
        kernel=boot.kernel,
        initrd=boot.initrd,
        command_line=boot.command_line,
        memory_mib=shape.memory_mib,
        cpus=shape.cpus,
        acpi=boot.acpi,
        drives=tuple(drives),
        card=None if tap is None else Card(tap=tap, mac=MAC),
    )


def setup(shape: Shape, layers: Sequence[LayerFiles], serials: dict[str, str], identity: Identity) -> GuestSetup:
    """What the guest's agent makes the root of; `serials`: a drive's name → how the guest finds it."""
    return GuestSetup(
        layers=tuple(
            RootLayer(meta=serials[f"l{number}-meta"], data="" if files.data is None else serials[f"l{number}-data"])
            for number, files in enumerate(layers)
        ),
        writable=serials[WRITABLE],
        disks=(ExtraDisk(drive=serials[DATA_DRIVE], mount_point=shape.data_disk),) if shape.data_disk else (),
        pids_limit=shape.pids,
        identity=identity,
    )


def mac_of(sandbox_id: SandboxId) -> str:
    """The address of a sandbox's card, locally administered: the same after a pause, so that connections go on."""
    return "02:" + hashlib.sha256(sandbox_id.encode()).digest()[:5].hex(":")


def identity(
    *,
    token: bytes,
    inner: IPv4Address | None,
    host: IPv4Address | None,
    resolvers: Sequence[str],
    mac: str = "",
    is_new: bool = False,
) -> Identity:
    """Who a sandbox is; `token`: 32 random bytes of this hand-out. Without addresses its network is a loopback.
    `is_new`: it was copied from another sandbox.
    """
    online = inner is not None
    return Identity(
        host_name=HOST_NAME,
        machine_id=token[:16].hex(),
        generation=token[16:32].hex(),
        mac=mac if online else "",
        address=f"{inner}/31" if online else "",
        gateway=str(host) if online else "",
        is_new=is_new,
        resolvers=tuple(resolvers) if online else (),
    )
