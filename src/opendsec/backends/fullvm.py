"""Sandboxes as whole PCs: any operating system from an image that is a disk, with a screen, input and a serial line.

One start is: the image's files (layers of the store, never written) → an overlay of the sandbox's own → control groups
→ a room without rights → QEMU, standing still → a network for the room → the serial line is recorded → it runs. With
our agent inside it is ready when that has answered; without, when it runs. Afterwards it needs nothing of this process:
it is found again by pid and start time and by the sockets of its run directory.

    <plan.run_dir>/…     sockets and the room (`opendsec.vm.q35`)
    <plan.state_dir>/…   overlay, what UEFI remembers, TPM, what the serial line said

Its network is the container backend's, with QEMU's own user-mode network between: the guest gets an address by DHCP and
reaches what the room may reach. Refuses by name what a foreign operating system cannot be held to: a limit of
processes, and users, environment and directories where no agent is inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from opendsec.backends.base import Backend, Capability, DiskChanges, Handle, Running, StartPlan, Usage
from opendsec.backends.console import Console
from opendsec.backends.container_policy import host_root
from opendsec.backends.container_rubbish import empty
from opendsec.backends.container_templates import find_resolvers
from opendsec.backends.fullvm_console import MachineConsole
from opendsec.backends.fullvm_guest import NO_AGENT, REMEDY
from opendsec.backends.fullvm_live import Live
from opendsec.backends.fullvm_meeting import ENDED, once
from opendsec.backends.fullvm_renewal import renew
from opendsec.backends.fullvm_shape import encode_layers, layers_in, machine_of, shape_in, shape_of
from opendsec.backends.fullvm_stillness import quiet
from opendsec.backends.ground import Ground, network_of
from opendsec.backends.turns import Turns
from opendsec.errors import (
    BackendUnavailableError,
    HostCapabilityError,
    NodeError,
    OpenDSecError,
    SandboxLostError,
    StartError,
)
from opendsec.guest.base import Guest, GuestGoneError, GuestLostError
from opendsec.linux.boot import boot_id
from opendsec.linux.cgroup import CgroupDriver, CgroupLimits, put_into
from opendsec.linux.network import SandboxNetwork, raise_loopback
from opendsec.linux.node_number import NodeNumber
from opendsec.linux.probe import Remembered
from opendsec.linux.process import ProcessIdentity, identify
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image, ImageConfig
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind
from opendsec.store.disk_changes import Written
from opendsec.store.durable import disk_full_named
from opendsec.store.mounts import LayerMounts
from opendsec.vm.q35 import OVERLAY, Q35, Places, Q35Machine
from opendsec.vm.q35_line import Q35Spec, memory_limit_mib, size_of_disk
from opendsec.vm.q35_room import Entered
from opendsec.vm.q35_saved import check_saved, describe, read_saved, write_saved

MIB = 1024 * 1024
GONE_TIMEOUT_S = 20.0
OFF_S = 1.0
"""For a machine to switch itself off once its programs had their grace."""
THREADS = 512
"""Threads of one QEMU at most."""
_ALWAYS = (
    Capability.PAUSE,
    Capability.PACK,
    Capability.SNAPSHOT,
    Capability.DISK_LIMIT,
    Capability.RECOVER,
    Capability.PORTS,
    Capability.SCREEN,
    Capability.INPUT,
    Capability.SERIAL,
)
_OF_AGENT = (Capability.EXEC, Capability.SESSIONS, Capability.PTY, Capability.FILES, Capability.CLIPBOARD)
_LIMITS = {"memory": Capability.MEMORY_LIMIT, "cpu": Capability.CPU_LIMIT}


class FullVmBackend(Backend):
    """`layers` knows where images' files are; `state_dir` and `run_dir` are this edge's own; `host_state_dir` is the
    platform's on this host."""

    kind = BackendKind.FULLVM
    opens_at_leisure = True
    offers = frozenset({*_ALWAYS, *_OF_AGENT, *_LIMITS.values(), Capability.NETWORK})

    def __init__(
        self, *, layers: LayerMounts, state_dir: Path, host_state_dir: Path, run_dir: Path, ground: Ground
    ) -> None:
        self._layers = layers
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._ground = ground
        self._qemu = Q35(state_dir=host_state_dir)
        self._number: NodeNumber | None = None
        self._driver: CgroupDriver | None = None
        self._network: SandboxNetwork | None = None
        self._may_network = False
        self._resolvers = b""
        self._boot_id = ""
        self._reasons: list[str] = []
        self._live: dict[SandboxId, Live] = {}
        self._finding = Turns()

    @property
    def capabilities(self) -> frozenset[Capability]:
        if self._driver is None:
            return frozenset()
        found = {*_ALWAYS, *_OF_AGENT, *(_LIMITS[name] for name in self._driver.limits if name in _LIMITS)}
        return frozenset({*found, Capability.NETWORK} if self._may_network else found)

    async def open(self) -> None:
        self._reasons.clear()
        await self._qemu.open()
        probes = Remembered(self._run_dir / "probed", state_dir=self._state_dir)
        self._may_network = True
        for name in ("root", "netns", "veth", "nft", "forwarding"):
            answer = await asyncio.to_thread(probes.probe, name)
            if not answer.ok and name in ("root", "netns"):
                raise HostCapabilityError(answer.sentence, detail={"probe": answer.name}, remedy=answer.remedy)
            if not answer.ok and self._may_network:
                self._may_network = False
                self._reasons.append(f"no network: {answer.sentence}")
        self._boot_id = boot_id()
        servers, _ = find_resolvers()
        self._resolvers = "".join(f"nameserver {server}\n" for server in servers).encode("ascii")
        try:
            self._number, self._driver = await self._ground.enter()
        except OSError as error:
            raise HostCapabilityError(
                f"the full VM backend cannot be prepared: {error}", detail={"probe": "prepare"}
            ) from error
        self._network = network_of(self._number)

    async def close(self) -> None:
        while self._live:  # a start or a stop may end meanwhile
            _, live = self._live.popitem()
            live.console.close()
            if live.guest is not None:
                await live.guest.aclose()
            live.machine.release()
        if self._may_network and self._network is not None:
            await self._network.close()
        if self._driver is not None:
            self._ground.leave(self._driver)
        self._driver = self._number = self._network = None

    def report(self) -> BackendReport:
        binding = self._qemu.binding
        return BackendReport(
            available=self._driver is not None,
            reasons=tuple(self._reasons),
            capabilities=tuple(sorted(capability.value for capability in self.capabilities)),
            live=len(self._live),
            degraded=(self._qemu.degraded,) if self._qemu.degraded else (),
            binding=f"{binding.vmm} {binding.version} {binding.accelerator.value} {binding.cpu_model}",
        )

    def lacks(self, config: ImageConfig) -> Mapping[Capability, str]:
        if config.machine is not None and config.machine.agent:
            return {}
        return dict.fromkeys(_OF_AGENT, f"{NO_AGENT}; {REMEDY}")

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, plan: StartPlan) -> Running:
        machine = machine_of(plan)
        saved = None if plan.snapshot is None else await asyncio.to_thread(read_saved, plan.snapshot)
        spec = shape_of(plan, machine, saved, self._qemu.binding.accelerator)
        if saved is not None:
            check_saved(saved, self._qemu.binding, spec)
        try:
            live = await self._started(plan, spec)
            try:
                handle = self._handle(plan, spec, live)
                self._live[plan.sandbox_id] = live
                await live.machine.resume()
                guest = await live.met(Path(str(handle.data["run"])))
                if guest.is_machine or (saved is not None and live.agent):
                    await renew(guest, is_new=saved is not None)
            except BaseException:
                self._live.pop(plan.sandbox_id, None)
                live.console.close()
                await live.machine.kill()
                raise
        except (GuestLostError, OSError, ValueError, OpenDSecError) as error:
            await self.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)
            if isinstance(error, OpenDSecError):
                raise
            raise StartError(f"the machine could not be started: {error}", sandbox_id=plan.sandbox_id) from error
        return Running(handle=handle, guest=guest)

    async def _started(self, plan: StartPlan, spec: Q35Spec) -> Live:
        """A machine that stands still, in its groups, with its network, and its serial line recorded."""
        disks = await asyncio.to_thread(self._layers.disk_files, plan.image)
        places = Places(
            directory=plan.run_dir,
            state=plan.state_dir,
            disks=disks,
            resolvers=self._resolvers,
            host_id=host_root(self._machine_slot(plan.slot)),
            saved=plan.snapshot,
        )
        limits = CgroupLimits(
            memory_bytes=memory_limit_mib(spec) * MIB, pids=THREADS, cpu_cores=plan.spec.resources.cpu_cores_limit
        )
        with self._groups.create(plan.sandbox_id, limits, owner=0) as leaf:

            async def admit(entered: Entered) -> None:
                procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=leaf.cgroup2)
                try:
                    await put_into((procs, *leaf.procs), entered.pid)
                finally:
                    os.close(procs)

            machine = await self._qemu.start(spec, places, admit=admit)
        try:
            await asyncio.to_thread(raise_loopback, machine.pidfd)
            if plan.spec.network_rules.get("*", False):
                await self._networks.attach(plan.slot, machine.pidfd)
            console = await MachineConsole.connect(machine, plan.state_dir)
        except BaseException:
            await machine.kill()
            raise
        return Live(machine=machine, console=console, agent=spec.machine.agent)

    def _handle(self, plan: StartPlan, spec: Q35Spec, live: Live) -> Handle:
        identity = identify(live.machine.pid)
        if identity is None:
            raise SandboxLostError("QEMU ended at once", sandbox_id=plan.sandbox_id)
        return Handle(
            backend=self.kind,
            sandbox_id=plan.sandbox_id,
            data={
                "pid": identity.pid,
                "start_ticks": identity.start_ticks,
                "boot_id": self._boot_id,
                "run": str(plan.run_dir),
                "state": str(plan.state_dir),
                "spec": msgspec.json.encode(spec).decode("ascii"),
                "layers": encode_layers(plan.image.layers),
            },
        )

    # ── later ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def recover(self, handle: Handle) -> Running | None:
        """A new edge asks for many, and asks again: a hung agent holds up none of the others."""
        live = await self._found(handle)
        if live is None:
            return None
        async with live.awake():
            return Running(handle=handle, guest=await once(live.met(Path(str(handle.data["run"])))))

    async def reconnect(self, handle: Handle) -> Guest:
        """Raises GuestGoneError with what is gone; NodeError. An agent nobody can see is waited for as long as a whole
        system may take to boot: it may have restarted."""
        live = await self._found(handle)
        if live is None:
            raise GuestGoneError(ENDED)
        async with live.machine.turn(timeout_s=None):
            pass  # one that is saved or packed cannot answer
        return await live.met(Path(str(handle.data["run"])))

    async def pause(self, handle: Handle) -> None:
        live = await self._required(handle)
        async with live.machine.turn():
            await live.machine.pause()

    async def resume(self, handle: Handle) -> None:
        live = await self._required(handle)
        async with live.machine.turn(timeout_s=None):  # one that cannot be resumed is taken for lost
            paused = await live.machine.is_paused()
            await live.machine.resume()
        if paused:
            await live.set_clock()

    async def snapshot(self, handle: Handle, target: Path) -> None:
        live = await self._required(handle)
        async with live.machine.turn():
            await live.machine.save(target, Path(str(handle.data["state"])))
            saved = describe(self._qemu.binding, shape_in(handle), target)
            with disk_full_named(target):
                write_saved(target, saved)
        await live.set_clock()

    @contextlib.asynccontextmanager
    async def changes(self, handle: Handle, *, image: Image) -> AsyncIterator[DiskChanges]:
        """Of the disk. With an agent inside, and awake, its file systems are made whole first."""
        live = await self._required(handle)
        written = Written(
            overlay=Path(str(handle.data["state"])) / OVERLAY,
            size_bytes=size_of_disk(shape_in(handle)),
            layers=image.layers,
            files=await asyncio.to_thread(self._layers.disk_files, image),
        )
        async with live.machine.turn(), contextlib.AsyncExitStack() as stack:
            whole = False
            if live.agent and live.guest is not None and not await live.machine.is_paused():
                whole = await stack.enter_async_context(quiet(live.guest))
            async with live.machine.still():
                yield DiskChanges(written=written, whole=whole)
        await live.set_clock()

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        live = await self._found(handle)
        if live is None:
            return
        if grace_s > 0:
            with contextlib.suppress(TimeoutError, NodeError, SandboxLostError, GuestLostError):
                async with asyncio.timeout(grace_s + OFF_S):
                    await live.switch_off(grace_s)
                    await live.machine.wait_ended()
        self._groups.kill(handle.sandbox_id)
        await self._forget(handle.sandbox_id)

    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        self._groups.kill(sandbox_id)
        async with self._finding.of(sandbox_id):
            await self._forget(sandbox_id)
        try:
            await self._groups.wait_empty(sandbox_id, timeout_s=GONE_TIMEOUT_S)
            if self._may_network and self._networks.may_be_attached(slot):
                await asyncio.to_thread(self._networks.detach, slot)
            await asyncio.to_thread(empty, run_dir, state_dir)
            await self._groups.remove(sandbox_id, timeout_s=GONE_TIMEOUT_S)
        except TimeoutError as error:
            raise NodeError(f"the sandbox is not gone: {error}", sandbox_id=sandbox_id) from error

    async def _forget(self, sandbox_id: SandboxId) -> None:
        live = self._live.pop(sandbox_id, None)
        if live is not None:
            live.console.close()
            if live.guest is not None:
                await live.guest.aclose()
            await live.machine.kill()

    def usage(self, handle: Handle) -> Usage:
        counters = self._groups.usage(handle.sandbox_id)
        live = self._live.get(handle.sandbox_id)
        inside = None if live is None or live.guest is None else live.guest.usage
        kills = counters.oom_kills if inside is None else inside.oom_kills + (counters.oom_kills or 0)
        return Usage(
            memory_bytes=counters.memory_bytes,
            oom_kills=kills,
            cpu_s=counters.cpu_s,
            pids_denied=None if inside is None else inside.pids_denied,
            disk_full=None if inside is None else inside.disk_full,
        )

    def console(self, handle: Handle) -> Console:
        live = self._live.get(handle.sandbox_id)
        if live is None:
            raise SandboxLostError("the machine is gone", sandbox_id=handle.sandbox_id)
        return live.console

    # ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _groups(self) -> CgroupDriver:
        if self._driver is None:
            raise BackendUnavailableError("the full VM backend is not open")
        return self._driver

    @property
    def _networks(self) -> SandboxNetwork:
        if self._network is None:
            raise BackendUnavailableError("the full VM backend is not open")
        return self._network

    def _machine_slot(self, slot: int) -> int:
        if self._number is None:
            raise BackendUnavailableError("the full VM backend is not open")
        return self._number.first_slot + slot

    async def _found(self, handle: Handle) -> Live | None:
        """The machine, also one an earlier process started. None: it is gone."""
        async with self._finding.of(handle.sandbox_id):
            return await self._found_alone(handle)

    async def _found_alone(self, handle: Handle) -> Live | None:
        live = self._live.get(handle.sandbox_id)
        data = handle.data
        if live is None and data["boot_id"] == self._boot_id:
            identity = ProcessIdentity(int(data["pid"]), int(data["start_ticks"]))
            machine = self._qemu.find(identity, Path(str(data["run"])))
            if machine is not None:
                live = self._live[handle.sandbox_id] = await self._taken_over(handle, machine)
        if live is not None and live.machine.has_ended():
            await self._forget(handle.sandbox_id)
            return None
        return live

    async def _taken_over(self, handle: Handle, machine: Q35Machine) -> Live:
        try:
            await asyncio.to_thread(self._layers.hold, layers_in(handle))
            console = await MachineConsole.connect(machine, Path(str(handle.data["state"])))
        except BaseException:
            machine.release()
            raise
        return Live(machine=machine, console=console, agent=shape_in(handle).machine.agent)

    async def _required(self, handle: Handle) -> Live:
        live = await self._found(handle)
        if live is None:
            raise SandboxLostError("the machine is gone", sandbox_id=handle.sandbox_id)
        return live
