"""What every saved machine says about itself: `machine.json`, and the checks before anything is restored from it.

    machine.json   what it is bound to, its shape, and size and checksum of the files beside it

A machine restored under another VMM, version, accelerator or processor model would run wrong, not fail: so each
difference is refused by name. Checksums (CRC-32) cover what was written for one machine; the memory file of a template
is known by its size only, for it is large, shared, and read as it is touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from opendsec.vm.base import Binding, MachineSpec
from opendsec.vm.binding_file import check_binding, invalid, read_bound, write_last

MANIFEST = "machine.json"
FORMAT = 1
_CHUNK = 1024 * 1024


class SavedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a saved machine; `crc32` is None where only the size is checked."""

    name: str
    size: int
    crc32: int | None = None


class SavedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """machine.json."""

    format: int = FORMAT
    vmm: str
    version: str
    accelerator: str
    cpu_model: str
    memory_mib: int
    cpus: int
    drives: tuple[tuple[str, bool], ...]
    """(name, read only), in order."""
    card: bool
    balloon: bool
    acpi: bool = False
    """Its devices are those of a machine with ACPI tables, whatever kernel new ones boot (QEMU)."""
    base: str = ""
    """Path of the memory file that what is saved here is a difference to; "": memory is whole."""
    base_size: int = 0
    files: tuple[SavedFile, ...]


def describe(binding: Binding, spec: MachineSpec, directory: Path, names: Sequence[str], *, base: str) -> SavedMachine:
    """The manifest of files that lie in `directory`; those of `names` get a checksum, all others a size."""
    files = [
        SavedFile(name=path.name, size=path.stat().st_size, crc32=checksum(path) if path.name in names else None)
        for path in sorted(directory.iterdir())
    ]
    return SavedMachine(
        vmm=binding.vmm,
        version=binding.version,
        accelerator=binding.accelerator.value,
        cpu_model=binding.cpu_model,
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        drives=tuple((drive.name, drive.read_only) for drive in spec.drives),
        card=spec.card is not None,
        balloon=spec.balloon,
        acpi=spec.acpi,
        base=base,
        base_size=Path(base).stat().st_size if base else 0,
        files=tuple(files),
    )


def write_manifest(directory: Path, saved: SavedMachine) -> None:
    """The last file to be written: without it there is no saved machine."""
    write_last(directory, MANIFEST, saved)


def read_manifest(directory: Path) -> SavedMachine:
    """What a saved machine says. Raises SnapshotInvalidError."""
    return read_bound(directory, MANIFEST, SavedMachine, known=FORMAT)


def check_saved(directory: Path, binding: Binding, spec: MachineSpec) -> SavedMachine:
    """The manifest, if `directory` can be restored as `spec` here. Raises SnapshotInvalidError naming what differs."""
    saved = read_manifest(directory)
    shape = (
        ("memory in MiB", saved.memory_mib, spec.memory_mib),
        ("number of processors", saved.cpus, spec.cpus),
        ("drives", saved.drives, tuple((drive.name, drive.read_only) for drive in spec.drives)),
        ("network card", saved.card, spec.card is not None),
        ("balloon", saved.balloon, spec.balloon),
    )
    check_binding(saved, binding, shape)
    for file in saved.files:
        _check_file(directory / file.name, file)
    if saved.base and not _has_size(Path(saved.base), saved.base_size):
        raise invalid(f"the memory it continues, {saved.base}, is gone or has another size")
    return saved


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def _check_file(path: Path, file: SavedFile) -> None:
    if "/" in file.name or not _has_size(path, file.size):
        raise invalid(f"{file.name} is missing or not {file.size} bytes long")
    if file.crc32 is not None and checksum(path) != file.crc32:
        raise invalid(f"{file.name} is damaged: its checksum is another")


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
