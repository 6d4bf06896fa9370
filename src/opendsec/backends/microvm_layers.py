"""Images of any number of layers on machines that take only a few drives.

Firecracker takes 14 drives and has no driver that makes a disk of many files, as QEMU has. So where an image has
more files than a machine has room for, the smallest of them are copied into one disk of partitions, once for all
sandboxes of the image on this node; the guest finds each by the name of its partition. The largest stay drives of their
own, and nothing changes for them: their bytes are read as they are touched, and their page cache is shared between
images. Layers are not merged, so what the guest puts together is the same as everywhere.

    <root>/<key>           such a disk; the key is made of what lies on it, so it is never wrong
    <root>/.<key>.<hex>    one that is being made; removed by the next `open`

Who runs from one holds a link to it in a directory of its own. What nobody holds goes, the least recently used first,
when there is too much; it can be made again at any time. It refuses more than 128 files in one disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opendsec.errors import StartError
from opendsec.linux.boot import boot_id
from opendsec.model.image import Layer
from opendsec.store.durable import appearing, disk_full_named
from opendsec.store.loading.base import LayerFiles
from opendsec.vm.base import Drive
from opendsec.vm.qemu_drives import MAX_PARTITIONS, Ends, Part, ends_of

PACKED = "layers"
"""Name of the drive."""
PACKED_FILE = "layers.img"
"""The link to it, beside a sandbox's own disk."""
MOST_BYTES = 8 * 1024**3
"""Of disks that nobody holds."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrives:
    """How the files of an image reach its guest."""

    own: tuple[Drive, ...]
    packed: tuple[Part, ...] = ()
    """Partitions of one disk, which is one more drive; none: there is no such disk."""
    key: str = ""
    """Of that disk."""

    def given(self, disks: Path) -> tuple[Drive, ...]:
        """All read-only drives of a machine whose disks lie in that directory."""
        if not self.packed:
            return self.own
        return (*self.own, Drive(name=PACKED, path=disks / PACKED_FILE, parted=True))


def layer_drives(layers: Sequence[Layer], files: Sequence[LayerFiles], *, room: int | None) -> LayerDrives:
    """Of the layers, lowest first, with `room` for that many read-only drives (None: any number).

    Asks for sizes where there are too many. Raises OSError, StartError.
    """
    drives: list[Drive] = []
    digests: dict[str, str] = {}
    for number, (layer, one) in enumerate(zip(layers, files, strict=True)):
        for name, path in ((f"l{number}-meta", one.meta), (f"l{number}-data", one.data)):
            if path is not None:
                drives.append(Drive(name=name, path=path))
                digests[name] = layer.digest
    if room is None or len(drives) <= room:
        return LayerDrives(own=tuple(drives))
    sizes = {drive.name: drive.path.stat().st_size for drive in drives}
    small = smallest(sizes, len(drives) - (room - 1))
    parts = tuple(Part(name=one.name, path=str(one.path), size=sizes[one.name]) for one in drives if one.name in small)
    if len(parts) > MAX_PARTITIONS:
        raise StartError(
            f"the image has {len(drives)} files, and a machine has room for {room - 1 + MAX_PARTITIONS}",
            retryable=False,
            remedy="opendsec image merge makes one layer of several",
        )
    named = [(part.name, digests[part.name], part.size) for part in parts]
    key = hashlib.sha256(msgspec.json.encode(named)).hexdigest()[:32]
    return LayerDrives(own=tuple(one for one in drives if one.name not in small), packed=parts, key=key)


def smallest(sizes: dict[str, int], count: int) -> frozenset[str]:
    """The names of that many; of equal ones, those that come first. Pure."""
    return frozenset(sorted(sizes, key=lambda name: sizes[name])[:count])


class LayerDisks:
    """Those of one backend."""

    def __init__(self, root: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._making = asyncio.Lock()

    def open(self) -> None:
        """Remove what an earlier process left half-made, and all after a reboot: it was not synced. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark = self._root / f".boot-{boot_id()}"
        this_boot = mark.exists()
        for path in self._root.iterdir():
            if path != mark and (path.name.startswith(".") or not this_boot):
                path.unlink()
        mark.touch()

    async def hold(self, drives: LayerDrives, directory: Path) -> None:
        """Link the disk into `directory`, made first where there is none; nothing when it is there, or none is needed.

        Raises DiskFullError, OSError.
        """
        target = directory / PACKED_FILE
        if not drives.packed or target.exists():
            return
        path = self._root / drives.key
        while not _linked(path, target):
            async with self._making:
                if not path.exists():
                    await asyncio.to_thread(self._make, path, drives.packed)

    def _make(self, path: Path, parts: Sequence[Part]) -> None:
        with disk_full_named(self._root), appearing(path) as partial:
            write_disk(partial, parts)
        self._evict(path)

    def _evict(self, newest: Path) -> None:
        free = []
        for path in self._root.iterdir():
            status = path.stat()
            if status.st_nlink == 1 and path != newest and not path.name.startswith("."):
                free.append((status.st_mtime, status.st_blocks * 512, path))
        total = sum(size for _, size, _ in free)
        for _, size, path in sorted(free):
            if total <= self._most_bytes:
                break
            path.unlink()
            total -= size


def _linked(path: Path, target: Path) -> bool:
    """False: it is not there, or no more."""
    try:
        os.utime(path)
        os.link(path, target)
    except FileNotFoundError:
        return False
    return True


def write_disk(target: Path, parts: Sequence[Part]) -> None:
    """A disk whose partitions hold these files. Blocking; reads all of them. Raises OSError, ValueError."""
    ends: Ends = ends_of(parts)
    with target.open("xb") as disk:
        disk.write(ends.head)
        for part in parts:
            with Path(part.path).open("rb") as file:
                shutil.copyfileobj(file, disk, _PIECE_BYTES)
                if file.tell() != part.size:
                    raise OSError(f"{part.path} has {file.tell()} bytes and was said to have {part.size}")
            disk.write(bytes(-part.size % 512))
        disk.write(ends.tail)
        disk.flush()
        os.fchmod(disk.fileno(), 0o444)
