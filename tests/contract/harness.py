"""What every contract test works with: one sandbox on one backend, driven as an edge drives it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from tests.capabilities import STATE_DIR
from tests.images import make_busybox_image, make_scratch_image

from opendsec.backends.base import Backend, Running, StartPlan
from opendsec.backends.container import ContainerBackend
from opendsec.backends.dummy import DummyBackend
from opendsec.backends.fullvm import FullVmBackend
from opendsec.backends.ground import FORWARDING, Ground
from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_shape import MIN_MEMORY_MIB
from opendsec.guest.base import Exit, Guest, Output, StartCommand, StdinTaken
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.linux.launch import GUEST_PATH
from opendsec.linux.network import SandboxNetwork
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import Image, ImageConfig
from opendsec.model.spec import BackendKind, Resources, SandboxSpec
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
from opendsec.store.programs import ENVIRONMENT
from opendsec.vm.base import Vmm, WantedVmm
from opendsec.vm.chosen import ChosenVmm
from opendsec.vm.disk_building import DiskRecipe, build_disk
from opendsec.vm.disk_kernels import disk_kernel
from opendsec.vm.qemu import QemuVmm

ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

CONTAINER_NEEDS = ("root", "native", "cgroup", "erofs", "overlay", "netns")
FULLVM_NEEDS = ("root", "native", "cgroup", "erofs", "overlay", "netns", "qemu", "diskkernel")
MICROVM_NEEDS = ("root", "native", "cgroup", "erofs", "qemu", "vmkernel", "tun", "nft")
PC_MEMORY_MIB, PC_DISK_MIB = 160, 208
"""Of full VMs: what a Debian kernel boots in, and a disk that is full soon."""
CONFIGURED: dict[str, Any] = {
    "env": {"GREETING": 'it\'s "a  b" $x \\ é', "EMPTY": ""},
    "user": "agent",
    "workdir": "/work dir",
    "files": {"/work dir/it's": b""},
}
"""An image whose defaults have blanks and quotes."""


@dataclass(slots=True)
class Result:
    """All of a command: what came out and how it ended."""

    stdout: bytes
    stderr: bytes
    exit: Exit


@dataclass(slots=True)
class Sandbox:
    """A running sandbox and the numbering of its commands."""

    backend: Backend
    plan: StartPlan
    running: Running
    last_command: int = 0

    @property
    def guest(self) -> Guest:
        return self.running.guest

    async def start(self, script: str | None = None, **fields: object) -> int:
        """Start a command; its id."""
        self.last_command += 1
        command_id = self.last_command
        fields.setdefault("env", ENV)
        await self.guest.start(command_id, StartCommand(script=script, **fields))  # type: ignore[arg-type]
        return command_id

    async def run(self, script: str | None = None, **fields: object) -> Result:
        """Run to the end."""
        return await self.finish(await self.start(script, **fields))

    async def finish(self, command_id: int, *, stdout: bytes = b"", stderr: bytes = b"") -> Result:
        """Read the rest, acknowledging as an edge does; offsets must have neither gaps nor overlaps."""
        streams = {1: bytearray(stdout), 2: bytearray(stderr)}
        async for event in self.guest.events(command_id):
            if isinstance(event, Output):
                assert event.offset == len(streams[event.stream])
                streams[event.stream] += event.data
                self.guest.ack(command_id, len(streams[1]), len(streams[2]))
            elif isinstance(event, Exit):
                self.guest.release(command_id)
                return Result(bytes(streams[1]), bytes(streams[2]), event)
            else:
                assert isinstance(event, StdinTaken)
        raise AssertionError("the events ended without an exit")

    async def wait_for(self, command_id: int, text: bytes) -> bytes:
        """Output so far, as soon as it holds `text`; stdout only."""
        seen = bytearray()
        async for event in self.guest.events(command_id):
            if isinstance(event, Output) and event.stream == 1:
                seen += event.data
            if text in seen:
                return bytes(seen)
            assert not isinstance(event, Exit), f"ended before {text!r}: {seen!r}"
        raise AssertionError("the events ended")


@dataclass(slots=True)
class Place:
    """A backend with its images, and directories for sandboxes."""

    backend: Backend
    images: Mapping[str, Image]
    state_dir: Path
    run_dir: Path
    least_memory_mb: int = 32
    """Smallest limit that is of use here."""
    least_disk_mb: int = 16
    """Smallest limit of the disk; for a full VM that is its image's disk."""
    anew: Callable[[], Backend] | None = None
    """Another backend on the same directories and groups, as a new edge process makes it."""
    store: ImageStore | None = None
    """Of a full VM's disks: what was packed of one is published there."""
    boots: Callable[[StartPlan], Awaitable[Path]] | None = None
    """Where a start means to boot: a machine like that of the plan, saved once it had booted."""
    slots: list[int] = field(default_factory=lambda: list(range(64)))

    @property
    def is_emulated(self) -> bool:
        """Where a processor may be played by a program: what is counted in hundreds elsewhere is less here."""
        return self.backend.kind in (BackendKind.MICROVM, BackendKind.FULLVM)

    def plan(
        self, image: str = "busybox", *, resources: Resources | None = None, rules: Mapping[str, bool] | None = None
    ) -> StartPlan:
        """A plan with fresh, empty directories."""
        sandbox_id = new_sandbox_id("contract")
        state, run = self.state_dir / sandbox_id, self.run_dir / sandbox_id
        for directory in (state, run):
            directory.mkdir(mode=0o700)
        spec = SandboxSpec(
            image=image,
            backend=self.backend.kind,
            resources=resources or Resources(),
            network_rules=rules or {},
        )
        slot = self.slots.pop(0)
        return StartPlan(
            sandbox_id=sandbox_id, spec=spec, image=self.images[image], state_dir=state, run_dir=run, slot=slot
        )

    @contextlib.asynccontextmanager
    async def sandbox(
        self, image: str = "busybox", *, resources: Resources | None = None, rules: Mapping[str, bool] | None = None
    ) -> AsyncIterator[Sandbox]:
        """A started sandbox, destroyed afterwards; its directories must be empty then."""
        plan = self.plan(image, resources=resources, rules=rules)
        try:
            if self.boots is not None:
                plan = replace(plan, snapshot=await self.boots(plan))
            yield Sandbox(self.backend, plan, await self.backend.start(plan))
        finally:
            await self.destroy(plan)

    async def restart(self) -> None:
        """The edge process ends and another begins: a new backend on the same directories and groups."""
        assert self.anew is not None
        await self.backend.close()
        self.backend = self.anew()
        await self.backend.open()

    async def destroy(self, plan: StartPlan) -> None:
        """Destroy by id and slot only, as after a crash; nothing may be left."""
        await self.backend.destroy(
            plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )
        left = [str(path) for directory in (plan.state_dir, plan.run_dir) for path in directory.rglob("*")]
        assert left == []
        plan.state_dir.rmdir()
        plan.run_dir.rmdir()
        self.slots.append(plan.slot)


