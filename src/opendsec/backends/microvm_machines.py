"""How machines of this node come to be: from the guest kernel and the agent to a template, and from that to copies.

A template is booted in a control group and a run directory of its own, told its root (SETUP), warmed by one command,
and saved once its agent has seen the connection end. Names and addresses in it are nobody's: RENEW gives each copy its
own before it is handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from opendsec.backends.microvm_disk import make_ext4
from opendsec.backends.microvm_files import link_files
from opendsec.backends.microvm_layers import PACKED_FILE, LayerDisks, LayerDrives, layer_drives
from opendsec.backends.microvm_shape import MIB, OVERHEAD_MIB, Boot, Shape, identity, machine, setup, template_key
from opendsec.backends.microvm_templates import MACHINE, Templates
from opendsec.errors import SandboxLostError, StartError
from opendsec.guest.base import Exit, Guest, GuestError, GuestLostError, StartCommand
from opendsec.linux.cgroup import CgroupDriver, CgroupLimits
from opendsec.linux.launch import GUEST_PATH
from opendsec.linux.network import SandboxNetwork
from opendsec.model.image import Image
from opendsec.store.durable import remove_tree
from opendsec.store.loading.base import LayerFiles
from opendsec.store.sparse import copy_sparse
from opendsec.vm.base import Place, Vm, Vmm
from opendsec.vm.initrd import write_initrd
from opendsec.vm.kernels import find_kernel

GROUP = "template-"
"""How control groups of machines that are being made begin."""
BOOT_TIMEOUT_S = 120.0
"""Emulated, on a busy host, a boot takes 20 s."""
SETTLE_S = 0.1
"""Until the agent has seen the end of its connection."""
MAX_RESTORES = 4
"""At once; more only wait for each other's processors."""
_CONSOLE_TAIL = 2000


class Machines:
    """Made by `open`; `boot` is what they boot from."""

    boot: Boot

    def __init__(self, vmm: Vmm, *, state_dir: Path, run_dir: Path, kernels: Path) -> None:
        self._vmm = vmm
        self._state_dir = state_dir / "microvm"
        self._run_dir = run_dir / "microvm"
        self._kernels = kernels
        self._templates = Templates(self._state_dir / "templates")
        self._disks = LayerDisks(self._state_dir / "layers")
        self._restoring = asyncio.Semaphore(MAX_RESTORES)
        self._groups: CgroupDriver | None = None
        self._network: SandboxNetwork | None = None
        self._host_ids: Iterator[int] = iter(())

    async def open(self, groups: CgroupDriver, network: SandboxNetwork, *, host_ids: range) -> None:
        """Find the kernel, make the initrd, remove what an earlier process was making. `host_ids`: users of the VMMs of
        templates, one each. Raises HostCapabilityError, OSError.
        """
        self._groups, self._network, self._host_ids = groups, network, in_turn(host_ids)
        kernel = await asyncio.to_thread(find_kernel, self._kernels)
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        initrd = await asyncio.to_thread(write_initrd, self._state_dir, agent=GUEST_PATH, modules=kernel.modules)
        self.boot = Boot(
            kernel=kernel.vmlinux,
            kernel_digest=kernel.facts.sha256,
            initrd=initrd,
            command_line=self._vmm.command_line(),
            acpi=not kernel.facts.command_line_devices,
        )
        for name, group_class in groups.names():
            if name.startswith(GROUP):
                groups.kill(name, group_class=group_class)
                await groups.remove(name, group_class=group_class)
        await asyncio.to_thread(shutil.rmtree, self._run_dir, ignore_errors=True)
        self._run_dir.mkdir(mode=0o711)
        await asyncio.to_thread(self._templates.open)
        await asyncio.to_thread(self._disks.open)

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, image: Image, shape: Shape, layers: Sequence[LayerFiles], base: Path) -> None:
        """Link a template's files into `base`, an empty directory, and copy its disks beside it.

        Raises StartError, DiskFullError, OSError.
        """
        key = template_key(image, shape, self.boot, self._vmm.binding)

        async def make(work: Path) -> None:
            await self._make(work, image, shape, layers)

        while True:
            template = await self._templates.get(key, make)
            try:
                await asyncio.to_thread(_take, template, base, shape.disks)
            except FileNotFoundError:  # evicted meanwhile; or it is there, and a file of it was removed
                await asyncio.to_thread(_undo, base, shape.disks)
                await self._templates.discard(key)
            else:
                return

    async def drives(self, image: Image, shape: Shape, layers: Sequence[LayerFiles], directory: Path) -> LayerDrives:
        """How the image's files reach a machine whose disks lie in `directory`, which gets one more where it needs one.

        Raises StartError, DiskFullError, OSError.
        """
        room = None if self._vmm.most_drives is None else self._vmm.most_drives - len(shape.disks)
        found = await asyncio.to_thread(layer_drives, image.layers, layers, room=room)
        await self._disks.hold(found, directory)
        return found

    async def discard(self, image: Image, shape: Shape) -> None:
        """The template turned out to be damaged."""
        await self._templates.discard(template_key(image, shape, self.boot, self._vmm.binding))

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """For one restore."""
        async with self._restoring:
            yield

    # ── templates ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _make(self, work: Path, image: Image, shape: Shape, layers: Sequence[LayerFiles]) -> None:
        name = f"{GROUP}{secrets.token_hex(8)}"
        directory = self._run_dir / name
        directory.mkdir(mode=0o711)
        try:
            for disk in shape.disks:
                await make_ext4(work / disk, size_bytes=shape.disk_mib * MIB)
            drives = await self.drives(image, shape, layers, work)
            async with self._tap(shape) as tap, self._group(name, shape) as procs:
                spec = machine(shape, self.boot, drives, disks=work, tap=tap)
                place = Place(directory=directory, cgroup_procs=procs, host_id=next(self._host_ids))
                vm = await self._vmm.boot(spec, place)
                try:
                    serials = {drive.name: self._vmm.serial_of(drive) for drive in spec.drives}
                    serials |= {part.name: f"part@{part.name}" for part in drives.packed}
                    await self._bring_up(vm, shape, layers, serials)
                    await _save(vm, work / MACHINE)
                except (GuestError, GuestLostError, TimeoutError) as error:
                    raise StartError(f"the guest did not come up: {error}{_said(vm)}") from error
                finally:
                    await vm.kill()
            (work / PACKED_FILE).unlink(missing_ok=True)
        finally:
            await asyncio.to_thread(remove_tree, directory)

    async def _bring_up(self, vm: Vm, shape: Shape, layers: Sequence[LayerFiles], serials: dict[str, str]) -> None:
        guest = await vm.connect(timeout_s=BOOT_TIMEOUT_S)
        nobody = identity(token=bytes(32), inner=None, host=None, resolvers=())
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            await guest.setup(setup(shape, layers, serials, nobody))
            await _warm(guest)
        await guest.aclose()
        await asyncio.sleep(SETTLE_S)

    @contextlib.asynccontextmanager
    async def _tap(self, shape: Shape) -> AsyncIterator[str | None]:
        """A link that leads nowhere, for machines that will have one."""
        if not shape.online:
            yield None
            return
        assert self._network is not None
        await self._network.attach_tap(None)
        try:
            yield self._network.tap(None)
        finally:
            await asyncio.to_thread(self._network.detach, None)

    @contextlib.asynccontextmanager
    async def _group(self, name: str, shape: Shape) -> AsyncIterator[tuple[int, ...]]:
        assert self._groups is not None
        memory = (shape.memory_mib * 2 + OVERHEAD_MIB[self._vmm.binding.accelerator]) * MIB
        with self._groups.create(name, CgroupLimits(memory_bytes=memory), owner=0):
            procs = self._groups.open_procs(name)
            try:
                yield procs
            finally:
                for fd in procs:
                    os.close(fd)
                self._groups.kill(name)
                await self._groups.remove(name)


