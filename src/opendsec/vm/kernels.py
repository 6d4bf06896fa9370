"""Guest kernels of this node: which are there, which one is used, and what each of them is.

    <state>/kernels/<name>/kernel.json     what it is and its hashes
    <state>/kernels/<name>/vmlinux         64-bit ELF; QEMU starts it by its PVH note, Firecracker by its entry point
    <state>/kernels/<name>/modules/*.ko    those the guest agent loads first, in the order of their names; may be empty
    <state>/kernels/default                a symbolic link to the one that is used

A kernel is believed by its hash: a file that is not what was installed is refused. `kernels_install` makes them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import HostCapabilityError

DEFAULT: Final = "default"
FACTS: Final = "kernel.json"
INSTALL: Final = "opendsec kernel install"
_NAME = re.compile(r"[a-z0-9][a-z0-9.+_-]{0,99}")


class KernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """kernel.json."""

    name: str
    release: str
    """As uname -r in the guest."""
    source: str
    """Where it came from, for people."""
    sha256: str
    """Of vmlinux."""
    modules: tuple[tuple[str, str], ...] = ()
    """(file name, sha256) in the order they are loaded."""
    pvh: bool = True
    """QEMU's microvm machine can start it directly."""
    command_line_devices: bool = True
    """It finds virtio-mmio devices by its command line; else by ACPI tables only, which the VMM must then write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One installed kernel, its files verified."""

    facts: KernelFacts
    directory: Path

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def vmlinux(self) -> Path:
        return self.directory / "vmlinux"

    @property
    def modules(self) -> tuple[Path, ...]:
        return tuple(self.directory / "modules" / name for name, _ in self.facts.modules)


def kernels_directory(state_dir: Path) -> Path:
    """Where kernels of a node lie."""
    return state_dir / "kernels"


def is_kernel_name(name: str) -> bool:
    """Whether it may name a kernel."""
    return _NAME.fullmatch(name) is not None and name != DEFAULT


def installed(state_dir: Path) -> list[KernelFacts]:
    """All kernels by name, their files not looked at."""
    directory = kernels_directory(state_dir)
    if not directory.is_dir():
        return []
    found = [entry for entry in directory.iterdir() if is_kernel_name(entry.name) and (entry / FACTS).is_file()]
    return sorted((_facts(entry) for entry in found), key=lambda facts: facts.name)


def default_name(state_dir: Path) -> str | None:
    """The one that is used unless another is named."""
    link = kernels_directory(state_dir) / DEFAULT
    return link.readlink().name if link.is_symlink() else None


def find_kernel(state_dir: Path, name: str = "") -> Kernel:
    """The kernel of this name, or the default one. Raises HostCapabilityError with the remedy: none, or damaged."""
    chosen = name or default_name(state_dir)
    if chosen is None:
        raise _unusable("no guest kernel is installed", INSTALL)
    directory = kernels_directory(state_dir) / chosen
    if not is_kernel_name(chosen) or not (directory / FACTS).is_file():
        have = ", ".join(facts.name for facts in installed(state_dir)) or "none"
        raise _unusable(f"no guest kernel {chosen!r} is installed (installed: {have})", INSTALL)
    kernel = Kernel(facts=_facts(directory), directory=directory)
    _verify(kernel)
    return kernel


def is_other(directory: Path, facts: KernelFacts) -> bool:
    """Whether another kernel than this one is installed there. A directory that cannot be read holds none."""
    try:
        found = _facts(directory)
    except HostCapabilityError:
        return False
    return _content(found) != _content(facts)


def is_whole(directory: Path, facts: KernelFacts) -> bool:
    """Whether this kernel is installed there, with its files as they were."""
    try:
        if _content(_facts(directory)) != _content(facts):
            return False
        _verify(Kernel(facts=facts, directory=directory))
    except HostCapabilityError:
        return False
    return True


def _content(facts: KernelFacts) -> KernelFacts:
    """What it is, whatever it is called and wherever it came from."""
    return msgspec.structs.replace(facts, name="", source="")


def content_digest(facts: KernelFacts) -> str:
    """Of what it is; hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(_content(facts))).hexdigest()


def _verify(kernel: Kernel) -> None:
    wanted = [(kernel.vmlinux, kernel.facts.sha256)]
    wanted += [(path, digest) for path, (_, digest) in zip(kernel.modules, kernel.facts.modules, strict=True)]
    for path, digest in wanted:
        try:
            found = file_digest(path)
        except OSError as error:
            raise _unusable(f"guest kernel {kernel.name}: {path.name}: {error.strerror}", INSTALL) from error
        if found != digest:
            raise _unusable(f"guest kernel {kernel.name}: {path.name} is not the file that was installed", INSTALL)


def file_digest(path: Path) -> str:
    """SHA-256 as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(directory: Path) -> KernelFacts:
    try:
        return msgspec.json.decode((directory / FACTS).read_bytes(), type=KernelFacts)
    except (OSError, msgspec.DecodeError) as error:
        raise _unusable(f"guest kernel {directory.name}: kernel.json cannot be read: {error}", INSTALL) from error


def _unusable(sentence: str, remedy: str) -> HostCapabilityError:
    return HostCapabilityError(sentence, detail={"probe": "vmkernel"}, remedy=remedy)
