"""A microVM that stands still: paused without a VMM, or held for a moment while it is copied.

    <state_dir>/paused/    a paused machine; there while it must be believed, and whole
    <state_dir>/.saving    one that is being saved, or is believed no more

Who asks holds the sandbox's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from opendsec.backends.base import Handle
from opendsec.backends.microvm_files import PAUSED, SAVING, fresh, read_kept, state_of, write_kept
from opendsec.backends.microvm_live import Live
from opendsec.backends.microvm_machines import copy_disks
from opendsec.backends.microvm_templates import MACHINE
from opendsec.errors import OpenDSecError, SandboxLostError
from opendsec.guest.base import Guest, GuestLostError
from opendsec.store.durable import remove_tree
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import Vm

log = logging.getLogger(__name__)

SETTLE_S = 0.02
"""Until the agent has seen the end of its connection; a machine saved before that only wakes more slowly."""


class Parking:
    """Of the machines in `live`; `layers` has the files of images."""

    def __init__(self, live: Live, layers: LayerMounts) -> None:
        self._live = live
        self._layers = layers

    async def park(self, handle: Handle) -> None:
        """Save it and end its VMM; whatever fails, it goes on as it was."""
        state = state_of(handle)
        if self._live.is_parked(handle):
            vm = await self._live.find(handle)
            if vm is not None:
                await self._live.end(handle, vm)
            return
        vm = await self._live.find_running(handle)
        saving = state / SAVING
        if handle.sandbox_id in self._live.guests:
            await self._live.let_go(handle.sandbox_id)
            await asyncio.sleep(SETTLE_S)
        await vm.pause()
        try:
            await asyncio.to_thread(fresh, saving)
            await vm.save(saving)
        except BaseException:
            await asyncio.to_thread(remove_tree, saving)
            with contextlib.suppress(OpenDSecError):
                await vm.resume()
            raise
        saving.rename(state / PAUSED)
        await self._live.end(handle, vm)

    async def unpark(self, handle: Handle) -> None:
        """It runs, and is itself. Raises as `Live.wake`, SandboxLostError, SnapshotInvalidError."""
        paused = state_of(handle) / PAUSED
        if not self._live.is_parked(handle):
            await self._live.wake(handle, await self._live.find_running(handle))
            return
        vm = await self._live.find(handle)
        if vm is not None:
            await self._live.end(handle, vm)
        vm = await self._restore(handle)
        # From here on its disk may differ from what was saved.
        gone = paused.with_name(SAVING)
        await asyncio.to_thread(remove_tree, gone)
        paused.rename(gone)
        await self._live.wake(handle, vm)
        await asyncio.to_thread(remove_tree, gone)

    async def awake(self, handle: Handle) -> Guest:
        """A connection to its running agent, whatever it takes."""
        guest = self._live.guest(handle.sandbox_id)
        if guest is None:
            await self.unpark(handle)
            guest = self._live.guests[handle.sandbox_id]
        return guest

    async def park_again(self, handle: Handle, *, needed: bool) -> None:
        """After a pack; one that was lost meanwhile is no fault of a pack that is whole."""
        try:
            await self.park(handle)
        except SandboxLostError as error:
            if needed:
                raise
            await self.lost(handle, str(error))

    async def lost(self, handle: Handle, why: str) -> None:
        """After a pack that is whole: whoever connects next renews it, or sees that it is gone."""
        log.warning("guest_lost_after_a_pack", extra={"fields": {"sandbox_id": handle.sandbox_id, "reason": why}})
        await self._live.let_go(handle.sandbox_id)

    async def copy(self, handle: Handle, target: Path) -> None:
        """Memory, devices and disks of one moment, whole, into an empty directory. Raises DiskFullError and others."""
        async with self._still(handle) as vm:
            kept = await asyncio.to_thread(read_kept, state_of(handle))
            machine = target / MACHINE
            machine.mkdir(mode=0o700)
            await vm.save(machine, whole=True)
            if not self._live.is_parked(handle):  # a parked one builds on what it was parked with
                await asyncio.to_thread(vm.keep_base, state_of(handle))
            await asyncio.to_thread(copy_disks, state_of(handle), target, kept.shape.disks)
            await asyncio.to_thread(write_kept, target, kept)

    @contextlib.asynccontextmanager
    async def _still(self, handle: Handle) -> AsyncIterator[Vm]:
        """The machine, standing still for the block; afterwards running, or parked, as it was."""
        if self._live.is_parked(handle):
            vm = await self._restore(handle)
            try:
                yield vm
            finally:
                await self._live.end(handle, vm)
            return
        found = await self._live.find_running(handle)
        await found.pause()
        try:
            yield found
        finally:
            await found.resume()
            try:
                await self._live.renew(handle)
            except GuestLostError:  # a VMM may cut connections when it saves; whoever connects next renews it
                if self._live.guest(handle.sandbox_id) is not None:
                    raise

    async def _restore(self, handle: Handle) -> Vm:
        kept = await asyncio.to_thread(read_kept, state_of(handle))
        layers = await self._layers.files_soon(kept.image)
        return await self._live.restore_paused(handle, kept, state_of(handle) / PAUSED, layers)
