"""Layers of images, mounted: each exactly once per node, read-only, below one directory in the host's mount namespace.

    <mount root>/<hex digest>/       one layer, with `directio` where the kernel has it
    <mount root>/.<hex digest>       held while that layer is mounted, so a slow one holds up nobody else
    <mount root>/.<hex digest>.of    which life of its loader the mounted layer is read from, when that can end
    <mount root>/.lease              held while the lease on the store is written
    <mount root>/.lock               shared by whoever mounts, held alone by whoever unmounts

Once per node, because a second mount of the same file caches everything twice. Any process may ask at any time: who
comes first mounts, the others and every later process adopt what is there, after checking that it is that file.
Nothing is unmounted when a sandbox ends, for the next one needs the layer; `unmount_all` is for `opendsec down`.
A layer whose loader died is mounted anew for those who ask from then on; sandboxes that have the old mount keep it,
and what they read of it that is not in memory is an I/O error.

Mounts keep set-id bits and devices as the image has them: a sandbox's own mounts and user range take their power away.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from opendsec.errors import HostCapabilityError, ImageInvalidError, InvalidSpecError, NodeError
from opendsec.linux.libc import MNT_DETACH, UMOUNT_NOFOLLOW, umount2
from opendsec.linux.mount import MountEntry, attach, erofs, mountinfo
from opendsec.model.image import Image, Layer, LayerRole
from opendsec.store.hidden_links import check_links, may_hide
from opendsec.store.leases import Leases
from opendsec.store.loading.base import LayerFiles, Loader
from opendsec.store.loading.starting import Starts
from opendsec.store.manifest import hex_of

_EROFS = "erofs"
_LOCK = ".lock"
_LEASE_LOCK = ".lease"
_LOCK_POLL_S = 0.02
THREADS = 64
"""For layers that are being mounted at once. Not the event loop's own few, which everything else waits for."""
WAIT_S = 60.0
"""For somebody else who mounts the same layer, or unmounts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mounted:
    fd: int
    generation: str


class LayerMounts:
    """The mounted layers of one node, as descriptors.

    A context manager: leaving it (or `close`) gives back the descriptors, not the mounts. Threads may share it.
    `leases`: where the store is told what is mounted, so that nobody collects it on another node. `starts`: who reads
    ahead what a start reads; it is not closed with this.
    """

    def __init__(
        self,
        loader: Loader,
        mount_root: Path,
        *,
        leases: Leases | None = None,
        starts: Starts | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self._loader = loader
        self._root = mount_root
        self._leases = leases
        self._starts = starts
        self._wait_s = wait_s
        self._mounted: dict[str, _Mounted] = {}
        self._fitting: set[str] = set()
        """Compositions whose layers fit on each other."""
        self._dead_fds: list[int] = []
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._leases is not None:
            with _locked(self._root, time.monotonic() + self._wait_s, alone=True) as root:
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
        system cannot mount it; the remedy says what to change), NodeError (something else is mounted there, or
        somebody else has been at it for `wait_s`; the latter is retryable), and whatever the loader does.
        """
        check_mountable(image)
        return tuple(self._layer(layer) for layer in reversed(image.layers))

    def disk_files(self, image: Image) -> tuple[Path, ...]:
        """The files of an image that is a whole disk, as files of this node, and not collected from now on: the lowest
        disk first, then its differences. Blocks while they are fetched, if the store is elsewhere. Raises as `acquire`
        does.
        """
        self.hold(image.layers)
        return tuple(self._loader.attach(layer).meta for layer in image.layers)

    def hold(self, layers: Sequence[Layer]) -> None:
        """They are not collected from now on, mounted or not; what a process before this one held is not, once this
        object was opened."""
        with _held(self._root_made() / _LEASE_LOCK, time.monotonic() + self._wait_s, alone=True):
            if self._leases is not None:
                for layer in layers:
                    self._leases.take(layer)

    def _root_made(self) -> Path:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._root.resolve(strict=True)

    async def acquire_soon(self, image: Image) -> tuple[int, ...]:
        """`acquire` for a start: in a thread of this object's own, for at most `wait_s`; NodeError, retryable, after
        that. ImageInvalidError when a layer would hide what another has behind a link (`hidden_links`). Then it waits,
        a little, for what the start is going to read (`Starts.ready`).

        The thread goes on, so a later call finds what it got.
        """
        found = self.acquired(image)
        if found is None:
            found = await self._acquire_in_thread(image)
        if image.digest not in self._fitting and may_hide(image):
            await asyncio.to_thread(check_links, image, found)
            self._fitting.add(image.digest)
        if self._starts is not None:
            await self._starts.ready(image.layers)
        return found

    async def _acquire_in_thread(self, image: Image) -> tuple[int, ...]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="layers")
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self.acquire, image)
        except TimeoutError as error:
            raise NodeError(
                f"the layers of image {image.name!r} could not be mounted within {self._wait_s:g} s",
                detail={"image": image.name},
                remedy="the store is slow or does not answer; try again",
                retryable=True,
            ) from error

    async def files_soon(self, image: Image) -> tuple[LayerFiles, ...]:
        """The files of the image's layers, **lowest first**, for a guest whose own kernel mounts them.

        They are mounted here too, which is what keeps them from being collected. Raises as `acquire_soon`.
        """
        await self.acquire_soon(image)
        return await asyncio.to_thread(lambda: tuple(self._loader.attach(layer) for layer in image.layers))

    def acquired(self, image: Image) -> tuple[int, ...] | None:
        """The same if this object has them all already, and they can be read, without waiting for anything."""
        generation = self._loader.generation
        fds = tuple(self._current(layer.digest, generation) for layer in reversed(image.layers))
        return None if -1 in fds else fds

    def held(self) -> list[tuple[str, int]]:
        """Digest and descriptor of each layer this object has and that can be read; good until `close`."""
        return [
            (digest, mounted.fd)
            for digest, mounted in list(self._mounted.items())
            if mounted.generation in ("", self._loader.generation)
        ]

    def close(self) -> None:
        """Give back the descriptors; the mounts stay for the next process."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        for fd in (*self._dead_fds, *(mounted.fd for mounted in self._mounted.values())):
            os.close(fd)
        self._dead_fds.clear()
        self._mounted.clear()

    def unmount_all(self) -> int:
        """Unmount every layer below the mount root; how many there were. Sandboxes that still run keep theirs."""
        self.close()
        return unmount_layers(self._root, leases=self._leases)

    def _current(self, digest: str, generation: str) -> int:
        """The descriptor of a mounted layer; -1 when there is none that can be read."""
        mounted = self._mounted.get(digest)
        return mounted.fd if mounted is not None and mounted.generation in ("", generation) else -1

    def _layer(self, layer: Layer) -> int:
        fd = self._current(layer.digest, self._loader.generation)
        if fd != -1:
            return fd
        end = time.monotonic() + self._wait_s
        name = hex_of(layer.digest)
        with _locked(self._root, end, alone=False) as root, _held(root / f".{name}", end, alone=True):
            fd = self._current(layer.digest, self._loader.generation)  # Another thread may have been first.
            if fd == -1:
                files, is_new = self._mount_once(layer, root / name)
                fd = os.open(root / name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if is_new and self._starts is not None:
                    self._starts.begin(layer, files, fd)
                before = self._mounted.get(layer.digest)
                if before is not None:
                    self._dead_fds.append(before.fd)  # a start may be using it at this moment
                self._mounted[layer.digest] = _Mounted(fd=fd, generation=files.generation)
        return fd

    def _mount_once(self, layer: Layer, target: Path) -> tuple[LayerFiles, bool]:
        """What it is mounted from, and whether it was not before."""
        if self._leases is not None:
            with _held(target.with_name(_LEASE_LOCK), time.monotonic() + self._wait_s, alone=True):
                self._leases.take(layer)  # before the loader looks for it
        present = mounted_at(target)
        if self._starts is not None and present is None:
            self._starts.expect(layer)
        files = self._loader.attach(layer)
        record = target.with_name(f".{target.name}.of")
        if present is not None:
            check_adoptable(present, files.meta)
            if (record.read_text(encoding="ascii") if record.exists() else "") == files.generation:
                return files, False
            umount2(target, MNT_DETACH | UMOUNT_NOFOLLOW)
        if files.generation:
            record.write_text(files.generation, encoding="ascii")
        else:
            record.unlink(missing_ok=True)
        target.mkdir(mode=0o700, exist_ok=True)
        mount_erofs(files.meta, target, data=files.data, direct=not files.is_filled_late)
        return files, True


def check_mountable(image: Image) -> None:
    """Raises InvalidSpecError for an image that is a whole disk: it holds no tree of files anybody here can read."""
    if any(layer.role is LayerRole.DISK for layer in image.layers):
        raise InvalidSpecError(
            f"image: {image.name!r} is a whole disk, with no files that can be looked at from outside",
            detail={"field": "image", "image": image.name},
            remedy="start it with the backend fullvm and look inside",
        )


def unmount_layers(mount_root: Path, *, leases: Leases | None = None) -> int:
    """Unmount every layer below a mount root; how many there were. Needs no loader that still runs, and no store
    either, whose lease then ends by itself.
    """
    if not mount_root.is_dir():
        return 0
    with _locked(mount_root, time.monotonic() + WAIT_S, alone=True) as root:
        mounted = _layers_below(root)
        for entry in reversed(mounted):
            umount2(entry.target, MNT_DETACH | UMOUNT_NOFOLLOW)
        for path in root.iterdir():
            if path.is_dir():
                path.rmdir()
            elif path.name != _LOCK:
                path.unlink()  # nobody holds it: who does holds the other one too
        if leases is not None:
            leases.drop_all()
    return len(mounted)


def _layers_below(root: Path) -> list[MountEntry]:
    return [entry for entry in mountinfo() if Path(entry.target).parent == root]


@contextmanager
def _locked(mount_root: Path, end: float, *, alone: bool) -> Iterator[Path]:
    """The mount root without symbolic links, as mountinfo shows it; while inside, nobody unmounts all, or mounts."""
    mount_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = mount_root.resolve(strict=True)
    with _held(root / _LOCK, end, alone=alone):
        yield root


@contextmanager
def _held(path: Path, end: float, *, alone: bool) -> Iterator[None]:
    """Hold the flock(2) of a file. NodeError when that was not to be had before `end` (time.monotonic)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        waited = threading.Event()
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _too_long(path) from None
                waited.wait(_LOCK_POLL_S)
            else:
                break
        yield
    finally:
        os.close(fd)


def _too_long(lock: Path) -> NodeError:
    what = "layers are" if lock.name in (_LOCK, _LEASE_LOCK) else f"layer {lock.name.lstrip('.')} is"
    return NodeError(
        f"{what} still being mounted or unmounted by somebody else",
        detail={"path": str(lock)},
        remedy="its store is slow or does not answer; try again",
        retryable=True,
    )


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


def open_erofs(blob: Path, *, data: Path | None = None, direct: bool = True) -> int:
    """An EROFS file mounted nowhere: a descriptor to read it by; it is gone when that is closed, or its process dies.

    Raises as `LayerMounts.acquire` does.
    """
    try:
        return erofs(blob, devices=() if data is None else (data,), direct=direct)
    except OSError as error:
        raise _mount_failed(error, blob) from error


def mount_erofs(blob: Path, target: Path, *, data: Path | None = None, direct: bool = True) -> None:
    """Mount an EROFS file at a directory, in one step: it is never there without its content."""
    tree = open_erofs(blob, data=data, direct=direct)
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
