"""What a saved PC says about itself (`saved.json`), and the check before anything goes on from it. Each difference is
refused by name: under another QEMU, accelerator or processor it would run wrong, not fail."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opendsec.model.image import Machine
from opendsec.vm.base import Binding
from opendsec.vm.binding_file import check_binding, invalid, read_bound, write_last
from opendsec.vm.q35_line import Q35Spec

MANIFEST = "saved.json"
FORMAT = 1


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """saved.json."""

    format: int = FORMAT
    vmm: str
    version: str
    accelerator: str
    cpu_model: str
    memory_mib: int
    cpus: int
    screen: tuple[int, int]
    mac: str
    machine: Machine
    disks: int = 1
    disk_bytes: int = 0
    """As `Q35Spec` has them."""
    sizes: dict[str, int]
    """Of the files beside it."""


def describe(binding: Binding, spec: Q35Spec, directory: Path) -> Saved:
    """Of files that lie in `directory`."""
    return Saved(
        vmm=binding.vmm,
        version=binding.version,
        accelerator=binding.accelerator.value,
        cpu_model=binding.cpu_model,
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        screen=spec.screen,
        mac=spec.mac,
        machine=spec.machine,
        disks=spec.disks,
        disk_bytes=spec.disk_bytes,
        sizes={path.name: path.stat().st_size for path in directory.iterdir()},
    )


def write_saved(directory: Path, saved: Saved) -> None:
    """The last file to be written: without it there is no saved machine."""
    write_last(directory, MANIFEST, saved)


def read_saved(directory: Path) -> Saved:
    """What a saved machine says. Raises SnapshotInvalidError."""
    saved = read_bound(directory, MANIFEST, Saved, known=FORMAT)
    for name, size in saved.sizes.items():
        path = directory / name
        if "/" in name or not path.is_file() or path.stat().st_size != size:
            raise invalid(f"its file {name} is gone or has another size than when it was saved")
    return saved


def check_saved(saved: Saved, binding: Binding, spec: Q35Spec) -> None:
    """Raises SnapshotInvalidError naming what differs between then and here."""
    shape = (
        ("memory in MiB", saved.memory_mib, spec.memory_mib),
        ("number of processors", saved.cpus, spec.cpus),
        ("devices", saved.machine, spec.machine),
        ("chain of disks", saved.disks, spec.disks),
    )
    check_binding(saved, binding, shape)
