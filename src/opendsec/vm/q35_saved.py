"""What a saved PC says about itself (`saved.json`), and the check before anything goes on from it. Each difference is
refused by name: under another QEMU, accelerator or processor it would run wrong, not fail."""

from __future__ import annotations

from pathlib import Path

import msgspec

from opendsec.errors import SnapshotInvalidError
from opendsec.model.image import Machine
from opendsec.vm.base import Binding
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
        sizes={path.name: path.stat().st_size for path in directory.iterdir()},
    )


def write_saved(directory: Path, saved: Saved) -> None:
    """The last file to be written: without it there is no saved machine."""
    partial = directory / f".{MANIFEST}"
    partial.write_bytes(msgspec.json.encode(saved))
    partial.rename(directory / MANIFEST)


def read_saved(directory: Path) -> Saved:
    """What a saved machine says. Raises SnapshotInvalidError."""
    try:
        saved = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError) as error:
        raise _invalid(f"{MANIFEST} cannot be read: {error}") from error
    if saved.format != FORMAT:
        raise _invalid(f"it has format {saved.format}, this version reads {FORMAT}")
    for name, size in saved.sizes.items():
        path = directory / name
        if "/" in name or not path.is_file() or path.stat().st_size != size:
            raise _invalid(f"its file {name} is gone or has another size than when it was saved")
    return saved


def check_saved(saved: Saved, binding: Binding, spec: Q35Spec) -> None:
    """Raises SnapshotInvalidError naming what differs between then and here."""
    wanted = (
        ("VMM", saved.vmm, binding.vmm),
        ("VMM version", saved.version, binding.version),
        ("accelerator", saved.accelerator, binding.accelerator.value),
        ("processor model", saved.cpu_model, binding.cpu_model),
        ("memory in MiB", saved.memory_mib, spec.memory_mib),
        ("number of processors", saved.cpus, spec.cpus),
        ("devices", saved.machine, spec.machine),
    )
    for what, had, have in wanted:
        if had != have:
            raise SnapshotInvalidError(
                f"the saved machine is bound to another {what}: it has {had!r}, here it is {have!r}",
                detail={"differs": what},
                remedy="start it on a node like the one it was saved on, or make it anew",
            )


def _invalid(why: str) -> SnapshotInvalidError:
    return SnapshotInvalidError(f"the saved machine cannot be used: {why}", remedy="make it anew")
