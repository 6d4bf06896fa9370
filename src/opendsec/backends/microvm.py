"""Sandboxes as microVMs: a guest kernel of their own, started by copying a machine that was booted before.

One start is: the template of this image and shape (made first where there is none) → its files linked, its disk copied
→ a tap device, where it has a network → a control group → restore → the agent's HELLO → RENEW: clock, randomness, names
and addresses, before anybody else gets at it. Afterwards a sandbox needs nothing of this process.

    <plan.run_dir>/vm/            what the VMM keeps there (`vm.base.Place`)
    <plan.state_dir>/vm.json      what it takes to start the machine again
    <plan.state_dir>/base/        the template's or snapshot's files, linked
    <plan.state_dir>/disk.img     the writable disk
    <plan.state_dir>/paused/      a paused machine; there while it must be believed, and whole
    <plan.state_dir>/packed/      what it has written, while it is packed

Pausing saves the machine and ends its VMM. Whoever destroys wins: it ends the VMM first, so that whatever else is going
on with the sandbox fails, and then waits for its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opendsec.backends.base import Backend, Capability, Changes, Handle, Parked, Running, StartPlan, Usage
from opendsec.backends.container_policy import host_root
from opendsec.backends.container_templates import find_resolvers
from opendsec.backends.ground import Ground, network_of
from opendsec.backends.microvm_disk import most_inodes
from opendsec.backends.microvm_files import (
    BASE,
    PACKED,
    PAUSED,
    PLACE,
    SAVING,
    empty,
    fresh,
    not_open,
    place_of,
    read_kept,
    start_error,
    state_of,
    write_kept,
)
from opendsec.backends.microvm_machines import Machines, addresses, copy_disks
from opendsec.backends.microvm_shape import MIB, Kept, Shape, identity, is_online, limits_of, machine, shape_of
from opendsec.backends.microvm_templates import MACHINE
from opendsec.errors import (
    HostCapabilityError,
    InvalidSpecError,
    NodeError,
    OpenDSecError,
    SandboxLostError,
    SnapshotInvalidError,
    StartError,
    UnsupportedError,
)
from opendsec.guest.base import Guest, GuestError, GuestLostError
from opendsec.linux.cgroup import CgroupDriver
from opendsec.linux.network import SandboxNetwork
from opendsec.linux.node_number import NodeNumber
from opendsec.linux.probe import Remembered
from opendsec.linux.slots import MACHINE_SLOT, SLOTS
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind
from opendsec.store.durable import remove_tree
from opendsec.store.loading.base import LayerFiles
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import Place, Vm, Vmm
from opendsec.vm.qemu_line import AGENT_SOCKET
from opendsec.vm.upper import UpperLimits, receive_upper

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
SETTLE_S = 0.02
"""Until the agent has seen the end of its connection; a machine saved before that only wakes more slowly."""
RENEW_TRIES_S = (5.0, CONNECT_TIMEOUT_S)
FREEZE_TIMEOUT_MS = 600_000
"""Of a pack: the guest's disk stands still no longer, and what it has not sent by then is not of one moment."""
GONE_TIMEOUT_S = 20.0
MAX_SOCKET_PATH = 107
"""unix(7)"""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
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


