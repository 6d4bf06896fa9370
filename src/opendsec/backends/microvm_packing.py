"""What a microVM has written, as a tree on the host: the guest freezes its disk and sends it, and the tree is put
together here, of its bytes. A guest's file system is never mounted.

    <state_dir>/packed/    the tree, while it is used
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from opendsec.backends.base import Changes, Handle
from opendsec.backends.microvm_disk import most_inodes
from opendsec.backends.microvm_files import PACKED, read_kept, state_of
from opendsec.backends.microvm_live import Live
from opendsec.backends.microvm_parking import Parking
from opendsec.backends.microvm_shape import MIB
from opendsec.errors import NodeError, SandboxLostError
from opendsec.guest.base import Guest, GuestError, GuestLostError
from opendsec.model.ids import SandboxId
from opendsec.store.durable import remove_tree
from opendsec.vm.upper import UpperLimits, receive_upper

FREEZE_TIMEOUT_MS = 600_000
"""The guest's disk stands still no longer, and what it has not sent by then is not of one moment."""


@contextlib.asynccontextmanager
async def changes(live: Live, parking: Parking, handle: Handle, *, lower: tuple[int, ...]) -> AsyncIterator[Changes]:
    """The sandbox's changes for the block, during which it stands still; parked before, it is parked again.

    Raises SandboxLostError, NodeError, DiskFullError.
    """
    tree = state_of(handle) / PACKED
    was_parked, finished = live.is_parked(handle), False
    await asyncio.to_thread(remove_tree, tree)
    try:
        guest = await parking.awake(handle)
        async with written(live, handle, guest, tree):
            yield Changes(tree=tree, lower=lower)
            finished = True
    except (GuestError, GuestLostError, SandboxLostError) as error:
        if finished:  # what was read is whole; the end of the sandbox is seen by itself
            await parking.lost(handle, str(error))
        elif isinstance(error, SandboxLostError):
            raise
        else:
            raise SandboxLostError(f"the guest did not hold still: {error}", sandbox_id=handle.sandbox_id) from error
    finally:
        await asyncio.to_thread(remove_tree, tree)
        if was_parked:
            await parking.park_again(handle, needed=not finished)


@contextlib.asynccontextmanager
async def written(live: Live, handle: Handle, guest: Guest, tree: Path) -> AsyncIterator[None]:
    """The upper directory at `tree`; once it is here, the whole machine stands still for the block."""
    kept = await asyncio.to_thread(read_kept, state_of(handle))
    try:
        async with guest.frozen(timeout_ms=FREEZE_TIMEOUT_MS):
            await receive(guest, tree, disk_bytes=kept.shape.disk_mib * MIB, sandbox_id=handle.sandbox_id)
            vm = live.vms[handle.sandbox_id]
            await vm.pause()
            try:
                yield
            finally:
                await vm.resume()
    except BaseException:
        with contextlib.suppress(GuestLostError):  # its clock stood still; whoever connects next renews it
            await live.renew(handle)
        raise
    await live.renew(handle)


async def receive(guest: Guest, tree: Path, *, disk_bytes: int, sandbox_id: SandboxId) -> None:
    """What the guest has written, within its disk's size, and within the time the disk stands still: one that sends a
    little now and then holds nobody up for ever. Raises NodeError, and as `receive_upper`.
    """
    limits = UpperLimits(max_bytes=disk_bytes, max_inodes=most_inodes(disk_bytes))
    try:
        async with asyncio.timeout(FREEZE_TIMEOUT_MS / 1000):
            await receive_upper(guest.pack_upper(), tree, limits=limits)
    except TimeoutError as error:
        raise NodeError(
            f"the guest did not send what it has written within {FREEZE_TIMEOUT_MS / 1000:g} s",
            sandbox_id=sandbox_id,
            remedy="write less, or pack when the node is less busy",
        ) from error
