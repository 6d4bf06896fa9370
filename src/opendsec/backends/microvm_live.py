"""The machines of sandboxes that run now: found, restored, woken, renewed, ended.

Who asks holds the sandbox's turn (`turns`). A machine is woken when its agent answers and has made it itself:
clock, randomness, names and addresses, before anybody else gets at it. All of it is the same whether the machine was
started a moment ago, comes back from a pause, or is found again by a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from opendsec.backends.base import Handle
from opendsec.backends.container_policy import host_root
from opendsec.backends.microvm_files import PAUSED, place_of, state_of
from opendsec.backends.microvm_machines import Machines, addresses
from opendsec.backends.microvm_shape import Kept, identity, mac_of, machine
from opendsec.errors import SandboxLostError
from opendsec.guest.base import Guest, GuestError, GuestLostError
from opendsec.linux.cgroup import CgroupDriver
from opendsec.linux.network import SandboxNetwork
from opendsec.model.ids import SandboxId
from opendsec.store.loading.base import LayerFiles
from opendsec.vm.base import Place, Vm, Vmm

CONNECT_TIMEOUT_S = 30.0
RENEW_TRIES_S = (5.0, CONNECT_TIMEOUT_S)


class Live:
    """Those of one backend that is open. `boot_id` is this boot's: what another one started is gone."""

    def __init__(
        self,
        *,
        vmm: Vmm,
        made: Machines,
        groups: CgroupDriver,
        network: SandboxNetwork,
        first_slot: int,
        resolvers: Sequence[str],
        boot_id: str,
    ) -> None:
        self.made = made
        self.boot_id = boot_id
        self.guests: dict[SandboxId, Guest] = {}
        self.vms: dict[SandboxId, Vm] = {}
        self._vmm = vmm
        self._groups = groups
        self._network = network
        self._first_slot = first_slot
        self._resolvers = tuple(resolvers)

    async def release(self) -> None:
        """Machines go on without this process."""
        while self.vms:  # a start or a stop may end meanwhile
            _, vm = self.vms.popitem()
            await vm.release()
        self.guests.clear()

    # ── what there is ───────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, handle: Handle) -> Vm | None:
        """Its machine if it has one, whoever started it."""
        if handle.data["boot_id"] != self.boot_id:
            return None
        vm = self.vms.get(handle.sandbox_id)
        if vm is not None and not vm.ended:
            return vm
        if vm is not None:
            await self.end(handle, vm)
        vm = await self._vmm.find(Place(directory=place_of(handle)))
        if vm is not None:
            self.vms[handle.sandbox_id] = vm
        return vm

    async def find_running(self, handle: Handle) -> Vm:
        """The same. Raises SandboxLostError when there is none."""
        vm = await self.find(handle)
        if vm is None:
            raise SandboxLostError("the sandbox's machine is gone", sandbox_id=handle.sandbox_id)
        return vm

    def guest(self, sandbox_id: SandboxId) -> Guest | None:
        """The connection to its agent, if there is one that is good."""
        guest = self.guests.get(sandbox_id)
        return None if guest is None or guest.closed else guest

    def is_parked(self, handle: Handle) -> bool:
        """A reboot ends every sandbox, also one of which nothing runs."""
        return handle.data["boot_id"] == self.boot_id and (state_of(handle) / PAUSED).is_dir()

    # ── from files to a sandbox that is itself ──────────────────────────────────────────────────────────────────────

    async def start(
        self, handle: Handle, kept: Kept, saved: Path, layers: Sequence[LayerFiles], *, is_fork: bool
    ) -> Guest:
        """A new machine, and its agent once it is itself; `is_fork`: of another sandbox's snapshot.

        Raises as `Vmm.restore`, OSError, GuestLostError.
        """
        async with self.made.room():
            vm = await self._restore(handle, kept, saved, layers)
            return await self.wake(handle, vm, runs=True, is_fork=is_fork)

    async def restore_paused(self, handle: Handle, kept: Kept, saved: Path, layers: Sequence[LayerFiles]) -> Vm:
        """A machine that has not executed an instruction yet. Raises as `Vmm.restore`, and OSError."""
        async with self.made.room():
            return await self._restore(handle, kept, saved, layers, paused=True)

    async def _restore(
        self, handle: Handle, kept: Kept, saved: Path, layers: Sequence[LayerFiles], *, paused: bool = False
    ) -> Vm:
        slot, online = int(handle.data["slot"]), kept.shape.online
        tap = self._network.tap(slot) if online else None
        if online and not self._network.may_be_attached(slot):
            await self._network.attach_tap(slot)
        drives = await self.made.drives(kept.image, kept.shape, layers, state_of(handle))
        spec = machine(kept.shape, self.made.boot, drives, disks=state_of(handle), tap=tap)
        procs = self._groups.open_procs(handle.sandbox_id)
        try:
            host_id = host_root(self._first_slot + slot)  # the same slot among those of all edges of this kernel
            place = Place(directory=place_of(handle), cgroup_procs=procs, host_id=host_id)
            vm = await self._vmm.restore(saved, spec, place, paused=paused)
        finally:
            for fd in procs:
                os.close(fd)
        self.vms[handle.sandbox_id] = vm
        return vm

    async def wake(self, handle: Handle, vm: Vm, *, runs: bool = False, is_fork: bool = False) -> Guest:
        """It runs, its agent answers, and it is itself. Raises GuestLostError."""
        if not runs:
            await vm.resume()
        for timeout_s in RENEW_TRIES_S:
            guest = self.guests[handle.sandbox_id] = await vm.connect(timeout_s=CONNECT_TIMEOUT_S)
            try:
                await self.renew(handle, timeout_s=timeout_s, is_fork=is_fork)
            except GuestLostError:
                # The agent may have taken a connection that had just begun for one that had just ended.
                if timeout_s == RENEW_TRIES_S[-1] or vm.ended:
                    raise
            else:
                return guest
        raise AssertionError("the last try returns or raises")

    async def renew(self, handle: Handle, *, timeout_s: float = CONNECT_TIMEOUT_S, is_fork: bool = False) -> None:
        """Who it is, told once more. Without a connection nothing: whoever connects next renews it.

        Raises GuestLostError.
        """
        guest = self.guest(handle.sandbox_id)
        if guest is None:
            return
        slot, online = int(handle.data["slot"]), bool(handle.data["online"])
        inner, host = addresses(self._network, slot, online=online)
        token = secrets.token_bytes(32)
        mac = mac_of(handle.sandbox_id)
        who = identity(token=token, inner=inner, host=host, resolvers=self._resolvers, mac=mac, is_new=is_fork)
        try:
            async with asyncio.timeout(timeout_s):
                await guest.renew(who)
        except TimeoutError:
            raise GuestLostError(f"the guest agent did not answer within {timeout_s:g} s") from None
        except GuestError as error:
            raise GuestLostError(f"the guest does not take its new identity: {error}") from error

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def let_go(self, sandbox_id: SandboxId) -> None:
        """Close the connection to its agent; the machine goes on."""
        guest = self.guests.pop(sandbox_id, None)
        if guest is not None:
            await guest.aclose()

    async def end(self, handle: Handle, vm: Vm) -> None:
        """Its machine is gone when this returns. Raises NodeError."""
        await self.let_go(handle.sandbox_id)
        await vm.kill()
        self.vms.pop(handle.sandbox_id, None)

    async def shut_down(self, handle: Handle, guest: Guest, grace_s: float) -> None:
        """Ask, and wait as long as asked; whether it worked is for the caller to look at."""
        vm = self.vms.get(handle.sandbox_id)
        with contextlib.suppress(GuestLostError, GuestError, TimeoutError):
            async with asyncio.timeout(grace_s + 1):
                await guest.shutdown(round(grace_s * 1000))
                if vm is not None:
                    await vm.wait_ended()
