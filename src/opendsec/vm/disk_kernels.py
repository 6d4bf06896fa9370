"""The kernel of disks that are made from images: a Debian package with PCI and virtio, kept once it was fetched.

    <state>/disk-kernels/<package>/package.deb     as apt-get verified it
    <state>/disk-kernels/<package>/kernel.json     which one it is, and its hash
    <state>/disk-kernels/<package>/work/           of who fetches or unpacks it

What is kept is used for every further disk until `opendsec kernel fetch` brings a newer one, so disks made of one image
have one kernel, and making one needs no network. A kept file that is not what was fetched is refused. Guest kernels of
microVMs (`kernels_install`) are others: they find no PCI devices.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import HostCapabilityError, ImageInvalidError, InvalidSpecError
from opendsec.store.durable import appearing, disk_full_named
from opendsec.store.programs import find_program
from opendsec.store.staging import reap_staging, staged
from opendsec.vm import kernels_debian
from opendsec.vm.kernels import file_digest
from opendsec.vm.kernels_found import Say, run

PACKAGE: Final = kernels_debian.DEFAULT_PACKAGE
MODULES: Final = (
    *("virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtio_rng"),
    *("crc32c_generic", "ext4"),
)
"""What the agent loads at every boot; what is built in, or not there, is not. All others are on the disk itself."""
NEEDED: Final = frozenset({"virtio_pci", "virtio_blk", "virtio_console", "ext4"})
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]{1,99}")
_FILE, _FACTS = "package.deb", "kernel.json"


class DiskKernelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """kernel.json."""

    package: str
    """The real package; a meta-package leads to it."""
    version: str
    sha256: str
    """Of the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskKernel:
    """An unpacked one."""

    facts: DiskKernelFacts
    image: Path
    """A bzImage."""
    release: str
    """As uname -r says."""
    modules: tuple[tuple[str, bytes], ...]
    """(name, bytes) of those the agent loads, each after those it needs."""
    tree: Path
    """All modules, as /lib/modules/<release> has them, with the lists modprobe reads."""


def fetch(state_dir: Path, package: str, *, environment: Mapping[str, str], say: Say) -> DiskKernelFacts:
    """Fetch the package as it is now, and keep it instead of what was kept.

    Raises InvalidSpecError (no package's name), NodeError (it cannot be fetched), HostCapabilityError (a program is
    missing), DiskFullError; what was kept stays then.
    """
    _check_name(package)
    name = kernels_debian.real_package(package, environment)
    if not name.startswith("linux-image-"):
        raise InvalidSpecError(
            f"kernel: the package {package} is no kernel",
            detail={"field": "kernel"},
            remedy="name one that `apt-cache search linux-image` lists",
        )
    place = _place(state_dir, package)
    with disk_full_named(state_dir):
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _work(place) as work:
            archive = kernels_debian.download(work, name, environment, say)
            ask = [find_program("dpkg-deb"), "--field", str(archive), "Version"]
            remedy = "the package is damaged"
            (version,) = run(ask, what="dpkg-deb", timeout_s=60, remedy=remedy, environment=environment)
            facts = DiskKernelFacts(package=name, version=version.strip(), sha256=file_digest(archive))
            (place / _FACTS).unlink(missing_ok=True)  # one without the other is fetched anew
            with appearing(place / _FILE) as partial:
                shutil.copyfile(archive, partial)
            with appearing(place / _FACTS) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    return facts


def kept(state_dir: Path, package: str = PACKAGE) -> DiskKernelFacts | None:
    """Which one is kept; None: none. Raises InvalidSpecError, HostCapabilityError (it is damaged)."""
    _check_name(package)
    place = _place(state_dir, package)
    return _kept(place) if (place / _FACTS).is_file() else None


@contextmanager
def disk_kernel(
    state_dir: Path, package: str = PACKAGE, *, environment: Mapping[str, str], say: Say
) -> Iterator[DiskKernel]:
    """The kept one, unpacked while the context lasts; it is fetched when none is kept.

    Raises as `fetch` does, HostCapabilityError when what is kept is damaged, ImageInvalidError when it is no kernel a
    disk can start with.
    """
    find_program("depmod")
    facts = kept(state_dir, package) or fetch(state_dir, package, environment=environment, say=say)
    place = _place(state_dir, package)
    say(f"unpacking {facts.package}")
    with disk_full_named(state_dir), _work(place) as work:
        yield _unpacked(place / _FILE, facts, work / "tree", environment)


def _check_name(package: str) -> None:
    if not _NAME.fullmatch(package):
        raise InvalidSpecError(f"kernel: {package[:80]!r} is not a package's name", detail={"field": "kernel"})


def _place(state_dir: Path, package: str) -> Path:
    return state_dir / "disk-kernels" / package


@contextmanager
def _work(place: Path) -> Iterator[Path]:
    """A directory that goes with its context, or with the next one when this process is killed."""
    parent, lock = place / "work", place / "work.lock"
    parent.mkdir(mode=0o700, exist_ok=True)
    lock.touch(mode=0o600)
    reap_staging(parent, lock)
    with staged(parent, lock) as work:
        yield work


def _kept(place: Path) -> DiskKernelFacts:
    try:
        facts = msgspec.json.decode((place / _FACTS).read_bytes(), type=DiskKernelFacts)
        found = file_digest(place / _FILE)
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(place, str(error)) from error
    if found != facts.sha256:
        raise _damaged(place, f"{_FILE} is not the file that was fetched")
    return facts


def _damaged(place: Path, why: str) -> HostCapabilityError:
    return HostCapabilityError(
        f"the kept kernel of disks {place.name} cannot be used: {why}",
        detail={"probe": "diskkernel"},
        remedy=f"opendsec kernel fetch {place.name}",
    )


def _unpacked(archive: Path, facts: DiskKernelFacts, tree: Path, environment: Mapping[str, str]) -> DiskKernel:
    kernels_debian.unpack(archive, tree, environment)
    image = kernels_debian.image_in(tree, facts.package)
    release = image.name.removeprefix("vmlinuz-")
    modules = next((one for one in (tree / "lib/modules", tree / "usr/lib/modules") if (one / release).is_dir()), None)
    if modules is None:
        raise ImageInvalidError(f"the package {facts.package} has no modules of its kernel {release}")
    depmod = [find_program("depmod"), "-b", str(modules.parent.parent), release]  # it looks below lib/modules there
    run(depmod, what="depmod", timeout_s=300, remedy="the package is damaged", environment=environment)
    loaded = kernels_debian.modules_of(tree, MODULES, NEEDED)
    return DiskKernel(
        facts=facts,
        image=image,
        release=release,
        modules=tuple((name[4:].removesuffix(".ko"), content) for name, content in loaded),
        tree=modules / release,
    )