@contextlib.asynccontextmanager
async def dummy_place() -> AsyncIterator[Place]:
    """The in-memory backend; any image is as good as any other."""
    backend = DummyBackend()
    await backend.open()
    images = {
        name: Image(name=name, digest="sha256:0", layers=(), config=ImageConfig(), created_at=0)
        for name in ("busybox", "scratch")
    }
    with tempfile.TemporaryDirectory() as work:
        state, run = Path(work) / "state", Path(work) / "run"
        state.mkdir()
        run.mkdir()
        yield Place(backend, images, state, run)
    await backend.close()


def container_backend(layers: LayerMounts, state: Path, run: Path) -> ContainerBackend:
    """A backend that disturbs no other on this machine."""
    network = SandboxNetwork(
        state_file=FORWARDING, prefix=IPv4Network("10.208.0.0/16"), links="odsc-", table="opendsec_contract"
    )
    return ContainerBackend(
        layers=layers, state_dir=state, run_dir=run, cgroup_root=f"opendsec-contract-{os.getpid()}", network=network
    )


@contextlib.asynccontextmanager
async def container_place(image: Image | None = None, store: ImageStore | None = None) -> AsyncIterator[Place]:
    """Real containers in directories and control groups of their own; with `image`, of this image in this store."""
    state = Path(tempfile.mkdtemp(prefix="opendsec-contract-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    store = store or ImageStore(state / "store")
    if image is None:
        images = {
            "busybox": make_busybox_image(store),
            "scratch": make_scratch_image(store),
            "configured": make_busybox_image(store, "configured", **CONFIGURED),
        }
    else:
        images = {image.name: image}
    layers = LayerMounts(DirectLoader(store, state / "metadata"), run / "layers")
    backend: Backend = container_backend(layers, state, run)
    try:
        await backend.open()
        for image in images.values():
            layers.acquire(image)
        (state / "sbx").mkdir(mode=0o700)
        (run / "sbx").mkdir(mode=0o700)
        anew = partial(container_backend, layers, state, run)
        place = Place(backend, images, state / "sbx", run / "sbx", anew=anew)
        yield place
        backend = place.backend
    finally:
        await backend.close()
        layers.unmount_all()
        choose_driver(find_mounts(), root=f"opendsec-contract-{os.getpid()}").remove_root()
        shutil.rmtree(state)
        shutil.rmtree(run)


def microvm_backend(layers: LayerMounts, state: Path, run: Path, *, kernels: Path = STATE_DIR) -> MicroVmBackend:
    """Of QEMU, for it runs Linux everywhere, or of the VMM OPENDSEC_TEST_VMM names; it disturbs no other backend.
    `kernels`: the state directory that has the guest kernel.
    """
    vmm: Vmm = QemuVmm(state_dir=booted_before())
    if wanted := os.environ.get("OPENDSEC_TEST_VMM"):
        vmm = ChosenVmm(state_dir=STATE_DIR, run_dir=run, wanted=WantedVmm(wanted))
    return MicroVmBackend(
        vmm=vmm,
        layers=layers,
        state_dir=state,
        run_dir=run,
        kernels=kernels,
        ground=Ground(state, cgroup_root=f"opendsec-contract-vm-{os.getpid()}"),  # its number gives names and addresses
    )


@functools.cache
def booted_before() -> Path:
    """Templates of all microVM places of this process, and what QEMU has found out: a boot is the most a test waits
    for.
    """
    path = Path(tempfile.mkdtemp(prefix="opendsec-contract-", dir="/var/lib"))
    (path / "templates").mkdir()
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@contextlib.asynccontextmanager
async def microvm_place(
    *, kernels: Path = STATE_DIR, image: Image | None = None, store: ImageStore | None = None
) -> AsyncIterator[Place]:
    """Real Linux guests in directories and control groups of their own; with `image`, of this image in this store."""
    state = Path(tempfile.mkdtemp(prefix="opendsec-contract-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    (state / "microvm").mkdir(mode=0o700)
    (state / "microvm/templates").symlink_to(booted_before() / "templates")
    store = store or ImageStore(state / "store")
    if image is None:
        images = {
            "busybox": make_busybox_image(store),
            "scratch": make_scratch_image(store),
            "configured": make_busybox_image(store, "configured", **CONFIGURED),
        }
    else:
        images = {image.name: image}
    layers = LayerMounts(DirectLoader(store, state / "metadata"), run / "layers")
    backend: Backend = microvm_backend(layers, state, run, kernels=kernels)
    try:
        await backend.open()
        for image in images.values():
            layers.acquire(image)
        for directory in (state / "sbx", run / "sbx"):
            directory.mkdir(mode=0o711)
        place = Place(backend, images, state / "sbx", run / "sbx", least_memory_mb=MIN_MEMORY_MIB)
        place.anew = partial(microvm_backend, layers, state, run, kernels=kernels)
        yield place
        backend = place.backend
    finally:
        await backend.close()
        layers.unmount_all()
        shutil.rmtree(state)
        shutil.rmtree(run)


@functools.cache
def disks() -> tuple[Path, Mapping[str, Image]]:
    """A store with a disk of each image, made once for all full VM places of this process."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-contract-", dir="/var/lib"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    (path / "saved").mkdir()
    store = ImageStore(path / "store")
    make_busybox_image(store)
    make_scratch_image(store)
    make_busybox_image(store, "configured", **CONFIGURED)
    images = {}
    with disk_kernel(STATE_DIR, environment=ENVIRONMENT, say=print) as kernel:
        for name in ("busybox", "scratch", "configured"):
            recipe = DiskRecipe(image=name, memory_mb=PC_MEMORY_MIB, size_mib=PC_DISK_MIB, modules=False)
            images[name] = build_disk(store, f"{name}-disk", recipe, kernel=kernel, agent=GUEST_PATH)
    return path, images


@contextlib.asynccontextmanager
async def fullvm_place() -> AsyncIterator[Place]:
    """Whole PCs with a Linux inside, in directories and control groups of their own."""
    made, images = disks()
    state = Path(tempfile.mkdtemp(prefix="opendsec-contract-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    store = ImageStore(made / "store")

    def anew() -> FullVmBackend:
        return FullVmBackend(
            layers=LayerMounts(DirectLoader(store, state / "metadata"), run / "layers"),
            state_dir=state,
            host_state_dir=made,
            run_dir=run,
            ground=Ground(state, cgroup_root=f"opendsec-contract-pc-{os.getpid()}"),
        )

    place = Place(anew(), images, state / "sbx", run / "sbx", anew=anew, store=store)
    place.least_memory_mb, place.least_disk_mb = PC_MEMORY_MIB, PC_DISK_MIB
    place.boots = partial(booted_pc, place, made / "saved", asyncio.Lock())
    try:
        await place.backend.open()
        for directory in (state / "sbx", run / "sbx"):
            directory.mkdir(mode=0o711)
        yield place
    finally:
        await place.backend.close()
        shutil.rmtree(state)
        shutil.rmtree(run)


async def booted_pc(place: Place, directory: Path, turn: asyncio.Lock, plan: StartPlan) -> Path:
    """One boot for each shape of machine: a boot is the most a test waits for."""
    limits = plan.spec.resources
    memory_mib, disk_mib = limits.memory_limit_mb or PC_MEMORY_MIB, limits.disk_limit_mb or PC_DISK_MIB
    saved = directory / f"{plan.image.name}-{memory_mib}-{disk_mib}"
    async with turn:
        if not saved.is_dir():
            own = place.plan(plan.spec.image, resources=limits)
            half = Path(tempfile.mkdtemp(dir=directory))
            try:
                running = await place.backend.start(own)
                await place.backend.snapshot(running.handle, half)
                half.rename(saved)
            finally:
                shutil.rmtree(half, ignore_errors=True)
                await place.destroy(own)
    return saved


PLACES = {
    BackendKind.DUMMY: dummy_place,
    BackendKind.CONTAINER: container_place,
    BackendKind.MICROVM: microvm_place,
    BackendKind.FULLVM: fullvm_place,
}
