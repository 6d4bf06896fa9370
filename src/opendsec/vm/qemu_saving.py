"""What is written of a QEMU microvm machine, and read back: devices, memory, and what both are of.

Saved are the devices alone (QEMU's `xen-save-devices-state`, which is about no hypervisor in particular) and memory by
`guest_memory`: QEMU's own migration would write all of a private mapping each time. QEMU is paused by who calls.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from opendsec.errors import DiskFullError, NodeError, SnapshotInvalidError
from opendsec.store.durable import FULL, disk_full, disk_full_named
from opendsec.store.sparse import copy_sparse
from opendsec.vm import guest_memory as memory_files
from opendsec.vm.base import Binding, Drive, MachineSpec
from opendsec.vm.qmp import Monitor, MonitorError
from opendsec.vm.saved import SavedMachine, describe, write_manifest

DEVICES = "devices"
MIB = 1024 * 1024
LOAD_TIMEOUT_S = 60.0
_POLL_S = 0.001


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """vmm.json."""

    pid: int
    start_ticks: int
    boot_id: str
    memory: str
    """The file its memory is mapped from."""
    restored: bool
    memory_mib: int
    cpus: int
    drives: tuple[tuple[str, str, bool], ...]
    card: bool
    balloon: bool
    acpi: bool = False


async def save_devices(qmp: Monitor, target: Path) -> None:
    """QEMU writes to a file of its own, for it may keep it open: others start from a copy, which it never had.

    Raises MonitorError, MonitorLostError, OSError, DiskFullError.
    """
    written = target.with_name(f".{target.name}")
    fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        number = await qmp.add_fd(fd)
        try:
            await qmp.execute("xen-save-devices-state", {"filename": f"/dev/fdset/{number}", "live": False})
        finally:
            await qmp.execute("remove-fd", {"fdset-id": number})
        await asyncio.to_thread(copy_sparse, written, target)
    finally:
        os.close(fd)
        written.unlink(missing_ok=True)


async def save_memory(record: Record, target: Path, *, whole: bool, must_live: Callable[[], None]) -> None:
    """All of a booted machine's; of a restored one what it has changed, or, `whole`, that laid over what it came from.

    `must_live` raises when the process is gone: what was read by its pid may be somebody else's. Raises OSError,
    ProcessLookupError, DiskFullError.
    """
    base, size = Path(record.memory), record.memory_mib * MIB
    if not record.restored:
        await asyncio.to_thread(memory_files.copy_memory, base, target / memory_files.MEMORY)
        return
    await asyncio.to_thread(memory_files.save_pages, record.pid, base, target, size=size)
    must_live()
    if whole:
        await asyncio.to_thread(_make_whole, base, target)


def describe_saved(binding: Binding, record: Record, target: Path, *, base: str) -> None:
    """Write the manifest, which comes last. `base`: what memory is a difference to, or "". Raises as `save_memory`."""
    spec = MachineSpec(
        kernel=Path(),
        initrd=Path(),
        command_line="",
        memory_mib=record.memory_mib,
        cpus=record.cpus,
        drives=tuple(Drive(name=name, path=Path(path), read_only=only) for name, path, only in record.drives),
        card=None,
        balloon=record.balloon,
        acpi=record.acpi,
    )
    checked = (DEVICES, memory_files.PAGES, memory_files.INDEX)
    found = describe(binding, spec, target, checked, base=base)
    with disk_full_named(target):
        write_manifest(target, msgspec.structs.replace(found, card=record.card))


async def load(qmp: Monitor, pid: int, saved: Path, found: SavedMachine) -> None:
    """Memory that differs from the file, then devices; it stands still afterwards.

    Raises OSError, ValueError, MonitorError, MonitorLostError, NodeError.
    """
    if found.base:  # QEMU has answered: its memory is mapped
        memory, size = Path(found.base), found.memory_mib * MIB
        await asyncio.to_thread(memory_files.load_pages, pid, memory, saved, size=size)
    with (saved / DEVICES).open("rb") as file:
        await qmp.give("devices", file.fileno())
    await qmp.execute("migrate-incoming", {"uri": "fd:devices"})
    await loaded(qmp)


async def loaded(qmp: Monitor) -> None:
    """Wait until the state is in, or QEMU has given up (it exits then). Raises NodeError, MonitorLostError."""
    end = time.monotonic() + LOAD_TIMEOUT_S
    while True:
        if (await qmp.execute("query-status"))["status"] != "inmigrate":
            return
        if time.monotonic() > end:
            raise NodeError(f"QEMU has not read the saved devices within {LOAD_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)


async def why_not_saved(error: OSError | MonitorError, target: Path) -> DiskFullError | NodeError:
    """The error of a save that ended so, while the machine lives. QEMU does not say why it could not write."""
    if isinstance(error, MonitorError):
        if await asyncio.to_thread(_is_full, target):
            return disk_full(target)
        return NodeError(f"QEMU does not save the machine: {error}")
    if error.errno in FULL:
        return disk_full(target)
    return NodeError(f"the machine cannot be saved: {error}")


def base_gone(base: Path) -> SnapshotInvalidError:
    """Nothing brings the file back, so nobody is told to try again."""
    return SnapshotInvalidError(
        "the machine runs on, and can neither be saved nor paused: the memory it was started from was removed",
        detail={"path": str(base)},
        remedy="its snapshot was removed by force: take what you need out of the sandbox, and stop it",
    )


def _make_whole(base: Path, target: Path) -> None:
    memory = target / memory_files.MEMORY
    memory_files.copy_memory(base, memory)
    memory_files.apply_pages(target, memory)
    for name in (memory_files.PAGES, memory_files.INDEX):
        (target / name).unlink()


def _is_full(directory: Path) -> bool:
    return shutil.disk_usage(directory).free < MIB
