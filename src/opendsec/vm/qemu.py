"""QEMU's microvm machine: KVM where that runs Linux, emulation elsewhere. Restores are private mappings of one file.

    <place>/qmp.sock, agent.sock   listening before QEMU starts, so nobody polls for them
    <place>/vmm.json               which process it is: pid, start time, boot of the host; and what `save` must know
    <place>/layers.*               the disk of all read-only drives (`qemu_drives`)
    <place>/console                what a booting guest says; later QEMU keeps the last 64 KiB
    <place>/memory                 of a machine that was booted, until it is saved
    <place>/root                   empty: where QEMU is locked up

Here machines are started and found again; `qemu_machine` is one that runs, `qemu_saving` what is written of it. QEMU
runs as a user of its own, in an empty root, without the system calls that start programs. Before QEMU 8.2 it holds a
writable descriptor of the memory file its machine was restored from; docs/reference/microvm.md says what that means.

A machine that is whole in its files is given its devices' state with its command line, and runs as soon as QEMU has
read it: nobody asks it for anything, and its agent is greeted meanwhile. Who needs it to stand still first, or has
memory of its own to put into it, tells QEMU when.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from opendsec.errors import HostCapabilityError, StartError
from opendsec.linux import process
from opendsec.linux.boot import boot_id
from opendsec.linux.cgroup import put_into
from opendsec.linux.libc import tsc_khz
from opendsec.linux.process import ProcessIdentity
from opendsec.linux.sockets import listening
from opendsec.store.programs import find_program
from opendsec.vm import guest_memory as memory_files
from opendsec.vm.base import Accelerator, Binding, Drive, MachineSpec, Place, Vm, Vmm
from opendsec.vm.guest_setup import command_line
from opendsec.vm.kvm import Kvm, usable_kvm
from opendsec.vm.processor import host_processor
from opendsec.vm.qemu_drives import HEAD_SECTORS, SECTOR, Ends, Part, description, ends_of
from opendsec.vm.qemu_line import (
    AGENT_SOCKET,
    EMPTY_ROOT,
    LAYERS_DISK,
    LAYERS_HEAD,
    LAYERS_TAIL,
    QMP_SOCKET,
    Line,
    arguments,
    check_slots,
    is_behind_one,
    numbers_of,
    version_of,
)
from opendsec.vm.qemu_machine import RECORD, QemuVm, ended_on_failure
from opendsec.vm.qemu_saving import DEVICES, Record
from opendsec.vm.saved import check_saved

PROGRAM = "qemu-system-x86_64"


class QemuVmm(Vmm):
    """`state_dir` keeps what was found out about KVM and the processor's counter until the next boot."""

    def __init__(self, *, state_dir: Path) -> None:
        self._remembered = state_dir / "kvm.json"
        self._counter = state_dir / "tsc"
        self._binding: Binding | None = None
        self._program = Path()
        self._version = (0, 0)
        self._tsc_khz: int | None = None

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise RuntimeError("the VMM is not open")
        return self._binding

    async def open(self) -> None:
        self._program = Path(find_program(PROGRAM))
        answer = await asyncio.to_thread(usable_kvm, self._remembered)
        accelerator = Accelerator.KVM if answer.kvm is Kvm.HARDWARE else Accelerator.TCG
        self.degraded = "" if accelerator is Accelerator.KVM else f"guests are emulated: {answer.sentence}"
        try:
            said = await process.run([str(self._program), "--version"], timeout_s=30)
            version = version_of(said.stdout.decode(errors="replace"))
            self._version = numbers_of(version)
        except (OSError, ValueError) as error:
            raise HostCapabilityError(
                f"QEMU does not say its version: {error}", detail={"probe": "qemu"}, remedy="reinstall qemu-system-x86"
            ) from error
        model = "max" if accelerator is Accelerator.TCG else await asyncio.to_thread(host_processor)
        if accelerator is Accelerator.TCG:  # the guest's counter is the host's
            self._tsc_khz = await asyncio.to_thread(_counter_khz, self._counter)
        self._binding = Binding(vmm="qemu-microvm", version=version, accelerator=accelerator, cpu_model=model)

    def command_line(self) -> str:
        # Emulation has no invariant counter to show, though it shows the host's: without a word the kernel counts its
        # timer's ticks instead, and an emulated guest on a busy host loses those by the second.
        more = () if self._tsc_khz is None else ("tsc=reliable", "clocksource=tsc")
        return command_line(console="hvc0", accelerator=self.binding.accelerator, tsc_khz=self._tsc_khz, more=more)

    def serial_of(self, drive: Drive) -> str:
        """Read-only drives are partitions of one disk."""
        return f"part@{drive.name}" if is_behind_one(drive) else drive.name

    async def boot(self, spec: MachineSpec, place: Place) -> Vm:
        memory = place.directory / memory_files.MEMORY
        vm = await self._start(spec, place, memory=memory, restored=False)
        async with ended_on_failure(vm):
            await vm.resume()
        return vm

    async def restore(self, saved: Path, spec: MachineSpec, place: Place, *, paused: bool = False) -> Vm:
        found = await asyncio.to_thread(check_saved, saved, self.binding, spec)
        memory = Path(found.base) if found.base else saved / memory_files.MEMORY
        spec = replace(spec, acpi=found.acpi)  # of the kernel it has, which may be used no more
        if not paused and not found.base:
            return await self._start(spec, place, memory=memory, restored=True, devices=saved / DEVICES)
        vm = await self._start(spec, place, memory=memory, restored=True)
        async with ended_on_failure(vm):
            await vm.load(saved, found, run=not paused)
        return vm

    async def find(self, place: Place) -> Vm | None:
        try:
            record = msgspec.json.decode((place.directory / RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None
        if record.boot_id != boot_id():
            return None
        pidfd = process.open_process(ProcessIdentity(record.pid, record.start_ticks))
        return None if pidfd is None else QemuVm(self.binding, record, place.directory, pidfd)

    async def _start(
        self, spec: MachineSpec, place: Place, *, memory: Path, restored: bool, devices: Path | None = None
    ) -> QemuVm:
        """With `devices` it reads them by itself, and runs."""
        why = check_slots(spec)
        if why:
            raise StartError(f"the machine cannot be made: {why}", retryable=False)
        directory = place.directory
        try:
            _write_layers_disk(spec, directory)
            (directory / EMPTY_ROOT).mkdir(mode=0o755, exist_ok=True)
            with (
                listening(directory / QMP_SOCKET) as qmp,
                listening(directory / AGENT_SOCKET) as agent,
                _open_if(devices) as devices_fd,
            ):
                line = Line(
                    directory=directory,
                    accelerator=self.binding.accelerator,
                    memory=memory,
                    restored=restored,
                    host_id=place.host_id,
                    version=self._version,
                    qmp_fd=qmp,
                    agent_fd=agent,
                    devices_fd=devices_fd,
                )
                return await self._spawn(spec, place, line)
        except (OSError, ValueError) as error:
            raise StartError(f"QEMU cannot be started: {error}") from error

    async def _spawn(self, spec: MachineSpec, place: Place, line: Line) -> QemuVm:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        given = (line.qmp_fd, line.agent_fd, *([] if line.devices_fd == -1 else [line.devices_fd]))
        fds = {1: writer, 2: writer} | {fd: fd for fd in given}
        try:
            pid, pidfd, gate = process.spawn_at_gate(self._program, argv=arguments(spec, line), fds=fds)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            loads = line.devices_fd != -1
            vm = QemuVm(self.binding, _record_of(pid, spec, line), place.directory, pidfd, stderr=reader, loads=loads)
            async with ended_on_failure(vm):
                await put_into(place.cgroup_procs, pid)
                (place.directory / RECORD).write_bytes(msgspec.json.encode(vm.record))
                os.write(gate, b"go\n")  # from here on it is found, and in its groups
        finally:
            os.close(gate)
        return vm


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _open_if(path: Path | None) -> Iterator[int]:
    """A descriptor to read it by; -1 of nothing."""
    if path is None:
        yield -1
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_layers_disk(spec: MachineSpec, directory: Path) -> None:
    drives = [drive for drive in spec.drives if is_behind_one(drive)]
    if not drives:
        return
    parts = tuple(Part(name=each.name, path=str(each.path), size=each.path.stat().st_size) for each in drives)
    head, tail = directory / LAYERS_HEAD, directory / LAYERS_TAIL
    text = description(parts, head=str(head), tail=str(tail))
    ends = _ends(parts)
    with head.open("wb") as file:
        file.write(ends.head)
        file.truncate(HEAD_SECTORS * SECTOR)
    tail.write_bytes(ends.tail)
    (directory / LAYERS_DISK).write_text(text, encoding="utf-8")


@functools.lru_cache(maxsize=64)
def _ends(parts: tuple[Part, ...]) -> Ends:
    """The same for all sandboxes of an image; without the zeros after the first table."""
    ends = ends_of(parts)
    return Ends(head=ends.head.rstrip(b"\0"), tail=ends.tail)


def _record_of(pid: int, spec: MachineSpec, line: Line) -> Record:
    identity = process.identify(pid)
    if identity is None:
        raise ProcessLookupError(f"QEMU (pid {pid}) is gone")
    return Record(
        pid=pid,
        start_ticks=identity.start_ticks,
        boot_id=boot_id(),
        memory=str(line.memory),
        restored=line.restored,
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        drives=tuple((drive.name, str(drive.path), drive.read_only) for drive in spec.drives),
        card=spec.card is not None,
        balloon=spec.balloon,
        acpi=spec.acpi,
    )


def _counter_khz(remembered: Path) -> int:
    """Of this host's time stamp counter. Measured once a boot: no two measurements are alike, and templates, whose
    kernels were told, are found again by what they were told. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        of_boot, khz = remembered.read_text(encoding="ascii").split()
        if of_boot == boot_id():
            return int(khz)
    measured = tsc_khz()
    partial = remembered.with_name(f".{remembered.name}-{os.getpid()}")
    partial.write_text(f"{boot_id()} {measured}\n", encoding="ascii")
    partial.rename(remembered)
    return measured
