"""Layers of images, mounted: each exactly once per node, read-only, below one directory in the host's mount namespace.

    <mount root>/<hex digest>/    one layer, with `directio` where the kernel has it
    <mount root>/.lock            held while a layer is mounted or unmounted

Once per node, because a second mount of the same file caches everything twice. Any process may ask at any time: who
comes first mounts, the others and every later process adopt what is there, after checking that it is that file.
Nothing is unmounted when a sandbox ends, for the next one needs the layer; `unmount_all` is for `opendsec down`.

Mounts keep set-id bits and devices as the image has them: a sandbox's own mounts and user range take their power away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from opendsec.errors import HostCapabilityError, ImageInvalidError, NodeError
from opendsec.linux.libc import MNT_DETACH, UMOUNT_NOFOLLOW, umount2
from opendsec.linux.mount import MountEntry, attach, erofs, mountinfo
from opendsec.model.image import Image, Layer
from opendsec.store.leases import Leases
from opendsec.store.loading.base import Loader
from opendsec.store.manifest import hex_of
from opendsec.store.staging import locked

_EROFS = "erofs"
_LOCK = ".lock"


class LayerMounts:
    """The mounted layers of one node, as descriptors.

    A context manager: leaving it (or `close`) gives back the descriptors, not the mounts. Threads may share it.
    `leases`: where the store is told what is mounted, so that nobody collects it on another node.
    """

    def __init__(self, loader: Loader, mount_root: Path, *, leases: Leases | None = None) -> None:
        self._loader = loader
        self._root = mount_root
        self._leases = leases
        self._fds: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._leases is not None:
            with _locked(self._root) as root:
                self._leases.keep_only(f"sha256:{Path(entry.target).name}" for entry in _layers_below(root))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def acquire(self, image: Image) -> tuple[int, ...]:
        """Directory descriptors of the image's layers, **topmost first**, each mounted if it was not.

        They belong to this object and stay good until `close` or `unmount_all`. Blocks while a layer that is not
        mounted yet is fetched and mounted; see `acquired`.
        Raises ImageInvalidError (a layer is missing or no EROFS file), HostCapabilityError (this kernel or file
        system cannot mount it; the remedy says what to change), NodeError (something else is mounted there), and
        whatever the loader does.
        """
        return tuple(self._layer(layer) for layer in reversed(image.layers))

    def acquired(self, image: Image) -> tuple[int, ...] | None:
        """The same if this object has them all already, without waiting for anything."""
        fds = tuple(self._fds.get(layer.digest, -1) for layer in reversed(image.layers))
        return None if -1 in fds else fds

    def close(self) -> None:
        """Give back the descriptors; the mounts stay for the next process."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def unmount_all(self) -> int:
        """Unmount every layer below the mount root; how many there were. Sandboxes that still run keep theirs."""
        self.close()
        return unmount_layers(self._root, leases=self._leases)

    def _layer(self, layer: Layer) -> int:
        digest = layer.digest
        fd = self._fds.get(digest)
        if fd is None:
            with _locked(self._root) as root:
                fd = self._fds.get(digest)  # Another thread may have been first.
                if fd is None:
                    target = root / hex_of(digest)
                    self._mount_once(layer, target)
                    fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    self._fds[digest] = fd
        return fd

    def _mount_once(self, layer: Layer, target: Path) -> None:
        if self._leases is not None:
            self._leases.take(layer)  # before the loader looks for it
        files = self._loader.attach(layer)
        present = mounted_at(target)
        if present is not None:
            check_adoptable(present, files.meta)
            return
        target.mkdir(mode=0o700, exist_ok=True)
        mount_erofs(files.meta, target, data=files.data)


def unmount_layers(mount_root: Path, *, leases: Leases | None = None) -> int:
    """Unmount every layer below a mount root; how many there were. Needs no loader that still runs, and no store
    either, whose lease then ends by itself.
    """
    if not mount_root.is_dir():
        return 0
    with _locked(mount_root) as root:
        mounted = _layers_below(root)
        for entry in reversed(mounted):
            umount2(entry.target, MNT_DETACH | UMOUNT_NOFOLLOW)
        for directory in root.iterdir():
            if directory.is_dir():
                directory.rmdir()
        if leases is not None:
            leases.drop_all()
    return len(mounted)


def _layers_below(root: Path) -> list[MountEntry]:
    return [entry for entry in mountinfo() if Path(entry.target).parent == root]


@contextmanager
def _locked(mount_root: Path) -> Iterator[Path]:
    """The mount root without symbolic links, as mountinfo shows it; one process at a time."""
    mount_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = mount_root.resolve(strict=True)
    with locked(root / _LOCK):
        yield root


def mounted_at(target: Path) -> MountEntry | None:
    """What is mounted on exactly this path; the topmost when there are several."""
    found = [entry for entry in mountinfo() if entry.target == str(target)]
    return found[-1] if found else None


def check_adoptable(present: MountEntry, blob: Path) -> None:
    """Whether a mount made by somebody before us is that layer. NodeError when it is anything else."""
    if present.fstype != _EROFS or present.source != str(blob):
        raise NodeError(
            f"{present.target} is taken by {present.fstype} from {present.source}, expected {blob}",
            detail={"path": present.target},
            remedy=f"umount {present.target}, or use another OPENDSEC_RUN_DIR",
            retryable=False,
        )


def open_erofs(blob: Path, *, data: Path | None = None) -> int:
    """An EROFS file mounted nowhere: a descriptor to read it by; it is gone when that is closed, or its process dies.

    Raises as `LayerMounts.acquire` does.
    """
    try:
        return erofs(blob, devices=() if data is None else (data,))
    except OSError as error:
        raise _mount_failed(error, blob) from error


def mount_erofs(blob: Path, target: Path, *, data: Path | None = None) -> None:
    """Mount an EROFS file at a directory, in one step: it is never there without its content."""
    tree = open_erofs(blob, data=data)
    try:
        attach(tree, target)
    finally:
        os.close(tree)


def _mount_failed(error: OSError, blob: Path) -> Exception:
    match error.errno:
        case errno.ENOTBLK:
            return HostCapabilityError(
                f"EROFS files cannot be mounted from the file system {blob} lies on (ENOTBLK)",
                detail={"probe": "erofs", "path": str(blob)},
                remedy="put OPENDSEC_STATE_DIR on ext4, XFS or btrfs (not tmpfs or overlay), with Linux 6.12 or newer",
            )
        case errno.ENODEV:
            return HostCapabilityError(
                "this kernel has no EROFS",
                detail={"probe": "erofs"},
                remedy="modprobe erofs, or use Linux 6.12 or newer",
            )
        case errno.EPERM | errno.EACCES:
            return HostCapabilityError(
                "mounting layers needs root", detail={"probe": "root"}, remedy="run the edge as root"
            )
        case errno.EINVAL | errno.EUCLEAN:
            return ImageInvalidError(f"layer {blob.name} is no EROFS file this kernel can read: {error.strerror}")
        case _:
            return NodeError(f"layer {blob.name} could not be mounted: {error.strerror}")