def in_turn(numbers: range) -> Iterator[int]:
    """All of them, again and again, beginning anywhere: an earlier process began elsewhere."""
    at = secrets.randbelow(len(numbers))
    while True:
        yield numbers[at]
        at = (at + 1) % len(numbers)


def addresses(network: SandboxNetwork, slot: int, *, online: bool) -> tuple[IPv4Address | None, IPv4Address | None]:
    """(the inside's, the host's) of a sandbox that has a network."""
    if not online:
        return None, None
    host, inner = network.addresses(slot)
    return inner, host


async def _warm(guest: Guest) -> None:
    """One command, so that copies find its pages in memory; an image without a shell has none."""
    with contextlib.suppress(GuestError):
        await guest.start(1, StartCommand(script=":"))
        async for event in guest.events(1):
            if isinstance(event, Exit):
                guest.release(1)
                return


async def _save(vm: Vm, target: Path) -> None:
    target.mkdir(mode=0o700)
    await vm.pause()
    await vm.save(target, whole=True)


def _take(template: Path, base: Path, disks: Sequence[str]) -> None:
    if not link_files(template / MACHINE, base):
        for path in (template / MACHINE).iterdir():
            copy_sparse(path, base / path.name)
    copy_disks(template, base.parent, disks)


def copy_disks(source: Path, target: Path, disks: Sequence[str]) -> None:
    """The files of these names. Raises as `copy_sparse`."""
    for name in disks:
        copy_sparse(source / name, target / name)


def _undo(base: Path, disks: Sequence[str]) -> None:
    for path in (*base.iterdir(), *(base.parent / name for name in disks)):
        path.unlink(missing_ok=True)


def _said(vm: Vm) -> str:
    try:
        said = vm.console().strip()[-_CONSOLE_TAIL:]
    except SandboxLostError:
        return ""
    return f"; its console ends with: {said}" if said else ""
