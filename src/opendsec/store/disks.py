"""Images that are whole disks: taken in as they are, after a look that does not trust them.

A qcow2 file can name other files to read from (a backing file, external data): such a one would show a guest files of
the host, so it is refused, as is one that is encrypted, damaged or was not closed. What its header says is read here,
byte by byte; what lies behind is checked by `qemu-img`, which runs as nobody, without a network, with bounds on time
and memory, on a descriptor of the copy in the staging area: it never opens a path. Raw files are taken whatever they
hold; their format is written down, and nobody guesses it later.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import DiskFormat, Image, ImageConfig, LayerRole, Machine
from opendsec.model.spec import check_memory_mb
from opendsec.store.images import ImageStore
from opendsec.store.manifest import MAX_CPUS
from opendsec.store.programs import find_program, run_program
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.sparse import CutShortError, copy_sparse, data_extents

SECTOR = 512
MAX_VIRTUAL_BYTES = 16 << 40
"""16 TiB."""
MAX_HOLE_BYTES = 256 << 30
"""A raw file is hashed, sent and checked as long as it is, holes and all: 256 GiB are 3 to 9 minutes each time."""
QCOW2_MAGIC = b"QFI\xfb"
_OTHER_FORMATS = (
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0x40, b"\x7f\x10\xda\xbe", "VDI"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0, b"QED\0", "QED"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    (0, b"OOOM", "COW"),
)
"""(offset, bytes, name) of what other programs' formats begin with. A VHD of fixed size begins as a raw disk."""
CHECK_TIMEOUT_S = 600.0
CHECK_CPU_S = 300
CHECK_MEMORY_BYTES = 2 << 30
NOBODY = 65534
FIRST_FD = 200
"""Number of the first descriptor a program here is given."""
_HEADER = struct.Struct(">4sIQIIQIIQQIIQ")
"""Through `snapshots_offset`, QEMU docs/interop/qcow2.txt."""
_EXTENSION = struct.Struct(">QQQII")
"""Of version 3: features, refcount order, header length."""
_DIRTY, _CORRUPT, _EXTERNAL, _COMPRESSION, _EXTENDED_L2 = 1, 2, 4, 8, 16
_CORRUPTIONS_FOUND = 2
"""Status of `qemu-img check`; 3 is space that is lost, which hurts nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRequest:
    """One import. `machine.format` None: qcow2 when the file begins as one, else raw."""

    name: str
    path: Path
    machine: Machine
    format: DiskFormat | None = None
    replace: bool = False
    source: str = ""
    config: ImageConfig = field(default_factory=ImageConfig)
    """Defaults of commands, where an agent is inside; its machine is `machine`."""


def import_disk(store: ImageStore, request: DiskRequest, *, on_progress: OnProgress = quietly) -> Image:
    """Copy, check, publish. `machine.format` and `machine.virtual_bytes` are found out.

    Raises InvalidSpecError (no such file, a bad field), ImageInvalidError (refused, with the reason), ConflictError,
    DiskFullError, HostCapabilityError (no qemu-img).
    """
    _check_machine(request.machine)
    if not request.path.is_file():
        raise InvalidSpecError(f"source: {str(request.path)!r} is not a file", detail={"field": "source"})
    given = request.path.resolve()
    if (request.format or _format_of(given)) is DiskFormat.RAW:
        _check_holes(given, given.stat().st_size)  # a shared file system may tell of none in the copy
    with store.staging() as work:
        copy = work / "disk"
        on_progress(Progress(phase="copying"))
        try:
            copy_sparse(given, copy)
        except CutShortError as error:
            raise InvalidSpecError("source: it became shorter while it was read", detail={"field": "source"}) from error
        copy.chmod(0o444)
        on_progress(Progress(phase="checking"))
        found = request.format or _format_of(copy)
        size = check_qcow2(copy) if found is DiskFormat.QCOW2 else check_raw(copy)
        on_progress(Progress(phase="hashing"))
        layer = store.stage_layer(copy, role=LayerRole.DISK)
        on_progress(Progress(phase="publishing"))
        config = replace(request.config, machine=replace(request.machine, format=found, virtual_bytes=size))
        source = request.source or f"{found.value}:{request.path}"
        return store.publish(request.name, layers=[layer], config=config, source=source, replace=request.replace)


def _check_machine(machine: Machine) -> None:
    check_memory_mb(machine.memory_mb, "memory-mb")
    if not 1 <= machine.cpus <= MAX_CPUS:
        raise InvalidSpecError(f"cpus: {machine.cpus} is not between 1 and {MAX_CPUS}", detail={"field": "cpus"})


def _format_of(path: Path) -> DiskFormat:
    """Raises ImageInvalidError for a file of a format that is neither: as a raw disk it would start nothing."""
    with path.open("rb") as file:
        head = file.read(0x44)
    if head.startswith(QCOW2_MAGIC):
        return DiskFormat.QCOW2
    for at, magic, name in _OTHER_FORMATS:
        if head[at : at + len(magic)] == magic:
            raise ImageInvalidError(
                f"the file is a disk in the format {name}, which is not taken",
                remedy="`qemu-img convert -O qcow2 FILE NEW`; say --format raw if a guest is to see these very bytes",
            )
    return DiskFormat.RAW


def check_raw(path: Path) -> int:
    """Size of the disk. ImageInvalidError unless it is whole sectors, and not mostly holes without end."""
    size = path.stat().st_size
    if size == 0 or size % SECTOR or size > MAX_VIRTUAL_BYTES:
        raise ImageInvalidError(
            f"a raw disk is whole sectors of {SECTOR} bytes, up to 16 TiB; this file has {size} bytes",
            remedy=f"truncate -s %{SECTOR} FILE makes it so",
        )
    if size > MAX_HOLE_BYTES:
        _check_holes(path, size)
    return size


def _check_holes(path: Path, size: int) -> None:
    with path.open("rb") as file:
        holes = size - sum(length for _, length in data_extents(file.fileno()))
    if holes > MAX_HOLE_BYTES:
        raise ImageInvalidError(
            f"the raw disk has {holes >> 30} GiB of holes, and every byte of a raw disk is hashed, which takes hours"
            f" for holes without end: at most {MAX_HOLE_BYTES >> 30} GiB are taken",
            remedy="`qemu-img convert -f raw -O qcow2 FILE NEW`: a qcow2 disk is as long as its data",
        )


def check_qcow2(path: Path) -> int:
    """Size of the disk as a guest sees it. ImageInvalidError for whatever is refused."""
    size = qcow2_size(path)
    _check_tables(path)
    return size


def qcow2_size(path: Path) -> int:
    """The same by its header alone: that it names no other file, and may be used. ImageInvalidError."""
    with path.open("rb") as file:
        return parse_qcow2(file.read(_HEADER.size + _EXTENSION.size), file_bytes=path.stat().st_size)


def parse_qcow2(head: bytes, *, file_bytes: int) -> int:
    """The size a header names, if the file may be used. Pure. ImageInvalidError."""
    if len(head) < _HEADER.size or head[:4] != QCOW2_MAGIC:
        raise ImageInvalidError("the file is no qcow2 disk", remedy="say --format raw if it is a raw one")
    fields: tuple[int, ...] = _HEADER.unpack_from(head)
    _, version, backing, _, cluster_bits, size, crypt, l1_entries, l1_at, refcounts_at, *_ = fields
    if version not in (2, 3) or (version == 3 and len(head) < _HEADER.size + _EXTENSION.size):
        raise _refused(f"version {version} is not known", "`qemu-img convert -O qcow2 FILE NEW` makes one of version 3")
    features = _EXTENSION.unpack_from(head, _HEADER.size)[0] if version == 3 else 0
    if backing:
        raise _refused("it lies on a backing file", "`qemu-img convert -O qcow2 FILE NEW` makes one of both")
    if features & _EXTERNAL:
        raise _refused("its data lies in another file", "`qemu-img convert -O qcow2 FILE NEW` makes one of both")
    if crypt:
        raise _refused("it is encrypted", "decrypt it with `qemu-img convert`")
    if features & (_DIRTY | _CORRUPT):
        raise _refused("it was not closed, or is damaged", "`qemu-img check -r all FILE` may repair it")
    if features & ~(_COMPRESSION | _EXTENDED_L2):
        raise _refused(f"it has features that are not known ({features:#x})", "`qemu-img convert -O qcow2 FILE NEW`")
    if not 9 <= cluster_bits <= 21 or l1_at >= file_bytes or refcounts_at >= file_bytes or l1_entries > (32 << 20) // 8:
        raise _refused("its header is damaged", "make it anew from its source")
    if not 0 < size <= MAX_VIRTUAL_BYTES or size % SECTOR:
        raise _refused(f"its size of {size} bytes is not whole sectors up to 16 TiB", "`qemu-img resize`")
    return size


def _refused(why: str, remedy: str) -> ImageInvalidError:
    return ImageInvalidError(f"the qcow2 disk is refused: {why}", remedy=remedy)


def _check_tables(path: Path) -> None:
    """Whether the tables behind the header hold together, by QEMU's own program, which may come to harm by it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ended = run_program(
            [*confined(), find_program("qemu-img"), "check", "-U", "-f", "qcow2", f"/dev/fd/{FIRST_FD}"],
            timeout_s=CHECK_TIMEOUT_S,
            fds={FIRST_FD: fd},
        )
    finally:
        os.close(fd)
    if ended.status not in (0, 3):
        words = "; ".join(ended.tail[-3:]) or f"status {ended.status}"
        if ended.status == _CORRUPTIONS_FOUND:
            raise _refused(f"its tables are damaged: {words}", "`qemu-img check -r all FILE` may repair it")
        raise _refused(f"it cannot be checked: {words}", "see what `qemu-img check FILE` says")


def confined(*, fsize: int = 0, cpu_s: int = CHECK_CPU_S) -> list[str]:
    """The beginning of a command line: nobody, no network, no new rights, bounded. `fsize`: bytes of a file it may
    write; `cpu_s`: seconds."""
    return [
        find_program("prlimit"),
        f"--as={CHECK_MEMORY_BYTES}",
        f"--cpu={cpu_s}",
        f"--fsize={fsize}",
        "--core=0",
        find_program("unshare"),
        "--net",
        "--ipc",
        find_program("setpriv"),
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
        "--inh-caps=-all",
    ]
