"""Sandboxes as microVMs: a guest kernel of their own, started by copying a machine that was booted before.

One start is: the template of this image and shape (made first where there is none) → its files linked, its disk copied
→ a tap device, where it has a network → a control group → restore → the agent's HELLO → RENEW: clock, randomness, names
and addresses, before anybody else gets at it. Afterwards a sandbox needs nothing of this process.

    <plan.run_dir>/vm/            what the VMM keeps there (`vm.base.Place`)
    <plan.state_dir>/vm.json      what it takes to start the machine again
    <plan.state_dir>/base/        the template's or snapshot's files, linked
    <plan.state_dir>/disk.img     the writable disk
    <plan.state_dir>/paused/      a paused machine (`microvm_parking`)
    <plan.state_dir>/packed/      what it has written, while it is packed (`microvm_packing`)

Pausing saves the machine and ends its VMM. Whoever destroys wins: it ends the VMM first, so that whatever else is going
on with the sandbox fails, and then waits for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from opendsec.backends.base import Backend, Capability, Changes, Handle, Parked, Running, StartPlan, Usage
from opendsec.backends.container_policy import host_range
from opendsec.backends.container_rubbish import empty
from opendsec.backends.container_templates import find_resolvers
from opendsec.backends.ground import Ground, network_of
from opendsec.backends.microvm_files import (
    BASE,
    PAUSED,
    PLACE,
    link_files,
    not_open,
    read_kept,
    start_error,
    state_of,
    write_kept,
)
from opendsec.backends.microvm_live import Live
from opendsec.backends.microvm_machines import Machines, copy_disks
from opendsec.backends.microvm_packing import changes
from opendsec.backends.microvm_parking import Parking
from opendsec.backends.microvm_shape import Kept, Shape, is_online, limits_of, shape_of
from opendsec.backends.microvm_templates import MACHINE
from opendsec.backends.turns import Turns
from opendsec.errors import (
    HostCapabilityError,
    InvalidSpecError,
    NodeError,
    OpenDSecError,
    SnapshotInvalidError,
    StartError,
    UnsupportedError,
)
from opendsec.guest.base import Guest, GuestError, GuestLostError
from opendsec.linux.boot import boot_id
from opendsec.linux.cgroup import CgroupDriver
from opendsec.linux.network import SandboxNetwork
from opendsec.linux.probe import Remembered
from opendsec.linux.slots import MACHINE_SLOT, SLOTS
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind
from opendsec.store.durable import remove_tree
from opendsec.store.loading.base import LayerFiles
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import Vmm
from opendsec.vm.qemu_line import AGENT_SOCKET

GONE_TIMEOUT_S = 20.0
MAX_SOCKET_PATH = 107
"""unix(7)"""
_ALWAYS = frozenset(
    {
        Capability.EXEC,
        Capability.SESSIONS,
        Capability.PTY,
        Capability.FILES,
        Capability.MEMORY_LIMIT,
        Capability.PIDS_LIMIT,
        Capability.DISK_LIMIT,
        Capability.PAUSE,
        Capability.PACK,
        Capability.SNAPSHOT,
        Capability.RECOVER,
        Capability.PORTS,
    }
)


class MicroVmBackend(Backend):
    """`vmm` runs the machines, `layers` has the files of images. `state_dir` and `run_dir` are this edge's own;
    `kernels` is the state directory guest kernels are installed in. `ground` is what the backends of an edge share.
    """

    kind = BackendKind.MICROVM
    offers = _ALWAYS | {Capability.CPU_LIMIT, Capability.NETWORK}
    parks = True
    opens_at_leisure = True

    def __init__(
        self,
        *,
        vmm: Vmm,
        layers: LayerMounts,
        state_dir: Path,
        run_dir: Path,
        kernels: Path,
        ground: Ground,
        network: SandboxNetwork | None = None,
    ) -> None:
        self._vmm = vmm
        self._layers = layers
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._kernels = kernels
        self._ground = ground
        self._given_network = network
        self._network: SandboxNetwork | None = None
        self._driver: CgroupDriver | None = None
        self._opened: Live | None = None
        self._may_network = False
        self._reasons: list[str] = []
        self._turns = Turns()

    @property
    def capabilities(self) -> frozenset[Capability]:
        if self._driver is None:
            return frozenset()
        found = set(_ALWAYS)
        if "cpu" in self._driver.limits:
            found.add(Capability.CPU_LIMIT)
        if self._may_network:
            found.add(Capability.NETWORK)
        return frozenset(found)

    async def open(self) -> None:
        self._reasons.clear()
        probes = Remembered(self._run_dir / "probed", state_dir=self._state_dir)
        for name in ("root", "cgroup", "erofs", "mkfs.ext4"):
            answer = await asyncio.to_thread(probes.probe, name)
            if not answer.ok:
                raise HostCapabilityError(answer.sentence, detail={"probe": answer.name}, remedy=answer.remedy)
        await self._vmm.open()
        self._may_network = await self._can(probes, "network", "tun", "nft", "forwarding")
        usable, refused = find_resolvers()
        if refused:
            self._reasons.append(f"name servers that sandboxes cannot reach are left out: {', '.join(refused)}")
        try:
            self._opened = await self._prepare(usable)
        except OSError as error:
            await self.close()
            raise HostCapabilityError(
                f"the microVM backend cannot be prepared: {error}", detail={"probe": "prepare"}
            ) from error
        except BaseException:
            await self.close()
            raise

    async def _prepare(self, resolvers: Sequence[str]) -> Live:
        number, self._driver = await self._ground.enter()
        self._network = self._given_network or network_of(number)
        made = Machines(self._vmm, state_dir=self._state_dir, run_dir=self._run_dir, kernels=self._kernels)
        await made.open(self._driver, self._network, host_ids=host_range(number.first_slot + MACHINE_SLOT))
        return Live(
            vmm=self._vmm,
            made=made,
            groups=self._driver,
            network=self._network,
            first_slot=number.first_slot,
            resolvers=resolvers,
            boot_id=boot_id(),
        )

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.release()
        await self._vmm.close()
        if self._may_network and self._network is not None:
            await self._network.close()
        driver, self._driver = self._driver, None
        if driver is not None:
            self._ground.leave(driver)
        self._network = None

    async def _can(self, probes: Remembered, feature: str, *names: str) -> bool:
        for name in names:
            answer = await asyncio.to_thread(probes.probe, name)
            if not answer.ok:
                self._reasons.append(f"no {feature}: {answer.sentence}")
                return False
        return True

    def report(self) -> BackendReport:
        names = tuple(sorted(capability.value for capability in self.capabilities))
        return BackendReport(
            available=self._opened is not None,
            reasons=tuple(self._reasons),
            capabilities=names,
            live=0 if self._opened is None else len(self._opened.vms),
            degraded=(self._vmm.degraded,) if self._vmm.degraded else (),
            binding=self._bound_to() if self._opened is not None else "",
        )

    def _bound_to(self) -> str:
        binding = self._vmm.binding
        return f"{binding.vmm} {binding.version}, {binding.accelerator.value}, {binding.cpu_model}"

    # ── start, find, end ────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, plan: StartPlan) -> Running:
        shape = self._check(plan)
        layers = await self._layers.files_soon(plan.image)
        try:
            async with self._turns.of(plan.sandbox_id):
                kept = await self._lay_out(plan, shape, layers)
                handle = self._handle(plan, kept.shape)
                limits = limits_of(plan.spec, kept.shape, self._vmm.binding.accelerator)
                self._groups.create(plan.sandbox_id, replace(limits, cpu_cores=None), owner=0).__exit__()
                is_fork = plan.snapshot is not None
                guest = await self._live.start(handle, kept, plan.state_dir / BASE, layers, is_fork=is_fork)
                self._groups.limit(plan.sandbox_id, limits)  # a tenth of a processor would make a start take seconds
        except (OSError, GuestError, GuestLostError) as error:
            await self._clear(plan)
            raise start_error(error, plan.sandbox_id) from error
        except OpenDSecError as error:
            await self._clear(plan)
            error.sandbox_id = error.sandbox_id or plan.sandbox_id
            if isinstance(error, SnapshotInvalidError) and plan.snapshot is None:
                await self._live.made.discard(plan.image, shape)
                raise StartError(
                    f"the machine that is copied for this image was damaged, and is removed: {error.message}",
                    remedy="start it again: the machine is made anew",
                    retryable=True,
                    sandbox_id=plan.sandbox_id,
                ) from error
            raise
        return Running(handle=handle, guest=guest)

    async def recover(self, handle: Handle) -> Running | Parked | None:
        async with self._turns.of(handle.sandbox_id):
            vm = await self._live.find(handle)
            if self._live.is_parked(handle):
                if vm is not None:  # saved, and its VMM was about to be ended
                    await self._live.end(handle, vm)
                return Parked(handle=handle)
            if vm is None:
                return None
            return Running(handle=handle, guest=await self._live.wake(handle, vm))

    async def reconnect(self, handle: Handle) -> Guest | None:
        async with self._turns.of(handle.sandbox_id):
            vm = await self._live.find(handle)
            if vm is None:
                return None
            return self._live.guest(handle.sandbox_id) or await self._live.wake(handle, vm)

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        live = self._live
        if handle.data["boot_id"] != live.boot_id:
            return
        guest = live.guests.pop(handle.sandbox_id, None)
        if grace_s > 0 and guest is not None and not guest.closed:
            await live.shut_down(handle, guest, grace_s)
        self._groups.kill(handle.sandbox_id)
        async with self._turns.of(handle.sandbox_id):
            self._groups.kill(handle.sandbox_id)
            vm = await live.find(handle)
            if vm is not None:
                await live.end(handle, vm)
            await asyncio.to_thread(remove_tree, state_of(handle) / PAUSED)

    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        self._groups.kill(sandbox_id)
        await self._live.let_go(sandbox_id)
        try:
            async with self._turns.of(sandbox_id):
                await self._remove(sandbox_id, state_dir, run_dir, slot)
        except TimeoutError as error:
            raise NodeError(f"the sandbox is not gone: {error}", sandbox_id=sandbox_id) from error

    async def _remove(self, sandbox_id: SandboxId, state_dir: Path, run_dir: Path, slot: int) -> None:
        self._groups.kill(sandbox_id)
        vm = self._live.vms.pop(sandbox_id, None)
        if vm is not None:
            await vm.kill()
        await self._groups.wait_empty(sandbox_id, timeout_s=GONE_TIMEOUT_S)
        if self._may_network and self._networks.may_be_attached(slot):
            await asyncio.to_thread(self._networks.detach, slot)
        await asyncio.to_thread(empty, run_dir, state_dir)
        await self._groups.remove(sandbox_id, timeout_s=GONE_TIMEOUT_S)

    def usage(self, handle: Handle) -> Usage:
        counters = self._groups.usage(handle.sandbox_id)
        guest = self._live.guests.get(handle.sandbox_id)
        inside = None if guest is None else guest.usage
        if inside is None:
            return Usage(memory_bytes=counters.memory_bytes, oom_kills=counters.oom_kills, cpu_s=counters.cpu_s)
        return Usage(
            memory_bytes=counters.memory_bytes,
            oom_kills=inside.oom_kills + (counters.oom_kills or 0),
            pids_denied=inside.pids_denied,
            disk_full=inside.disk_full,
            cpu_s=counters.cpu_s,
        )

    # ── pause, resume, snapshot, pack ───────────────────────────────────────────────────────────────────────────────

    async def pause(self, handle: Handle) -> None:
        async with self._turns.of(handle.sandbox_id):
            await self._parking.park(handle)

    async def resume(self, handle: Handle) -> None:
        async with self._turns.of(handle.sandbox_id):
            try:
                await self._parking.unpark(handle)
            except GuestLostError as error:
                raise NodeError(
                    f"the sandbox runs again, and its agent does not answer: {error}", sandbox_id=handle.sandbox_id
                ) from error

    async def snapshot(self, handle: Handle, target: Path) -> None:
        async with self._turns.of(handle.sandbox_id):
            await self._parking.copy(handle, target)

    @contextlib.asynccontextmanager
    async def changes(self, handle: Handle, *, image: Image) -> AsyncIterator[Changes]:
        lower = await self._layers.acquire_soon(image)
        async with (
            self._turns.of(handle.sandbox_id),
            changes(self._live, self._parking, handle, lower=lower) as found,
        ):
            yield found

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, plan: StartPlan) -> Shape:
        if not 0 <= plan.slot < SLOTS:
            raise InvalidSpecError(f"slot {plan.slot} is not between 0 and {SLOTS - 1}", detail={"field": "slot"})
        if len(os.fsencode(plan.run_dir / PLACE / AGENT_SOCKET)) > MAX_SOCKET_PATH:
            raise HostCapabilityError(
                f"{plan.run_dir}/{PLACE}/{AGENT_SOCKET} is longer than a socket's path can be",
                detail={"probe": "run_dir"},
                remedy="use a shorter OPENDSEC_RUN_DIR",
            )
        if not is_online(plan.spec):
            return shape_of(plan.spec, plan.image)
        if not self._may_network:
            raise UnsupportedError(
                "network_rules: this node cannot give microVMs a network",
                detail={"field": "network_rules"},
                remedy="; ".join(self._reasons),
            )
        try:
            self._networks.addresses(plan.slot)
        except ValueError as error:
            raise StartError(f"no address is left for this sandbox: {error}", sandbox_id=plan.sandbox_id) from error
        return shape_of(plan.spec, plan.image)

    async def _lay_out(self, plan: StartPlan, shape: Shape, layers: Sequence[LayerFiles]) -> Kept:
        """Fill the state directory: what to restore from, a disk, and what it takes to do so again."""
        base = plan.state_dir / BASE
        base.mkdir(mode=0o700)
        kept = Kept(shape=shape, image=plan.image)
        if plan.snapshot is None:
            await self._live.made.take(plan.image, shape, layers, base)
        else:
            kept = await asyncio.to_thread(read_kept, plan.snapshot)
            if kept.shape.online != is_online(plan.spec):
                raise SnapshotInvalidError(
                    f"the snapshot's sandbox had {'a' if kept.shape.online else 'no'} network",
                    detail={"differs": "network"},
                    remedy="ask for the same network_rules",
                )
            await asyncio.to_thread(_refer, plan.snapshot / MACHINE, base)
            await asyncio.to_thread(copy_disks, plan.snapshot, plan.state_dir, kept.shape.disks)
        await asyncio.to_thread(write_kept, plan.state_dir, kept)
        (plan.run_dir / PLACE).mkdir(mode=0o711)
        return kept

    def _handle(self, plan: StartPlan, shape: Shape) -> Handle:
        return Handle(
            backend=self.kind,
            sandbox_id=plan.sandbox_id,
            data={
                "slot": plan.slot,
                "online": int(shape.online),
                "state_dir": str(plan.state_dir),
                "run_dir": str(plan.run_dir),
                "boot_id": self._live.boot_id,
            },
        )

    async def _clear(self, plan: StartPlan) -> None:
        await self.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)

    @property
    def _groups(self) -> CgroupDriver:
        if self._driver is None:
            raise not_open()
        return self._driver

    @property
    def _networks(self) -> SandboxNetwork:
        if self._network is None:
            raise not_open()
        return self._network

    @property
    def _live(self) -> Live:
        if self._opened is None:
            raise not_open()
        return self._opened

    @property
    def _parking(self) -> Parking:
        return Parking(self._live, self._layers)


def _refer(machine: Path, base: Path) -> None:
    """Make `base`, an empty directory, what a snapshot's sandbox is restored from and its next pause builds on.

    Links, so that the sandbox goes on as before when somebody removes the snapshot by force. A store on another file
    system has none to give: then `base` is a link to the directory, and the sandbox needs the snapshot. Raises OSError.
    """
    if not link_files(machine, base):
        base.rmdir()
        base.symlink_to(machine)
