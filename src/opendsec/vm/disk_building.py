"""Any Linux image becomes the disk of a full VM: its files as they are, a distribution's kernel, our agent as init.

The files are those a sandbox of the image would see, read from its layers laid over each other and mounted nowhere;
owners, modes, extended attributes, set-id bits, devices and links are kept, times to the second. Added are host name,
hosts and resolver of QEMU's network, where the image has a directory /etc, the mount points that are missing, and the
kernel's modules. Nothing of the image is run, and no service of it is started: the agent is the only init.

It refuses images that are disks, and those that are no system of their own (workspaces, toolkits).
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from opendsec.errors import InvalidSpecError
from opendsec.model.image import Devices, DiskFormat, Image, ImageConfig, Layer, LayerRole, Machine
from opendsec.store.disk_writing import (
    AGENT_PORT,
    MIB,
    ROOT_AT,
    ROOT_PARTITION,
    SystemDisk,
    check_tools,
    publish_disk,
)
from opendsec.store.disks import SECTOR
from opendsec.store.durable import disk_full_named
from opendsec.store.exporters.reading import opened_layer
from opendsec.store.images import ImageStore
from opendsec.store.importers.stack import Stack
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.vm.disk_kernels import DiskKernel
from opendsec.vm.initrd import archive, entries_of

MOUNT_POINTS: Mapping[str, int] = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777}
ADDRESS, GATEWAY, RESOLVER = "10.0.2.15/24", "10.0.2.2", "10.0.2.3"
"""What QEMU's user-mode network gives its one guest by DHCP; nobody has to wait for it."""
ROOM_MIB = 4096
"""Free on a disk whose size was not said."""
KERNEL_LABEL, FROM_LABEL = "opendsec.kernel", "opendsec.from"
BLOCK = 4096
_LIBRARIES = ("lib", "usr/lib")
_MOST_MIB = 2 << 20
"""The table is an MBR, with 32 bits for a number of sectors: a larger partition is cut short, and never boots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRecipe:
    """What is asked for."""

    image: str
    """Of the store; a name or a digest."""
    memory_mb: int = 512
    cpus: int = 1
    size_mib: int = 0
    """Of the whole disk; 0: what the image takes, and 4 GiB."""
    modules: bool = True
    """All modules of the kernel go on the disk, for modprobe; else only those it boots with."""


def kernel_options() -> str:
    """The kernel's command line."""
    words = (
        *("quiet", "panic=-1", "tsc=unstable", "random.trust_cpu=on", "cgroup_no_v1=all"),
        *("console=tty0", "console=ttyS0"),
        f"opendsec.transport=serial:{AGENT_PORT}",
        f"opendsec.root=/dev/vda{ROOT_PARTITION}",
        f"opendsec.address={ADDRESS}",
        f"opendsec.gateway={GATEWAY}",
    )
    return " ".join(words)


def size_mib(recipe: DiskRecipe, content_bytes: int) -> int:
    """Of the whole disk: whole MiB; tables and the journal take a tenth at most. Raises InvalidSpecError."""
    needed = ROOT_AT // MIB + math.ceil(content_bytes * 1.1 / MIB) + 64
    wanted = recipe.size_mib or needed + ROOM_MIB
    if not needed <= wanted <= _MOST_MIB:
        raise InvalidSpecError(
            f"size_mb: {wanted} is not between {needed}, which the image takes, and {_MOST_MIB}",
            detail={"field": "size_mb", "least": needed},
        )
    return wanted


def build_disk(
    store: ImageStore,
    name: str,
    recipe: DiskRecipe,
    *,
    kernel: DiskKernel,
    agent: Path,
    replace_old: bool = False,
    on_progress: OnProgress = quietly,
) -> Image:
    """Build and publish. `agent` is the guest agent's program, static.

    Raises ImageNotFoundError, InvalidSpecError, DigestMismatchError (a layer is damaged), HostCapabilityError (a
    program is missing), NodeError with a program's words, DiskFullError, ConflictError (the name is taken).
    """
    check_tools(agent)
    image = store.compose(recipe.image)
    if any(layer.role is LayerRole.DISK for layer in image.layers):
        raise InvalidSpecError(
            f"from: image {recipe.image!r} is a disk already",
            detail={"field": "from"},
            remedy=f"start it as it is: opendsec run --backend fullvm {recipe.image}",
        )
    if not replace_old:
        store.check_free(name)
    with store.scratch() as scratch, store.staging() as work, disk_full_named(store.root):
        on_progress(Progress(phase="reading the image"))
        with (
            _composed(store, image.layers, scratch, work, on_progress) as stack,
            stack.group("host") as (shown, _),
        ):
            system = _system(shown, name, recipe, kernel, _write_initrd(work, agent, kernel))
            return publish_disk(
                store,
                name,
                system,
                machine=_machine(recipe),
                config=_config(image, kernel),
                work=work,
                source=f"disk of {recipe.image}, {kernel.facts.package} {kernel.facts.version}",
                replace=replace_old,
                on_progress=on_progress,
            )


