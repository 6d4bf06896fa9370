"""What a machine has written to its disk, as a layer: an image of a disk is then a chain, each file a difference to the
one below.

    lowest    the disk that was imported, qcow2 or raw
    above     qcow2 files of ours: clusters that differ, and nothing that names another file

A machine writes into an overlay of QEMU's, which a hostile guest may have got hold of. So its copy is looked at as any
disk is (`check_qcow2`), and what becomes a layer is not that file but what `qemu-img` has read out of it, as nobody and
with bounds: no byte of its tables is taken over, and the header `qemu-img` has written is looked at once more. The
order of a chain is the manifest's; who starts from it says so explicitly, and never asks a header. A cluster is written
whole, so nothing below a difference is read to make it.

Chains of more than `MOST` files are merged: all differences become one, on the same lowest disk. It refuses overlays of
another size or with other clusters than ours.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import ConflictError, ImageInvalidError
from opendsec.model.image import Layer, LayerRole
from opendsec.store.disks import FIRST_FD, NOBODY, check_qcow2, confined, qcow2_size
from opendsec.store.durable import disk_full_named
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.packing import brought
from opendsec.store.programs import find_program, run_program
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.sparse import copy_sparse

MOST = 9
"""Files of one chain, the lowest disk among them: a read that finds nothing above looks into each."""
CONVERT_TIMEOUT_S = 3600.0
CONVERT_CPU_S = 1800
CLUSTER_BITS = 16
"""Of overlays QEMU makes when it is not asked for others. A difference made of other clusters would tear them."""
_ROOM_BYTES = 64 << 20
"""Tables of a new file may lie in more room than those of the file it is made of."""
_TABLE = struct.Struct(">II")
_L1 = struct.Struct(">IQ")
_OFFSET = (1 << 56) - 512
"""Bits 9 to 55 of an entry."""


def make_overlay(path: Path, size_bytes: int) -> None:
    """A new empty overlay of that size, which names nothing below it. Raises OSError, DiskFullError."""
    with disk_full_named(path.parent):
        argv = [find_program("qemu-img"), "create", "-q", "-f", "qcow2", str(path), str(size_bytes)]
        ended = run_program(argv, timeout_s=60)
        if ended.status != 0:
            words = "; ".join(ended.tail[-3:]) or f"status {ended.status}"
            number = errno.ENOSPC if os.strerror(errno.ENOSPC) in words else errno.EIO
            raise OSError(number, f"qemu-img create: {words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A machine's disk: what it was made of, and what it has written since."""

    overlay: Path
    """Of QEMU's; stands still."""
    size_bytes: int
    """As the guest sees it."""
    layers: tuple[Layer, ...]
    """Those of its image, lowest first."""
    files: tuple[Path, ...]
    """And their files on this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What has become of it."""

    layer: Layer
    """What it has written, alone."""
    chain: tuple[Layer | StagedLayer, ...]
    """Of the new image, lowest first."""


def pack_change(
    store: ImageStore,
    work: Path,
    written: Written,
    *,
    on_progress: OnProgress = quietly,
    on_read: Callable[[], None],
) -> Packed | None:
    """The chain of a new image, made in `work`, a staging directory of the store; None when nothing was ever written.

    The disk stands still until `on_read` is called: it is copied on this node first. Raises ImageInvalidError,
    ConflictError, DiskFullError, HostCapabilityError, OSError.
    """
    with store.scratch() as place:
        copy = place / "written"
        on_progress(Progress(phase="copying"))
        copy_sparse(written.overlay, copy)
        on_read()
        change = stage_change(store, place, copy, size_bytes=written.size_bytes, on_progress=on_progress)
        copy.unlink()
        if change is None:
            return None
        chain = on_top_of(
            store,
            place,
            written.layers,
            change,
            files=written.files,
            size_bytes=written.size_bytes,
            on_progress=on_progress,
        )
        there = tuple(brought(store, work, one) if isinstance(one, StagedLayer) else one for one in chain)
        return Packed(layer=change.layer, chain=there)


def stage_change(
    store: ImageStore, work: Path, overlay: Path, *, size_bytes: int, on_progress: OnProgress = quietly
) -> StagedLayer | None:
    """The layer of what an overlay holds, made in `work`, a staging directory; None when nothing was ever written.

    `overlay`: a copy nobody writes to, of the size its machine has. Raises ImageInvalidError, DiskFullError.
    """
    on_progress(Progress(phase="checking"))
    overlay.chmod(0o444)
    check_overlay(overlay, size_bytes=size_bytes)
    if not holds_anything(overlay):
        return None
    writing = Progress(phase="writing the layer")
    on_progress(writing)
    target = work / "change"
    _fold(target, [overlay], size_bytes=size_bytes, on_tick=lambda: on_progress(writing))
    on_progress(Progress(phase="hashing"))
    return store.stage_layer(target, role=LayerRole.DISK)


