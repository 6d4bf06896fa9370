"""Sandboxes as containers: namespaces, an overlay on the image's layers, control groups, and no daemon.

One start is: a slot's user range → upper and work directories → control groups with their limits → a listening socket
→ one request to the launcher → HELLO. Afterwards a sandbox needs nothing of this process: its agent is found again by
the socket in its run directory, its processes by its control group, and it itself by pid and start time.

    <plan.run_dir>/agent.sock     the agent's socket; nothing inside the sandbox names it
    <plan.state_dir>/upper, work  the writable layer; below <plan.state_dir>/disk when its size is limited

Refuses: snapshots, and limits this host has no controller for (they are not in `capabilities`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from opendsec.backends.base import Backend, Capability, Changes, Handle, Running, StartPlan, Usage
from opendsec.backends.container_policy import HOSTNAME, LockedPlan, Shared, host_root, launch_plan
from opendsec.backends.container_rubbish import empty
from opendsec.backends.container_templates import Templates, find_resolvers
from opendsec.backends.ground import Ground, network_of
from opendsec.errors import (
    BackendUnavailableError,
    DiskFullError,
    HostCapabilityError,
    InvalidSpecError,
    NodeError,
    SandboxLostError,
    StartError,
    UnsupportedError,
)
from opendsec.guest.base import Guest, GuestLostError
from opendsec.guest.channel import connect
from opendsec.linux import process
from opendsec.linux.boot import boot_id
from opendsec.linux.cgroup import CgroupDriver, CgroupLimits
from opendsec.linux.cgroup_files import GroupFiles
from opendsec.linux.disk import MOUNT, make_disk, remove_disk
from opendsec.linux.launch import Launched, Launcher, LaunchError, install_guest
from opendsec.linux.network import SandboxNetwork
from opendsec.linux.node_number import NodeNumber
from opendsec.linux.probe import CONTAINER_NEEDS, Remembered
from opendsec.linux.process import ProcessIdentity
from opendsec.linux.slots import SLOTS
from opendsec.linux.sockets import listening
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind, Resources, SandboxSpec
from opendsec.store.mounts import LayerMounts

MIB = 1024 * 1024
HELLO_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 10.0
ENDING_TIMEOUT_S = 1.0
SOCKET_NAME = "agent.sock"
UPPER = "upper"
MAX_SOCKET_PATH = 107
"""unix(7)"""
BACKLOG = 16
FULL_BELOW_BYTES = 1024 * 1024
"""A file system keeps some blocks back: ext4 refuses a large write with 650 to 850 KiB free."""
_ALWAYS = (
    Capability.EXEC,
    Capability.SESSIONS,
    Capability.PTY,
    Capability.FILES,
    Capability.PAUSE,
    Capability.PACK,
    Capability.RECOVER,
    Capability.PORTS,
)
_LIMITS = {
    "memory": Capability.MEMORY_LIMIT,
    "pids": Capability.PIDS_LIMIT,
    "cpu": Capability.CPU_LIMIT,
}


class ContainerBackend(Backend):
    """`layers` mounts images; `state_dir` and `run_dir` are this edge's own, beside the directories of each start.

    Edges that share a kernel each claim a number (`linux.node_number`): user ids, addresses, link names and control
    groups follow from it. `cgroup_root` names another top directory for the control groups, `network` another network,
    `ground` what it shares with other backends of the same edge.
    """

    kind = BackendKind.CONTAINER
    offers = frozenset({*_ALWAYS, *_LIMITS.values(), Capability.NETWORK, Capability.DISK_LIMIT})

    def __init__(
        self,
        *,
        layers: LayerMounts,
        state_dir: Path,
        run_dir: Path,
        cgroup_root: str | None = None,
        network: SandboxNetwork | None = None,
        ground: Ground | None = None,
    ) -> None:
        self._layers = layers
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._ground = ground or Ground(state_dir, cgroup_root=cgroup_root)
        self._templates = Templates(run_dir / "templates", hostname=HOSTNAME)
        self._launcher = Launcher()
        self._given_network = network
        self._network = network
        self._number: NodeNumber | None = None
        self._may_network = False
        self._may_limit_disk = False
        self._driver: CgroupDriver | None = None
        self._shared: Shared | None = None
        self._guests: dict[SandboxId, Guest] = {}
        self._still: dict[SandboxId, asyncio.Lock] = {}
        """Held while somebody relies on a sandbox's processes running or standing still."""
        self._reasons: list[str] = []
        self._boot_id = ""

    @property
    def capabilities(self) -> frozenset[Capability]:
        if self._driver is None:
            return frozenset()
        found = {*_ALWAYS, *(_LIMITS[name] for name in self._driver.limits)}
        if self._may_network:
            found.add(Capability.NETWORK)
        if self._may_limit_disk:
            found.add(Capability.DISK_LIMIT)
        return frozenset(found)

    async def open(self) -> None:
        self._reasons.clear()
        probes = Remembered(self._run_dir / "probed", state_dir=self._state_dir)
        for name in CONTAINER_NEEDS:
            answer = await asyncio.to_thread(probes.probe, name)
            if not answer.ok:
                raise HostCapabilityError(answer.sentence, detail={"probe": answer.name}, remedy=answer.remedy)
        self._may_network = await self._can(probes, "network", "veth", "nft", "forwarding")
        self._may_limit_disk = await self._can(probes, "disk limits", "loop", "mkfs.ext4")
        self._boot_id = boot_id()
        resolvers, refused = find_resolvers()
        if refused:
            self._reasons.append(f"name servers that sandboxes cannot reach are left out: {', '.join(refused)}")
        try:
            self._number, self._driver = await self._ground.enter()
            self._network = self._given_network or network_of(self._number)
            self._templates.open(resolvers=resolvers)
            guest = os.open(install_guest(self._state_dir), os.O_PATH | os.O_CLOEXEC)
            self._shared = Shared(dev=self._templates.dev, sys=self._templates.sys, guest=guest)
            await self._launcher.start()
        except OSError as error:
            await self.close()
            raise HostCapabilityError(
                f"the container backend cannot be prepared: {error}", detail={"probe": "prepare"}
            ) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._shared is not None:
            os.close(self._shared.guest)
            self._shared = None
        await self._launcher.close()
        if self._may_network and self._network is not None:
            await self._network.close()
        self._templates.close()
        self._let_go()

    def _let_go(self) -> None:
        """Control groups and the claim stay while a sandbox lives on."""
        if self._driver is not None:
            self._ground.leave(self._driver)
        self._driver = self._number = None

    def host_root(self, slot: int) -> int:
        """The host's user id of root in the sandbox of that slot."""
        return host_root(self._machine_slot(slot))

    def _machine_slot(self, slot: int) -> int:
        """The same slot among those of all edges of this kernel."""
        if self._number is None:
            raise BackendUnavailableError("the container backend is not open")
        return self._number.first_slot + slot

    async def _can(self, probes: Remembered, feature: str, *names: str) -> bool:
        """Whether all probes say so; the first that does not goes to the report."""
        for name in names:
            answer = await asyncio.to_thread(probes.probe, name)
            if not answer.ok:
                self._reasons.append(f"no {feature}: {answer.sentence}")
                return False
        return True

    def report(self) -> BackendReport:
        names = tuple(sorted(capability.value for capability in self.capabilities))
        available = self._shared is not None
        return BackendReport(
            available=available, reasons=tuple(self._reasons), capabilities=names, live=len(self._guests)
        )

    async def start(self, plan: StartPlan) -> Running:
        self._check(plan)
        try:
            launched = await self._launch(plan)
            try:
                handle = self._handle(plan, launched)
                if _is_online(plan.spec):
                    await self._networks.attach(plan.slot, launched.pidfd)
            finally:
                os.close(launched.pidfd)
            guest = await connect(plan.run_dir / SOCKET_NAME, timeout_s=HELLO_TIMEOUT_S)
        except (GuestLostError, OSError, ValueError) as error:
            await self.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)
            raise _start_error(error, plan.sandbox_id) from error
        self._guests[plan.sandbox_id] = guest
        return Running(handle=handle, guest=guest)

    async def recover(self, handle: Handle) -> Running | None:
        guest = await self.reconnect(handle)
        return None if guest is None else Running(handle=handle, guest=guest)

    async def reconnect(self, handle: Handle) -> Guest | None:
        """Raises GuestLostError when it lives but does not answer within 30 s: try again, or stop it."""
        pidfd = self._open_process(handle)
        if pidfd is None:
            self._guests.pop(handle.sandbox_id, None)
            return None
        try:
            async with self._awake(handle):
                guest = await connect(str(handle.data["socket"]), timeout_s=HELLO_TIMEOUT_S)
        except GuestLostError:
            if await process.ends_soon(pidfd, within_s=ENDING_TIMEOUT_S):
                return None
            raise
        finally:
            os.close(pidfd)
        self._guests[handle.sandbox_id] = guest
        return guest

    async def pause(self, handle: Handle) -> None:
        async with self._turn(handle):
            with self._lost_when_gone(handle):
                await self._groups.freeze(handle.sandbox_id)

    async def resume(self, handle: Handle) -> None:
        async with self._turn(handle):
            with self._lost_when_gone(handle):
                await self._groups.thaw(handle.sandbox_id)

    @contextlib.asynccontextmanager
    async def changes(self, handle: Handle, *, image: Image) -> AsyncIterator[Changes]:
        """Nothing is synced: files are read through the same page cache the sandbox writes to."""
        lower = await self._layers.acquire_soon(image)
        async with self._turn(handle):
            paused = self._groups.is_frozen(handle.sandbox_id)
            try:
                with self._lost_when_gone(handle):
                    await self._groups.freeze(handle.sandbox_id)
                yield Changes(tree=Path(str(handle.data["disk"])) / UPPER, lower=lower)
            finally:
                if not paused:
                    with contextlib.suppress(FileNotFoundError):
                        await self._groups.thaw(handle.sandbox_id)

    async def snapshot(self, handle: Handle, target: Path) -> None:
        raise UnsupportedError("the container backend has no snapshots yet", sandbox_id=handle.sandbox_id)

    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        pidfd = self._open_process(handle)
        if pidfd is None:
            return
        try:
            if grace_s > 0:
                await self._shut_down(handle, pidfd, grace_s)
            self._groups.kill(handle.sandbox_id)
            process.send_signal(pidfd)
            await process.wait_ended(pidfd, timeout_s=GONE_TIMEOUT_S)
        except TimeoutError as error:
            raise BackendUnavailableError(
                f"processes of the sandbox did not end within {GONE_TIMEOUT_S:g} s of SIGKILL",
                sandbox_id=handle.sandbox_id,
            ) from error
        finally:
            os.close(pidfd)
            self._guests.pop(handle.sandbox_id, None)

    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        guest = self._guests.pop(sandbox_id, None)
        self._still.pop(sandbox_id, None)
        self._groups.kill(sandbox_id)
        if guest is not None:
            await guest.aclose()
        try:
            await self._groups.wait_empty(sandbox_id, timeout_s=GONE_TIMEOUT_S)
            if self._may_network and self._networks.may_be_attached(slot):
                await asyncio.to_thread(self._networks.detach, slot)
            remove_disk(state_dir)
            await asyncio.to_thread(empty, run_dir, state_dir)
            await self._groups.remove(sandbox_id, timeout_s=GONE_TIMEOUT_S)
        except TimeoutError as error:
            raise NodeError(f"the sandbox is not gone: {error}", sandbox_id=sandbox_id) from error

    def usage(self, handle: Handle) -> Usage:
        counters = self._groups.usage(handle.sandbox_id)
        return Usage(
            memory_bytes=counters.memory_bytes,
            oom_kills=counters.oom_kills,
            pids_denied=counters.pids_denied,
            cpu_s=counters.cpu_s,
            disk_full=_is_full(str(handle.data["disk"])),
        )

    def group_files(self, sandbox_id: SandboxId) -> GroupFiles:
        """Its control groups, for whoever watches it closely; the caller closes them. FileNotFoundError: it is gone."""
        return self._groups.open_group(sandbox_id)

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check(self, plan: StartPlan) -> None:
        if not 0 <= plan.slot < SLOTS:
            raise InvalidSpecError(f"slot {plan.slot} is not between 0 and {SLOTS - 1}", detail={"field": "slot"})
        if len(os.fsencode(plan.run_dir / SOCKET_NAME)) > MAX_SOCKET_PATH:
            raise HostCapabilityError(
                f"{plan.run_dir}/{SOCKET_NAME} is longer than a socket's path can be ({MAX_SOCKET_PATH} bytes)",
                detail={"probe": "run_dir"},
                remedy="use a shorter OPENDSEC_RUN_DIR",
            )

        if _is_online(plan.spec):
            self._check_network(plan)

    def _check_network(self, plan: StartPlan) -> None:
        if not self._may_network:
            raise UnsupportedError(
                "network_rules: this node cannot give sandboxes a network",
                detail={"field": "network_rules"},
                remedy="; ".join(self._reasons),
            )
        try:
            self._networks.addresses(plan.slot)
        except ValueError as error:
            raise StartError(f"no address is left for this sandbox: {error}", sandbox_id=plan.sandbox_id) from error

    async def _launch(self, plan: StartPlan) -> Launched:
        if self._shared is None:
            raise BackendUnavailableError("the container backend is not open")
        layers = await self._layers.acquire_soon(plan.image)
        lower = (self._templates.layer(online=_is_online(plan.spec)), *layers)
        upper, work = await self._writable(plan)
        limits = _limits(plan.spec.resources)
        with (
            listening(plan.run_dir / SOCKET_NAME, backlog=BACKLOG) as listen,
            self._groups.create(plan.sandbox_id, limits, owner=self.host_root(plan.slot)) as leaf,
        ):
            return await self._launcher.launch(
                launch_plan(
                    slot=self._machine_slot(plan.slot),
                    lower=lower,
                    upper=upper,
                    work=work,
                    cgroup2=leaf.cgroup2,
                    cgroup1=leaf.procs,
                    listen=listen,
                    shared=self._shared,
                    lock=plan.lock if isinstance(plan, LockedPlan) else None,
                )
            )

    async def _writable(self, plan: StartPlan) -> tuple[Path, Path]:
        """Upper and work directories: on the state file system, or on a disk of their own when it is limited."""
        base = plan.state_dir
        if plan.spec.resources.disk_limit_mb is not None:
            base = await make_disk(base, size_bytes=plan.spec.resources.disk_limit_mb * MIB)
        upper, work = base / UPPER, base / "work"
        for directory in (upper, work):
            directory.mkdir(mode=0o755)
        return upper, work

    def _handle(self, plan: StartPlan, launched: Launched) -> Handle:
        identity = process.identify(launched.pid)
        if identity is None or process.has_ended(launched.pidfd):
            raise GuestLostError("the guest agent ended at once")
        return Handle(
            backend=self.kind,
            sandbox_id=plan.sandbox_id,
            data={
                "pid": identity.pid,
                "start_ticks": identity.start_ticks,
                "boot_id": self._boot_id,
                "socket": str(plan.run_dir / SOCKET_NAME),
                "disk": str(_disk_of(plan)),
            },
        )

    # ── later ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _groups(self) -> CgroupDriver:
        if self._driver is None:
            raise BackendUnavailableError("the container backend is not open")
        return self._driver

    @property
    def _networks(self) -> SandboxNetwork:
        if self._network is None:
            raise BackendUnavailableError("the container backend is not open")
        return self._network

    def _open_process(self, handle: Handle) -> int | None:
        """A pidfd of its pid 1. None: it has ended, or the machine was started again since."""
        data = handle.data
        if data["boot_id"] != self._boot_id:
            return None
        return process.open_process(ProcessIdentity(int(data["pid"]), int(data["start_ticks"])))

    @contextlib.contextmanager
    def _lost_when_gone(self, handle: Handle) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise SandboxLostError("the sandbox's processes are gone", sandbox_id=handle.sandbox_id) from error
        except TimeoutError as error:
            raise BackendUnavailableError(str(error), sandbox_id=handle.sandbox_id) from error

    def _turn(self, handle: Handle) -> asyncio.Lock:
        return self._still.setdefault(handle.sandbox_id, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def _awake(self, handle: Handle) -> AsyncIterator[None]:
        """A frozen agent cannot greet: thaw a paused sandbox for these milliseconds."""
        async with self._turn(handle):
            frozen = self._groups.is_frozen(handle.sandbox_id)
            if frozen:
                await self._groups.thaw(handle.sandbox_id)
            try:
                yield
            finally:
                if frozen:
                    with contextlib.suppress(FileNotFoundError):
                        await self._groups.freeze(handle.sandbox_id)

    async def _shut_down(self, handle: Handle, pidfd: int, grace_s: float) -> None:
        """Ask, and wait as long as asked; whether it worked is for the caller to look at."""
        with contextlib.suppress(GuestLostError, TimeoutError, FileNotFoundError):
            if self._groups.is_frozen(handle.sandbox_id):
                await self._groups.thaw(handle.sandbox_id)
            guest = self._guests.get(handle.sandbox_id)
            if guest is None or guest.closed:
                guest = await connect(str(handle.data["socket"]), timeout_s=grace_s)
            await guest.shutdown(round(grace_s * 1000))
            await process.wait_ended(pidfd, timeout_s=grace_s + 1)


# ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _disk_of(plan: StartPlan) -> Path:
    """A path on the file system the sandbox writes to."""
    return plan.state_dir / MOUNT if plan.spec.resources.disk_limit_mb is not None else plan.state_dir


def _is_online(spec: SandboxSpec) -> bool:
    return spec.network_rules.get("*", False)


def _limits(resources: Resources) -> CgroupLimits:
    return CgroupLimits(
        memory_bytes=None if resources.memory_limit_mb is None else resources.memory_limit_mb * MIB,
        pids=resources.pids_limit,
        cpu_cores=resources.cpu_cores_limit,
    )


def _start_error(error: OSError | GuestLostError | ValueError, sandbox_id: SandboxId) -> Exception:
    if isinstance(error, LaunchError):
        return StartError(str(error), detail={"step": error.step, "errno": error.errno or 0}, sandbox_id=sandbox_id)
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFullError(f"no room to start a sandbox: {error}", sandbox_id=sandbox_id)
        return StartError(f"the sandbox could not be prepared: {error}", sandbox_id=sandbox_id)
    if isinstance(error, ValueError):
        return StartError(f"the sandbox cannot be launched: {error}", retryable=False, sandbox_id=sandbox_id)
    return StartError(f"the sandbox's guest agent did not answer: {error}", sandbox_id=sandbox_id)


def _is_full(path: str) -> bool | None:
    try:
        found = os.statvfs(path)
    except FileNotFoundError:
        return None
    no_inodes = found.f_files > 0 and found.f_favail == 0
    return no_inodes or found.f_bavail * found.f_frsize < FULL_BELOW_BYTES
