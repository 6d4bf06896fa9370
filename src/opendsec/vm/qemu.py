"""QEMU's microvm machine: KVM where that runs Linux, emulation elsewhere. Restores are private mappings of one file.

    <place>/qmp.sock, agent.sock   listening before QEMU starts, so nobody polls for them
    <place>/vmm.json               which process it is: pid, start time, boot of the host; and what `save` must know
    <place>/layers.*               the disk of all read-only drives (`qemu_drives`)
    <place>/console                what a booting guest says; later QEMU keeps the last 64 KiB
    <place>/memory                 of a machine that was booted, until it is saved
    <place>/root                   empty: where QEMU is locked up

Saved are the devices alone (QEMU's `xen-save-devices-state`, which is about no hypervisor in particular) and memory by
`guest_memory`: QEMU's own migration would write all of a private mapping each time. QEMU runs as a user of its own, in
an empty root, without the system calls that start programs. Before QEMU 8.2 it holds a writable descriptor of the
memory file its machine was restored from; docs/reference/microvm.md says what that means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from opendsec.errors import (
    DiskFullError,
    HostCapabilityError,
    NodeError,
    OpenDSecError,
    SandboxLostError,
    SnapshotInvalidError,
    StartError,
)
from opendsec.guest.base import Guest, GuestLostError
from opendsec.guest.channel import connect
from opendsec.linux import process
from opendsec.linux.libc import tsc_khz
from opendsec.linux.process import ProcessIdentity
from opendsec.store.durable import FULL, disk_full, disk_full_named
from opendsec.store.programs import find_program
from opendsec.vm import guest_memory as memory_files
from opendsec.vm.base import Accelerator, Binding, Drive, MachineSpec, Place, Vm, Vmm
from opendsec.vm.guest_setup import command_line
from opendsec.vm.kvm import Kvm, usable_kvm
from opendsec.vm.processor import host_processor
from opendsec.vm.qemu_drives import Part, parted_disk
from opendsec.vm.qemu_line import (
    AGENT_SOCKET,
    CONSOLE,
    CONSOLE_BYTES,
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
    words_of,
)
from opendsec.vm.qmp import Monitor, MonitorError, MonitorLostError, monitor
from opendsec.vm.saved import SavedMachine, check_saved, describe, write_manifest

PROGRAM = "qemu-system-x86_64"
DEVICES, RECORD = "devices", "vmm.json"
MIB = 1024 * 1024
GONE_TIMEOUT_S = 20.0
LOAD_TIMEOUT_S = 60.0
FIRST_TRY_S = 4.0
BETWEEN_TRIES_S = 0.05
_POLL_S = 0.001
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """vmm.json."""

    pid: int
    start_ticks: int
    boot_id: str
    memory: str
    """The file its memory is mapped from."""
    restored: bool
    memory_mib: int
    cpus: int
    drives: tuple[tuple[str, str, bool], ...]
    card: bool
    balloon: bool
    acpi: bool = False


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
        async with _ended_on_failure(vm):
            await vm.resume()
        return vm

    async def restore(self, saved: Path, spec: MachineSpec, place: Place, *, paused: bool = False) -> Vm:
        found = await asyncio.to_thread(check_saved, saved, self.binding, spec)
        memory = Path(found.base) if found.base else saved / memory_files.MEMORY
        spec = replace(spec, acpi=found.acpi)  # of the kernel it has, which may be used no more
        vm = await self._start(spec, place, memory=memory, restored=True)
        async with _ended_on_failure(vm):
            await vm.load(saved, found, run=not paused)
        return vm

    async def find(self, place: Place) -> Vm | None:
        try:
            record = msgspec.json.decode((place.directory / RECORD).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None
        if record.boot_id != _boot_id():
            return None
        pidfd = process.open_process(ProcessIdentity(record.pid, record.start_ticks))
        return None if pidfd is None else QemuVm(self.binding, record, place.directory, pidfd)

    async def _start(self, spec: MachineSpec, place: Place, *, memory: Path, restored: bool) -> QemuVm:
        why = check_slots(spec)
        if why:
            raise StartError(f"the machine cannot be made: {why}", retryable=False)
        directory = place.directory
        try:
            _write_layers_disk(spec, directory)
            (directory / EMPTY_ROOT).mkdir(mode=0o755, exist_ok=True)
            with _listening(directory / QMP_SOCKET) as qmp, _listening(directory / AGENT_SOCKET) as agent:
                line = Line(
                    directory=directory,
                    accelerator=self.binding.accelerator,
                    memory=memory,
                    restored=restored,
                    host_id=place.host_id,
                    version=self._version,
                    qmp_fd=qmp,
                    agent_fd=agent,
                )
                return await self._spawn(spec, place, line)
        except (OSError, ValueError) as error:
            raise StartError(f"QEMU cannot be started: {error}") from error

    async def _spawn(self, spec: MachineSpec, place: Place, line: Line) -> QemuVm:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        fds = {1: writer, 2: writer, line.qmp_fd: line.qmp_fd, line.agent_fd: line.agent_fd}
        try:
            pid, pidfd, gate = process.spawn_at_gate(self._program, argv=arguments(spec, line), fds=fds)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            vm = QemuVm(self.binding, _record_of(pid, spec, line), place.directory, pidfd, stderr=reader)
            async with _ended_on_failure(vm):
                for procs in place.cgroup_procs:
                    os.write(procs, str(pid).encode("ascii"))
                (place.directory / RECORD).write_bytes(msgspec.json.encode(vm.record))
                os.write(gate, b"go\n")  # from here on it is found, and in its groups
        finally:
            os.close(gate)
        return vm


class QemuVm(Vm):
    """One QEMU, started by this process or an earlier one."""

    def __init__(self, binding: Binding, record: Record, directory: Path, pidfd: int, *, stderr: int = -1) -> None:
        self.pid = record.pid
        self.record = record
        self._binding = binding
        self._directory = directory
        self._pidfd = pidfd
        self._stderr = stderr
        self._guest: Guest | None = None

    async def connect(self, *, timeout_s: float) -> Guest:
        """A guest may see that an earlier connection ended only after it has answered on this one, and then it takes
        the new one for ended too: so an answer counts when there is another after it, and each try waits longer.
        """
        end = time.monotonic() + timeout_s
        wait_s = FIRST_TRY_S
        while True:
            if self._guest is not None:
                await self._guest.aclose()  # the port takes one connection after the other
                self._guest = None
            left = end - time.monotonic()
            try:
                self._guest = await _greeted(self._directory / AGENT_SOCKET, min(wait_s, left))
            except GuestLostError:
                if left <= wait_s or self._pidfd == -1 or process.has_ended(self._pidfd):
                    raise
            else:
                return self._guest
            wait_s *= 2
            await asyncio.sleep(BETWEEN_TRIES_S)

    def console(self) -> str:
        """Of a machine that was booted; a restored one's QEMU keeps to itself."""
        try:
            with (self._directory / CONSOLE).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - CONSOLE_BYTES))
                return file.read(CONSOLE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    async def pause(self) -> None:
        await self._execute("stop")

    async def resume(self) -> None:
        await self._execute("cont")
        self._stop_listening()

    async def save(self, target: Path, *, whole: bool = False) -> None:
        record = self.record
        base = Path(record.memory)
        size = record.memory_mib * MIB
        try:
            async with self._monitor() as qmp:
                await _save_devices(qmp, target / DEVICES)
            if not record.restored:
                await asyncio.to_thread(memory_files.copy_memory, base, target / memory_files.MEMORY)
            else:
                await asyncio.to_thread(memory_files.save_pages, self.pid, base, target, size=size)
                self._must_live()
                if whole:
                    await asyncio.to_thread(_make_whole, base, target)
            refers = record.restored and not whole
            await asyncio.to_thread(self._describe, target, str(base) if refers else "")
        except (FileNotFoundError, ProcessLookupError) as error:
            if self._pidfd != -1 and not await _ends_soon(self._pidfd):
                if record.restored and not base.exists():
                    raise _base_gone(base) from error
                raise NodeError(f"the machine cannot be saved: {error}") from error
            raise SandboxLostError("the VMM ended while it was being saved") from error
        except MonitorError as error:
            if await asyncio.to_thread(_is_full, target):  # QEMU does not say why it could not write
                raise disk_full(target) from error
            raise NodeError(f"QEMU does not save the machine: {error}") from error
        except OSError as error:
            if error.errno in FULL:
                raise disk_full(target) from error
            raise NodeError(f"the machine cannot be saved: {error}") from error

    def _must_live(self) -> None:
        """Else what was read by its pid may be somebody else's."""
        if self.ended:
            raise ProcessLookupError(f"QEMU (pid {self.pid}) is gone")

    def _describe(self, target: Path, base: str) -> None:
        record = self.record
        spec = MachineSpec(
            kernel=Path(),
            initrd=Path(),
            command_line="",
            memory_mib=record.memory_mib,
            cpus=record.cpus,
            drives=tuple(Drive(name=name, path=Path(path), read_only=only) for name, path, only in record.drives),
            card=None,
            balloon=record.balloon,
            acpi=record.acpi,
        )
        checked = (DEVICES, memory_files.PAGES, memory_files.INDEX)
        found = describe(self._binding, spec, target, checked, base=base)
        with disk_full_named(target):
            write_manifest(target, msgspec.structs.replace(found, card=record.card))

    async def load(self, saved: Path, found: SavedMachine, *, run: bool) -> None:
        """Memory that differs from the file, then devices; it stands still afterwards, or runs. Raises as
        `Vmm.restore`.
        """
        try:
            async with self._monitor() as qmp:  # QEMU answers once memory is mapped and devices are made
                if found.base:
                    memory, size = Path(found.base), found.memory_mib * MIB
                    await asyncio.to_thread(memory_files.load_pages, self.pid, memory, saved, size=size)
                with (saved / DEVICES).open("rb") as file:
                    await qmp.give("devices", file.fileno())
                # Asked to announce itself, a guest's kernel (6.12) takes its network's lock in a work item that closing
                # a card waits for, with the lock held: whoever takes eth0 down then hangs, and all networking with it.
                await qmp.execute("migrate-set-parameters", {"announce-rounds": 0})
                await qmp.execute("migrate-incoming", {"uri": "fd:devices"})
                await _loaded(qmp)
                if run:
                    await qmp.execute("cont")
                    self._stop_listening()
        except SandboxLostError as error:
            raise SnapshotInvalidError(
                f"QEMU does not take the saved devices: {words_of(self._last_words()) or error.message}",
                remedy="make it anew",
            ) from error
        except (OSError, ValueError, MonitorError) as error:
            raise SnapshotInvalidError(f"the saved machine cannot be loaded: {error}", remedy="make it anew") from error

    async def kill(self) -> None:
        if self._pidfd == -1:
            return
        process.send_signal(self._pidfd)
        try:
            await process.wait_ended(self._pidfd, timeout_s=GONE_TIMEOUT_S)
        except TimeoutError as error:
            raise NodeError(f"QEMU (pid {self.pid}) did not end within {GONE_TIMEOUT_S:g} s of SIGKILL") from error
        await self.release()

    @property
    def ended(self) -> bool:
        return self._pidfd == -1 or process.has_ended(self._pidfd)

    async def wait_ended(self) -> None:
        if self._pidfd != -1:
            await process.wait_ended(self._pidfd)

    async def release(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.aclose()
        process.reap(self.pid)
        for fd in (self._pidfd, self._stderr):
            if fd != -1:
                os.close(fd)
        self._pidfd = self._stderr = -1

    def _stop_listening(self) -> None:
        """Nobody reads what a running guest may make QEMU complain about."""
        if self._stderr != -1:
            os.close(self._stderr)
            self._stderr = -1

    def _last_words(self) -> bytes:
        if self._stderr == -1:
            return b""
        os.set_blocking(self._stderr, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self._stderr, 65536)
        return b""

    async def _execute(self, command: str) -> None:
        try:
            async with self._monitor() as qmp:
                await qmp.execute(command)
        except MonitorError as error:
            raise NodeError(f"QEMU does not do what it is asked: {error}") from error

    @contextlib.asynccontextmanager
    async def _monitor(self) -> AsyncIterator[Monitor]:
        """QMP's failures as those of a `Vm`."""
        try:
            async with monitor(self._directory / QMP_SOCKET) as qmp:
                yield qmp
        except MonitorLostError as error:
            if self._pidfd == -1 or await _ends_soon(self._pidfd):
                words = words_of(self._last_words())
                raise SandboxLostError(f"QEMU has ended{': ' if words else ''}{words}") from error
            raise NodeError(f"QEMU (pid {self.pid}) does not answer: {error}") from error


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def _ended_on_failure(vm: QemuVm) -> AsyncIterator[None]:
    """A machine whose start fails is gone; what failed becomes a StartError unless it has a type of its own."""
    try:
        yield
    except (SnapshotInvalidError, DiskFullError):
        await vm.kill()
        raise
    except (OSError, OpenDSecError, MonitorError) as error:
        await vm.kill()
        raise StartError(f"QEMU does not start the machine: {error}") from error
    except BaseException:
        await vm.kill()
        raise


async def _greeted(path: Path, timeout_s: float) -> Guest:
    guest = await connect(path, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await guest.ping()
    except BaseException as error:
        await guest.aclose()
        if isinstance(error, TimeoutError):
            raise GuestLostError("the guest agent answered once and then no more") from None
        raise
    return guest


async def _save_devices(qmp: Monitor, target: Path) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        number = await qmp.add_fd(fd)
        try:
            await qmp.execute("xen-save-devices-state", {"filename": f"/dev/fdset/{number}", "live": False})
        finally:
            await qmp.execute("remove-fd", {"fdset-id": number})
    finally:
        os.close(fd)


async def _loaded(qmp: Monitor) -> None:
    """Wait until the state is in, or QEMU has given up (it exits then). Raises NodeError."""
    end = time.monotonic() + LOAD_TIMEOUT_S
    while True:
        if (await qmp.execute("query-status"))["status"] != "inmigrate":
            return
        if time.monotonic() > end:
            raise NodeError(f"QEMU has not read the saved devices within {LOAD_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)


def _is_full(directory: Path) -> bool:
    return shutil.disk_usage(directory).free < MIB


def _make_whole(base: Path, target: Path) -> None:
    memory = target / memory_files.MEMORY
    memory_files.copy_memory(base, memory)
    memory_files.apply_pages(target, memory)
    for name in (memory_files.PAGES, memory_files.INDEX):
        (target / name).unlink()


def _base_gone(base: Path) -> SnapshotInvalidError:
    """Nothing brings the file back, so nobody is told to try again."""
    return SnapshotInvalidError(
        "the machine runs on, and can neither be saved nor paused: the memory it was started from was removed",
        detail={"path": str(base)},
        remedy="its snapshot was removed by force: take what you need out of the sandbox, and stop it",
    )


def _write_layers_disk(spec: MachineSpec, directory: Path) -> None:
    drives = [drive for drive in spec.drives if is_behind_one(drive)]
    if not drives:
        return
    parts = [Part(name=each.name, path=str(each.path), size=each.path.stat().st_size) for each in drives]
    head, tail = directory / LAYERS_HEAD, directory / LAYERS_TAIL
    disk = parted_disk(parts, head=str(head), tail=str(tail))
    with head.open("wb") as file:
        file.write(disk.head.rstrip(b"\0"))
        file.truncate(len(disk.head))
    tail.write_bytes(disk.tail)
    (directory / LAYERS_DISK).write_text(disk.description, encoding="utf-8")


def _record_of(pid: int, spec: MachineSpec, line: Line) -> Record:
    identity = process.identify(pid)
    if identity is None:
        raise ProcessLookupError(f"QEMU (pid {pid}) is gone")
    return Record(
        pid=pid,
        start_ticks=identity.start_ticks,
        boot_id=_boot_id(),
        memory=str(line.memory),
        restored=line.restored,
        memory_mib=spec.memory_mib,
        cpus=spec.cpus,
        drives=tuple((drive.name, str(drive.path), drive.read_only) for drive in spec.drives),
        card=spec.card is not None,
        balloon=spec.balloon,
        acpi=spec.acpi,
    )


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[int]:
    """A listening socket at that path; ours is closed afterwards."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(4)
        yield listener.fileno()


async def _ends_soon(pidfd: int) -> bool:
    """A process that is ending loses its sockets first."""
    try:
        await process.wait_ended(pidfd, timeout_s=1)
    except TimeoutError:
        return False
    return True


def _counter_khz(remembered: Path) -> int:
    """Of this host's time stamp counter. Measured once a boot: no two measurements are alike, and templates, whose
    kernels were told, are found again by what they were told. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        boot_id, khz = remembered.read_text(encoding="ascii").split()
        if boot_id == _boot_id():
            return int(khz)
    measured = tsc_khz()
    partial = remembered.with_name(f".{remembered.name}-{os.getpid()}")
    partial.write_text(f"{_boot_id()} {measured}\n", encoding="ascii")
    partial.rename(remembered)
    return measured


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()