def on_top_of(
    store: ImageStore,
    work: Path,
    layers: Sequence[Layer],
    layer: StagedLayer,
    *,
    files: Sequence[Path],
    size_bytes: int,
    on_progress: OnProgress = quietly,
    most: int = MOST,
) -> list[Layer | StagedLayer]:
    """The chain with a new difference on it, merged when it has become long. `files`: of `layers`, lowest first."""
    if layer.layer.digest == layers[0].digest:  # a layer that comes twice counts where it is highest
        raise ConflictError("the change is, byte for byte, the disk it lies on", retryable=False)
    if len(layers) < most:
        return [*layers, layer]
    merging = Progress(phase="merging layers")
    on_progress(merging)
    target = work / "merged"
    _fold(target, [*files[1:], layer.meta], size_bytes=size_bytes, on_tick=lambda: on_progress(merging))
    return [layers[0], store.stage_layer(target, role=LayerRole.DISK)]


def check_overlay(path: Path, *, size_bytes: int) -> None:
    """Whether it can be read as a difference made here. Raises ImageInvalidError."""
    _check_shape(path, check_qcow2(path), size_bytes=size_bytes)


def _check_shape(path: Path, found: int, *, size_bytes: int) -> None:
    with path.open("rb") as file:
        cluster_bits, _ = _TABLE.unpack(_read_at(file.fileno(), 20, _TABLE.size))
    if found != size_bytes or cluster_bits != CLUSTER_BITS:
        raise ImageInvalidError(
            f"the machine's disk is another than it was started with: {found} bytes in clusters of {1 << cluster_bits}",
            remedy="start another machine: this one's disk was tampered with",
        )


def holds_anything(path: Path) -> bool:
    """Whether any cluster of a qcow2 file that was checked is its own."""
    with path.open("rb") as file:
        fd = file.fileno()
        entries, at = _L1.unpack(_read_at(fd, 36, _L1.size))
        for (entry,) in struct.iter_unpack(">Q", _read_at(fd, at, entries * 8)):
            table = entry & _OFFSET
            if table and any(_read_at(fd, table, 1 << CLUSTER_BITS)):
                return True
    return False


def _read_at(fd: int, at: int, length: int) -> bytes:
    found = os.pread(fd, length, at)
    if len(found) != length:
        raise ImageInvalidError("the machine's disk is shorter than its tables say")
    return found


def _fold(target: Path, differences: Sequence[Path], *, size_bytes: int, on_tick: Callable[[], None]) -> None:
    """A new file that shows what these show, lowest first, on whatever is below them.

    Each is laid over those before it: of each the clusters that are its own, whole. The program that does it reads what
    a guest may have made, so its own file is not believed either: it must name no other.
    """
    make_overlay(target, size_bytes)
    with disk_full_named(target.parent), _of_nobody(target) as writer, ExitStack() as stack:
        for one in differences:
            source = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, source)
            _lay_over(writer, source, size_bytes=size_bytes, on_tick=on_tick)
            os.fsync(writer)
    _check_shape(target, qcow2_size(target), size_bytes=size_bytes)


@contextmanager
def _of_nobody(path: Path) -> Iterator[int]:
    """A descriptor that a program without rights may open anew, to read and write, while the block lasts."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fchown(fd, NOBODY, NOBODY)
        yield fd
        os.fchown(fd, 0, 0)
    finally:
        os.close(fd)


def _lay_over(target: int, source: int, *, size_bytes: int, on_tick: Callable[[], None]) -> None:
    """Below both lies something that is never read: with nothing there, what a difference does not hold would count as
    zeros."""
    limit = os.fstat(target).st_size + os.fstat(source).st_size + _ROOM_BYTES
    below = f"backing.driver=null-co,backing.size={size_bytes},backing.read-zeroes=on"
    numbers = (FIRST_FD, FIRST_FD + 1)
    given = [f"driver=qcow2,file.driver=file,file.filename=/dev/fd/{one},file.locking=off,{below}" for one in numbers]
    argv = [*confined(fsize=limit, cpu_s=CONVERT_CPU_S), find_program("qemu-img"), "convert"]
    argv += ["-n", "-B", "below", "-F", "raw", "--image-opts", "--target-image-opts", *given]
    fds = dict(zip(numbers, (source, target), strict=True))
    ended = run_program(argv, timeout_s=CONVERT_TIMEOUT_S, fds=fds, on_tick=on_tick)
    if ended.status != 0:
        words = "; ".join(ended.tail[-3:]) or f"status {ended.status}"
        if os.strerror(errno.ENOSPC) in words:
            raise OSError(errno.ENOSPC, words)
        raise ImageInvalidError(f"the change of the disk cannot be read: {words}")
