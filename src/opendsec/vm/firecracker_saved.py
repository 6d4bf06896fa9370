"""Memory of saved Firecracker machines: whole, or changes over a base.

    machine.json   as every saved machine has it (`vm.saved`)
    state          devices and processors, Firecracker's own
    mem            guest memory: all of it, or the pages that changed since the machine was restored, in place, the rest
                   holes; machine.json names the memory file below them, which somebody else keeps
    mem.pages      of changes: one bit for each page of `mem` that changed (holes do not survive every copy)
    mem.sums       of a `mem` saved whole: a checksum for each 64 KiB, so that a page that comes late is still believed
                   only when it is right

Memory files are never written again, so a base stays what it was for everybody who relies on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import SnapshotInvalidError
from opendsec.store.sparse import data_extents
from opendsec.vm import sparse
from opendsec.vm.base import Accelerator, Binding, MachineSpec
from opendsec.vm.page_source import CHUNK, SUM_BYTES
from opendsec.vm.processor import host_processor
from opendsec.vm.saved import MANIFEST, SavedFile, SavedMachine, check_saved, checksum

STATE, MEMORY, PAGES, SUMS = "state", "mem", "mem.pages", "mem.sums"
FILES: Final = (MANIFEST, f".{MANIFEST}", STATE, MEMORY, PAGES, SUMS)


class FileIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A memory file as it was when a machine came to depend on it."""

    path: str
    device: int
    inode: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Raises OSError."""
        status = path.stat()
        return cls(path=str(path), device=status.st_dev, inode=status.st_ino, changed_ns=status.st_mtime_ns)

    def is_there(self) -> bool:
        """Whether the path still leads to it, unchanged."""
        try:
            return FileIdentity.of(Path(self.path)) == self
        except OSError:
            return False


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What machine.json says of the machine itself."""

    memory_mib: int
    cpus: int
    drives: tuple[tuple[str, bool], ...]
    card: bool
    balloon: bool

    @classmethod
    def of(cls, spec: MachineSpec) -> Shape:
        """As `vm.saved` compares them."""
        return cls(
            memory_mib=spec.memory_mib,
            cpus=spec.cpus,
            drives=tuple((drive.name, drive.read_only) for drive in spec.drives),
            card=spec.card is not None,
            balloon=spec.balloon,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checked directory: where its files are."""

    state: Path
    layers: tuple[Path, ...]
    """Memory files, topmost first: one, or changes and their base."""
    table: Path | None
    """`mem.pages` or `mem.sums`."""


def check(directory: Path, binding: Binding, spec: MachineSpec) -> Saved:
    """The files, if this node may go on from them as that machine. Raises SnapshotInvalidError naming what differs."""
    machine = check_saved(directory, binding, spec)
    layers = (directory / MEMORY, *((Path(machine.base),) if machine.base else ()))
    table = PAGES if machine.base else SUMS
    if table not in {file.name for file in machine.files}:
        if machine.base:
            raise SnapshotInvalidError(f"the saved machine {directory.name} has no {PAGES}", remedy="make it anew")
        return Saved(state=directory / STATE, layers=layers, table=None)
    return Saved(state=directory / STATE, layers=layers, table=directory / table)


def manifest(directory: Path, binding: Binding, shape: Shape, *, base: str) -> SavedMachine:
    """Of the files that lie there. Blocking. Raises OSError."""
    files = [
        SavedFile(
            name=name,
            size=(directory / name).stat().st_size,
            crc32=None if name == MEMORY else checksum(directory / name),
        )
        for name in (STATE, MEMORY, PAGES, SUMS)
        if (directory / name).exists()
    ]
    return SavedMachine(
        vmm=binding.vmm,
        version=binding.version,
        accelerator=binding.accelerator.value,
        cpu_model=binding.cpu_model,
        **msgspec.structs.asdict(shape),
        base=base,
        base_size=Path(base).stat().st_size if base else 0,
        files=tuple(files),
    )


class Changes:
    """An older file of changes, held open: its directory may be gone before the machine is saved again."""

    def __init__(self, memory: Path) -> None:
        """Raises OSError."""
        self.pages = memory.with_name(PAGES).read_bytes()
        self.fd = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def complete_changes(fresh: Path, older: Changes | None) -> None:
    """Make `fresh`, the pages that changed since `older`, all that changed since the base of both, and write down which
    pages those are. Blocking. Raises OSError.
    """
    with _opened(fresh, os.O_RDWR) as target:
        if older is not None:
            sparse.lay_under(older.fd, sparse.mapped_extents(older.pages), target)
        fresh.with_name(PAGES).write_bytes(sparse.page_map(target))


def make_whole(memory: Path, base: str) -> None:
    """Give a memory file all its pages, and checksums beside it. Blocking. Raises OSError."""
    with _opened(memory, os.O_RDWR) as target:
        if base:
            with _opened(Path(base), os.O_RDONLY) as lower:
                sparse.lay_under(lower, data_extents(lower), target)
        zero = _sum(bytes(CHUNK))
        held = {at // CHUNK for start, length in data_extents(target) for at in _chunks(start, length)}
        with memory.with_name(SUMS).open("xb") as sums:
            for index in range(os.fstat(target).st_size // CHUNK):
                sums.write(_sum(os.pread(target, CHUNK, index * CHUNK)) if index in held else zero)
    memory.with_name(PAGES).unlink(missing_ok=True)


def _chunks(start: int, length: int) -> range:
    return range(start - start % CHUNK, start + length, CHUNK)


def _sum(chunk: bytes) -> bytes:
    return hashlib.blake2b(chunk, digest_size=SUM_BYTES).digest()


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def binding_of(version: str) -> Binding:
    """Of Firecracker of that version on this host."""
    return Binding(vmm="firecracker", version=version, accelerator=Accelerator.KVM, cpu_model=host_processor())