@dataclass(slots=True)
class _Turn:
    """One sandbox's lock, and how many hold it or wait for it: with none it is forgotten."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


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
        self._number: NodeNumber | None = None
        self._driver: CgroupDriver | None = None
        self._machines: Machines | None = None
        self._may_network = False
        self._resolvers: tuple[str, ...] = ()
        self._reasons: list[str] = []
        self._boot_id = ""
        self._vms: dict[SandboxId, Vm] = {}
        self._guests: dict[SandboxId, Guest] = {}
        self._turns: dict[SandboxId, _Turn] = {}
        """Held by whoever starts, ends or relies on a machine."""

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
        self._boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        usable, refused = find_resolvers()
        self._resolvers = tuple(usable)
        if refused:
            self._reasons.append(f"name servers that sandboxes cannot reach are left out: {', '.join(refused)}")
        machines = Machines(self._vmm, state_dir=self._state_dir, run_dir=self._run_dir, kernels=self._kernels)
        try:
            self._number, self._driver = await self._ground.enter()
            self._network = self._given_network or network_of(self._number)
            await machines.open(self._driver, self._network, host_id=host_root(self._number.first_slot + MACHINE_SLOT))
        except OSError as error:
            await self.close()
            raise HostCapabilityError(
                f"the microVM backend cannot be prepared: {error}", detail={"probe": "prepare"}
            ) from error
        except BaseException:
            await self.close()
            raise
        self._machines = machines

    async def close(self) -> None:
        while self._vms:  # a start or a stop may end meanwhile
            _, vm = self._vms.popitem()
            await vm.release()
        await self._vmm.close()
        self._guests.clear()
        if self._may_network and self._network is not None:
            await self._network.close()
        driver, self._driver = self._driver, None
        if driver is not None:
            self._ground.leave(driver)
        self._number = self._machines = self._network = None

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
            available=self._machines is not None,
            reasons=tuple(self._reasons),
            capabilities=names,
            live=len(self._vms),
            degraded=(self._vmm.degraded,) if self._vmm.degraded else (),
            binding=self._bound_to() if self._machines is not None else "",
        )

    def _bound_to(self) -> str:
        binding = self._vmm.binding
        return f"{binding.vmm} {binding.version}, {binding.accelerator.value}, {binding.cpu_model}"

    # ── start, find, end ────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, plan: StartPlan) -> Running:
        shape = self._check(plan)
        layers = await self._layers.files_soon(plan.image)
        try:
            async with self._turn(plan.sandbox_id):
                kept = await self._lay_out(plan, shape, layers)
                handle = self._handle(plan, kept.shape)
                limits = limits_of(plan.spec, kept.shape, self._vmm.binding.accelerator)
                self._groups.create(plan.sandbox_id, replace(limits, cpu_cores=None), owner=0).__exit__()
                vm = await self._restore(handle, kept, plan.state_dir / BASE, layers)
                guest = await self._wake(handle, vm, runs=True)
                self._groups.limit(plan.sandbox_id, limits)  # a tenth of a processor would make a start take seconds
        except (OSError, GuestError, GuestLostError) as error:
            await self._clear(plan)
            raise start_error(error, plan.sandbox_id) from error
        except OpenDSecError as error:
            await self._clear(plan)
            error.sandbox_id = error.sandbox_id or plan.sandbox_id
            if isinstance(error, SnapshotInvalidError) and plan.snapshot is None:
                await self._made.discard(plan.image, shape)
                raise StartError(
                    f"the machine that is copied for this image was damaged, and is removed: {error.message}",
                    remedy="start it again: the machine is made anew",
                    retryable=True,
                    sandbox_id=plan.sandbox_id,
                ) from error
            raise
        return Running(handle=handle, guest=guest)

    async def recover(self, handle: Handle) -> Running | Parked | None:
        async with self._turn(handle.sandbox_id):
            vm = await self._find(handle)
            if self._is_parked(handle):
                if vm is not None:  # saved, and its VMM was about to be ended
                    await self._end(handle, vm)
                return Parked(handle=handle)
            if vm is None:
                return None
            return Running(handle=handle, guest=await self._wake(handle, vm))

    async def reconnect(self, handle: Handle) -> Guest | None:
        async with self._turn(handle.sandbox_id):
            vm = await self._find(handle)
            if vm is None:
                return None
            guest = self._guests.get(handle.sandbox_id)
            if guest is not None and not guest.closed:
                return guest
            return await self._wake(handle, vm)

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        if handle.data["boot_id"] != self._boot_id:
            return
        guest = self._guests.pop(handle.sandbox_id, None)
        if grace_s > 0 and guest is not None and not guest.closed:
            await self._shut_down(handle, guest, grace_s)
        self._groups.kill(handle.sandbox_id)
        async with self._turn(handle.sandbox_id):
            self._groups.kill(handle.sandbox_id)
            vm = await self._find(handle)
            if vm is not None:
                await self._end(handle, vm)
            await asyncio.to_thread(remove_tree, state_of(handle) / PAUSED)

    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        self._groups.kill(sandbox_id)
        guest = self._guests.pop(sandbox_id, None)
        if guest is not None:
            await guest.aclose()
        try:
            async with self._turn(sandbox_id):
                await self._remove(sandbox_id, state_dir, run_dir, slot)
        except TimeoutError as error:
            raise NodeError(f"the sandbox is not gone: {error}", sandbox_id=sandbox_id) from error

    async def _remove(self, sandbox_id: SandboxId, state_dir: Path, run_dir: Path, slot: int) -> None:
        self._groups.kill(sandbox_id)
        vm = self._vms.pop(sandbox_id, None)
        if vm is not None:
            await vm.kill()
        await self._groups.wait_empty(sandbox_id, timeout_s=GONE_TIMEOUT_S)
        if self._may_network and self._networks.may_be_attached(slot):
            await asyncio.to_thread(self._networks.detach, slot)
        await asyncio.to_thread(empty, run_dir, state_dir)
        await self._groups.remove(sandbox_id, timeout_s=GONE_TIMEOUT_S)

    def usage(self, handle: Handle) -> Usage:
        counters = self._groups.usage(handle.sandbox_id)
        guest = self._guests.get(handle.sandbox_id)
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
        async with self._turn(handle.sandbox_id):
            await self._park(handle)

    async def resume(self, handle: Handle) -> None:
        async with self._turn(handle.sandbox_id):
            try:
                await self._unpark(handle)
            except GuestLostError as error:
                raise NodeError(
                    f"the sandbox runs again, and its agent does not answer: {error}", sandbox_id=handle.sandbox_id
                ) from error

    async def snapshot(self, handle: Handle, target: Path) -> None:
        async with self._turn(handle.sandbox_id), self._still(handle) as vm:
            kept = await asyncio.to_thread(read_kept, state_of(handle))
            machine = target / MACHINE
            machine.mkdir(mode=0o700)
            await vm.save(machine, whole=True)
            if not self._is_parked(handle):  # a parked one builds on what it was parked with
                await asyncio.to_thread(vm.keep_base, state_of(handle))
            await asyncio.to_thread(copy_disks, state_of(handle), target, kept.shape.disks)
            await asyncio.to_thread(write_kept, target, kept)

    @contextlib.asynccontextmanager
    async def changes(self, handle: Handle, *, image: Image) -> AsyncIterator[Changes]:
        """The guest freezes its disk and sends what it has written; the tree is put together here, of its bytes."""
        lower = await self._layers.acquire_soon(image)
        tree = state_of(handle) / PACKED
        async with self._turn(handle.sandbox_id):
            was_parked, finished = self._is_parked(handle), False
            await asyncio.to_thread(remove_tree, tree)
            try:
                guest = await self._awake(handle)
                async with self._written(handle, guest, tree):
                    yield Changes(tree=tree, lower=lower)
                    finished = True
            except (GuestError, GuestLostError, SandboxLostError) as error:
                if finished:  # what was read is whole; the end of the sandbox is seen by itself
                    await self._let_go(handle, str(error))
                elif isinstance(error, SandboxLostError):
                    raise
                else:
                    raise SandboxLostError(
                        f"the guest did not hold still: {error}", sandbox_id=handle.sandbox_id
                    ) from error
            finally:
                await asyncio.to_thread(remove_tree, tree)
                if was_parked:
                    await self._park_again(handle, needed=not finished)

    @contextlib.asynccontextmanager
    async def _written(self, handle: Handle, guest: Guest, tree: Path) -> AsyncIterator[None]:
        """The upper directory at `tree`; once it is here, the whole machine stands still for the block."""
        kept = await asyncio.to_thread(read_kept, state_of(handle))
        try:
            async with guest.frozen(timeout_ms=FREEZE_TIMEOUT_MS):
                await self._receive(handle, guest, tree, disk_bytes=kept.shape.disk_mib * MIB)
                vm = self._vms[handle.sandbox_id]
                await vm.pause()
                try:
                    yield
                finally:
                    await vm.resume()
        except BaseException:
            with contextlib.suppress(GuestLostError):  # its clock stood still; whoever connects next renews it
                await self._renew(handle)
            raise
        await self._renew(handle)

    async def _receive(self, handle: Handle, guest: Guest, tree: Path, *, disk_bytes: int) -> None:
        """What the guest has written, within its disk's size, and within the time the disk stands still: one that sends
        a little now and then holds nobody up for ever.
        """
        limits = UpperLimits(max_bytes=disk_bytes, max_inodes=most_inodes(disk_bytes))
        try:
            async with asyncio.timeout(FREEZE_TIMEOUT_MS / 1000):
                await receive_upper(guest.pack_upper(), tree, limits=limits)
        except TimeoutError as error:
            raise NodeError(
                f"the guest did not send what it has written within {FREEZE_TIMEOUT_MS / 1000:g} s",
                sandbox_id=handle.sandbox_id,
                remedy="write less, or pack when the node is less busy",
            ) from error

    async def _let_go(self, handle: Handle, why: str) -> None:
        """Whoever connects next renews it."""
        log.warning("guest_lost_after_a_pack", extra={"fields": {"sandbox_id": handle.sandbox_id, "reason": why}})
        guest = self._guests.pop(handle.sandbox_id, None)
        if guest is not None:
            await guest.aclose()

    async def _awake(self, handle: Handle) -> Guest:
        """A connection to its running agent, whatever it takes."""
        guest = self._guests.get(handle.sandbox_id)
        if guest is None or guest.closed:
            await self._unpark(handle)
            guest = self._guests[handle.sandbox_id]
        return guest

    async def _park(self, handle: Handle) -> None:
        """Save it and end its VMM; whatever fails, it goes on as it was."""
        state = state_of(handle)
        vm = await self._find(handle)
        if self._is_parked(handle):
            if vm is not None:
                await self._end(handle, vm)
            return
        if vm is None:
            raise SandboxLostError("the sandbox's machine is gone", sandbox_id=handle.sandbox_id)
        saving = state / SAVING
        guest = self._guests.pop(handle.sandbox_id, None)
        if guest is not None:
            await guest.aclose()
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
        await self._end(handle, vm)

    async def _park_again(self, handle: Handle, *, needed: bool) -> None:
        """After a pack; one that was lost meanwhile is no fault of a pack that is whole."""
        try:
            await self._park(handle)
        except SandboxLostError as error:
            if needed:
                raise
            await self._let_go(handle, str(error))

    async def _unpark(self, handle: Handle) -> None:
        paused = state_of(handle) / PAUSED
        vm = await self._find(handle)
        if not self._is_parked(handle):
            if vm is None:
                raise SandboxLostError("the sandbox's machine is gone", sandbox_id=handle.sandbox_id)
            await self._wake(handle, vm)
            return
        if vm is not None:
            await self._end(handle, vm)
        kept = await asyncio.to_thread(read_kept, state_of(handle))
        layers = await self._layers.files_soon(kept.image)
        vm = await self._restore(handle, kept, paused, layers, paused=True)
        # From here on its disk may differ from what was saved.
        gone = paused.with_name(SAVING)
        await asyncio.to_thread(remove_tree, gone)
        paused.rename(gone)
        await self._wake(handle, vm)
        await asyncio.to_thread(remove_tree, gone)

    @contextlib.asynccontextmanager
    async def _still(self, handle: Handle) -> AsyncIterator[Vm]:
        """The machine, standing still for the block; afterwards running, or parked, as it was."""
        paused = state_of(handle) / PAUSED
        if self._is_parked(handle):
            kept = await asyncio.to_thread(read_kept, state_of(handle))
            layers = await self._layers.files_soon(kept.image)
            vm = await self._restore(handle, kept, paused, layers, paused=True)
            try:
                yield vm
            finally:
                await self._end(handle, vm)
            return
        found = await self._find(handle)
        if found is None:
            raise SandboxLostError("the sandbox's machine is gone", sandbox_id=handle.sandbox_id)
        await found.pause()
        try:
            yield found
        finally:
            await found.resume()
            try:
                await self._renew(handle)
            except GuestLostError:  # a VMM may cut connections when it saves; whoever connects next renews it
                guest = self._guests.get(handle.sandbox_id)
                if guest is not None and not guest.closed:
                    raise

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
            await self._made.take(plan.image, shape, layers, base)
        else:
            kept = await asyncio.to_thread(read_kept, plan.snapshot)
            if kept.shape.online != is_online(plan.spec):
                raise SnapshotInvalidError(
                    f"the snapshot's sandbox had {'a' if kept.shape.online else 'no'} network",
                    detail={"differs": "network"},
                    remedy="ask for the same network_rules",
                )
            base.rmdir()
            base.symlink_to(plan.snapshot / MACHINE)
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
                "boot_id": self._boot_id,
            },
        )

    async def _restore(
        self, handle: Handle, kept: Kept, saved: Path, layers: Sequence[LayerFiles], *, paused: bool = False
    ) -> Vm:
        """Start the sandbox's VMM. Raises as `Vmm.restore`, and OSError."""
        slot, online = int(handle.data["slot"]), kept.shape.online
        tap = self._networks.tap(slot) if online else None
        if online and not self._networks.may_be_attached(slot):
            await self._networks.attach_tap(slot)
        drives = await self._made.drives(kept.image, kept.shape, layers, state_of(handle))
        spec = machine(kept.shape, self._made.boot, drives, disks=state_of(handle), tap=tap)
        host_id = host_root(self._machine_slot(slot))
        procs = self._groups.open_procs(handle.sandbox_id)
        try:
            async with self._made.room():
                place = Place(directory=place_of(handle), cgroup_procs=procs, host_id=host_id)
                vm = await self._vmm.restore(saved, spec, place, paused=paused)
        finally:
            for fd in procs:
                os.close(fd)
        self._vms[handle.sandbox_id] = vm
        return vm

    async def _wake(self, handle: Handle, vm: Vm, *, runs: bool = False) -> Guest:
        """It runs, its agent answers, and it is itself. Raises GuestLostError."""
        if not runs:
            await vm.resume()
        for timeout_s in RENEW_TRIES_S:
            guest = self._guests[handle.sandbox_id] = await vm.connect(timeout_s=CONNECT_TIMEOUT_S)
            try:
                await self._renew(handle, timeout_s=timeout_s)
            except GuestLostError:
                # The agent may have taken a connection that had just begun for one that had just ended.
                if timeout_s == RENEW_TRIES_S[-1] or vm.ended:
                    raise
            else:
                return guest
        raise AssertionError("the last try returns or raises")

    async def _renew(self, handle: Handle, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        guest = self._guests.get(handle.sandbox_id)
        if guest is None or guest.closed:
            return  # whoever connects next renews it
        slot, online = int(handle.data["slot"]), bool(handle.data["online"])
        inner, host = addresses(self._networks, slot, online=online)
        token = secrets.token_bytes(32)
        who = identity(token=token, inner=inner, host=host, resolvers=self._resolvers)
        try:
            async with asyncio.timeout(timeout_s):
                await guest.renew(who)
        except TimeoutError:
            raise GuestLostError(f"the guest agent did not answer within {timeout_s:g} s") from None
        except GuestError as error:
            raise GuestLostError(f"the guest does not take its new identity: {error}") from error

    async def _find(self, handle: Handle) -> Vm | None:
        """Its machine if it has one, whoever started it."""
        if handle.data["boot_id"] != self._boot_id:
            return None
        vm = self._vms.get(handle.sandbox_id)
        if vm is not None and not vm.ended:
            return vm
        if vm is not None:
            await self._end(handle, vm)
        vm = await self._vmm.find(Place(directory=place_of(handle)))
        if vm is not None:
            self._vms[handle.sandbox_id] = vm
        return vm

    def _is_parked(self, handle: Handle) -> bool:
        """A reboot ends every sandbox, also one of which nothing runs."""
        return handle.data["boot_id"] == self._boot_id and (state_of(handle) / PAUSED).is_dir()

    async def _end(self, handle: Handle, vm: Vm) -> None:
        guest = self._guests.pop(handle.sandbox_id, None)
        if guest is not None:
            await guest.aclose()
        await vm.kill()
        self._vms.pop(handle.sandbox_id, None)

    async def _shut_down(self, handle: Handle, guest: Guest, grace_s: float) -> None:
        """Ask, and wait as long as asked; whether it worked is for the caller to look at."""
        vm = self._vms.get(handle.sandbox_id)
        with contextlib.suppress(GuestLostError, GuestError, TimeoutError):
            async with asyncio.timeout(grace_s + 1):
                await guest.shutdown(round(grace_s * 1000))
                if vm is not None:
                    await vm.wait_ended()

    async def _clear(self, plan: StartPlan) -> None:
        await self.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)

    @contextlib.asynccontextmanager
    async def _turn(self, sandbox_id: SandboxId) -> AsyncIterator[None]:
        turn = self._turns.setdefault(sandbox_id, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[sandbox_id]

    def _machine_slot(self, slot: int) -> int:
        """The same slot among those of all edges of this kernel."""
        if self._number is None:
            raise not_open()
        return self._number.first_slot + slot

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
    def _made(self) -> Machines:
        if self._machines is None:
            raise not_open()
        return self._machines