def _system(shown: Path, name: str, recipe: DiskRecipe, kernel: DiskKernel, initrd: Path) -> SystemDisk:
    """With our files added to what the image shows."""
    add_files(shown, name)
    if recipe.modules:
        add_modules(shown, kernel)
    return SystemDisk(
        tree=shown,
        kernel=kernel.image,
        initrd=initrd,
        options=kernel_options(),
        size_mib=size_mib(recipe, _bytes_below(shown)),
        fd=int(shown.name) if shown.name.isdigit() else -1,
    )


def _machine(recipe: DiskRecipe) -> Machine:
    return Machine(
        format=DiskFormat.QCOW2,
        virtual_bytes=SECTOR,
        agent=True,
        devices=Devices.VIRTIO,
        memory_mb=recipe.memory_mb,
        cpus=recipe.cpus,
    )


def _config(image: Image, kernel: DiskKernel) -> ImageConfig:
    facts = kernel.facts
    labels = {KERNEL_LABEL: f"{facts.package} {facts.version} sha256:{facts.sha256}", FROM_LABEL: image.digest}
    return replace(image.config, labels={**image.config.labels, **labels})


@contextmanager
def _composed(
    store: ImageStore, layers: tuple[Layer, ...], scratch: Path, work: Path, on_progress: OnProgress
) -> Iterator[Stack]:
    """All layers, read once and compared with their digests."""
    with ExitStack() as stack:
        composed = stack.enter_context(Stack(scratch))
        for number, layer in enumerate(layers):
            step = Progress(phase="checking layers", done=number, total=len(layers))
            fd = stack.enter_context(opened_layer(store, layer, work, on_check=partial(on_progress, step)))
            composed.add_opened(fd)
        yield composed


def add_files(root: Path, name: str) -> None:
    """Files about the machine and missing mount points. No link of the image is followed."""
    for directory, mode in MOUNT_POINTS.items():
        path = root / directory
        if not os.path.lexists(path):
            path.mkdir()
            path.chmod(mode)
    host = host_name(name)
    _put(root / "etc", "hostname", f"{host}\n")
    _put(root / "etc", "hosts", f"127.0.0.1\tlocalhost {host}\n::1\tlocalhost ip6-localhost ip6-loopback\n")
    _put(root / "etc", "resolv.conf", f"nameserver {RESOLVER}\n")


def host_name(image: str) -> str:
    """What a host may be called, made of an image's name. Pure."""
    letters = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in image.lower())
    return letters.strip("-")[:63].strip("-") or "sandbox"


def _put(directory: Path, name: str, text: str) -> None:
    if not os.path.lexists(directory):
        directory.mkdir(mode=0o755)
    if not stat.S_ISDIR(directory.lstat().st_mode):
        return  # a link may lead anywhere, out of the image too
    path = directory / name
    if os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode):
        return
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="ascii")
    path.chmod(0o644)


def add_modules(root: Path, kernel: DiskKernel) -> None:
    """Copies the kernel's modules to where the image keeps libraries. No link of the image is followed."""
    place = next((one for one in _LIBRARIES if _is_own_directory(root, one)), None)
    if place is None or not _is_own_directory(root, f"{place}/modules"):
        return
    target = root / place / "modules" / kernel.release
    if os.path.lexists(target):
        return
    try:
        shutil.copytree(kernel.tree, target, symlinks=True, ignore=shutil.ignore_patterns("build", "source"))
    except shutil.Error as error:  # a list of what went wrong, in words
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, "the kernel's modules cannot be copied") from error


def _is_own_directory(root: Path, relative: str) -> bool:
    """Whether all of the path are directories and no link; those that are missing are made."""
    at = root
    for part in Path(relative).parts:
        at /= part
        if not os.path.lexists(at):
            at.mkdir(mode=0o755)
        if not stat.S_ISDIR(at.lstat().st_mode):
            return False
    return True


def _bytes_below(top: Path) -> int:
    """What files take on ext4 at most: whole blocks, and one for the rest of each."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for directory, _, names in os.walk(top):
        total += BLOCK
        for name in names:
            status = os.lstat(os.path.join(directory, name))  # noqa: PTH118 (names may be no text)
            identity = (status.st_dev, status.st_ino)
            if status.st_nlink > 1 and identity in seen:
                continue
            seen.add(identity)
            total += BLOCK + (-(-status.st_size // BLOCK) * BLOCK if stat.S_ISREG(status.st_mode) else 0)
    return total


def _write_initrd(work: Path, agent: Path, kernel: DiskKernel) -> Path:
    path = work / "initrd"
    with path.open("xb") as file:
        for part in archive(entries_of(agent.read_bytes(), kernel.modules)):
            file.write(part)
    return path
