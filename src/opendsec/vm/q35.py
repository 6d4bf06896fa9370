"""QEMU's q35 machine: a whole PC with firmware, disk, display and input, for any operating system.

    <directory>/qmp.sock, serial.sock, agent.sock   listening before QEMU starts, so nobody polls for them
    <directory>/room                                where its root is mounted, in its own namespace
    <directory>/resolv.conf                         name servers of its room

One file of the machine's own is written: its overlay (and what UEFI remembers). A saved machine is the stream of QEMU's
migration, with all its memory and devices, beside a copy of the overlay; both belong together (`q35_saved`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from opendsec.errors import HostCapabilityError, NodeError, SandboxLostError, StartError
from opendsec.linux import process
from opendsec.linux.process import ProcessIdentity
from opendsec.linux.sockets import listening
from opendsec.model.image import Firmware
from opendsec.store.disk_changes import make_overlay
from opendsec.store.durable import disk_full_named
from opendsec.store.programs import find_program
from opendsec.store.sparse import copy_sparse, make_own
from opendsec.vm import q35_line
from opendsec.vm.base import Accelerator, Binding
from opendsec.vm.kvm import Kvm, usable_kvm
from opendsec.vm.processor import host_processor
from opendsec.vm.q35_line import Q35Spec
from opendsec.vm.q35_room import TPM_SERVER_FD, Entered, Room, enter
from opendsec.vm.qemu_line import version_of, words_of
from opendsec.vm.qmp import Monitor, MonitorError, MonitorLostError, monitor

PROGRAM = "qemu-system-x86_64"
QMP_SOCKET, SERIAL_SOCKET, AGENT_SOCKET = "qmp.sock", "serial.sock", "agent.sock"
OVERLAY, VARIABLES, TPM, ROOM, RESOLVERS = "disk.qcow2", "uefi-vars.fd", "tpm", "room", "resolv.conf"
STATE = "state"
START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
SAVE_TIMEOUT_S = 1800.0
GONE_TIMEOUT_S = 20.0
BUSY_S = 60.0
"""How long what a machine is asked for waits for a snapshot or a pack of it."""
_POLL_S = 0.02
_SAVE_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one machine lives."""

    directory: Path
    """On a tmpfs; sockets."""
    state: Path
    """On a disk; what the machine writes."""
    disks: tuple[Path, ...]
    """The image's files, lowest first; read only."""
    resolvers: bytes
    """Content of its resolv.conf."""
    host_id: int
    saved: Path | None = None
    """A saved machine to go on from."""


class Q35:
    """QEMU on this host. `state_dir` keeps what was found out about KVM until the next boot."""

    def __init__(self, *, state_dir: Path) -> None:
        self._remembered = state_dir / "kvm.json"
        self._binding: Binding | None = None
        self.degraded = ""
        """Why it is slower than it could be."""

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise RuntimeError("QEMU was not looked for")
        return self._binding

    async def open(self) -> None:
        """Probe. Raises HostCapabilityError with the remedy."""
        for name in (PROGRAM, "qemu-img", "unshare", "setpriv"):
            find_program(name)
        answer = await asyncio.to_thread(usable_kvm, self._remembered)
        accelerator = Accelerator.KVM if answer.kvm is Kvm.HARDWARE else Accelerator.TCG
        self.degraded = "" if accelerator is Accelerator.KVM else f"guests are emulated: {answer.sentence}"
        try:
            said = await process.run([find_program(PROGRAM), "--version"], timeout_s=30)
            version = version_of(said.stdout.decode(errors="replace"))
        except (OSError, ValueError) as error:
            raise HostCapabilityError(
                f"QEMU does not say its version: {error}", detail={"probe": "qemu"}, remedy="reinstall qemu-system-x86"
            ) from error
        model = "max" if accelerator is Accelerator.TCG else await asyncio.to_thread(host_processor)
        self._binding = Binding(vmm="qemu-q35", version=version, accelerator=accelerator, cpu_model=model)

    async def start(
        self, spec: Q35Spec, places: Places, *, admit: Callable[[Entered], Coroutine[Any, Any, None]]
    ) -> Q35Machine:
        """A machine that stands still, all of it loaded. `admit` is called while its process waits at the gate.

        Raises StartError, DiskFullError, HostCapabilityError (no swtpm, no OVMF); nothing of it runs then.
        """
        check_parts(spec)
        await self._prepare(spec, places)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with _Descriptors(spec, places) as fds:
                room = Room(
                    root=places.directory / ROOM,
                    host_id=places.host_id,
                    resolvers=places.directory / RESOLVERS,
                    tpm_state=places.state / TPM if spec.machine.tpm else None,
                    kvm=spec.accelerator is Accelerator.KVM,
                )
                argv = [find_program(PROGRAM), *q35_line.arguments(spec)]
                entered = enter(room, argv, fds=fds, words=writer)
        except OSError as error:
            os.close(reader)
            raise StartError(f"QEMU cannot be started: {error}") from error
        finally:
            os.close(writer)
        machine = Q35Machine(entered.pid, entered.pidfd, places.directory, words=reader)
        try:
            try:
                await admit(entered)
                os.write(entered.gate, b"go\n")
            finally:
                os.close(entered.gate)
            await machine.wait_loaded(timeout_s=LOAD_TIMEOUT_S if spec.restored else START_TIMEOUT_S)
        except (SandboxLostError, MonitorError, NodeError, OSError) as error:
            words = machine.last_words()
            await machine.kill()
            raise StartError(f"QEMU does not start the machine: {words or error}") from error
        except BaseException:
            await machine.kill()
            raise
        machine.forget_words()
        return machine

    async def _prepare(self, spec: Q35Spec, places: Places) -> None:
        """All files and directories; the overlay is the saved one's, or new."""
        try:
            with disk_full_named(places.state):
                await asyncio.to_thread(_make_files, spec, places)
                if places.saved is None:
                    await asyncio.to_thread(make_overlay, places.state / OVERLAY, q35_line.size_of_disk(spec))
        except OSError as error:
            raise StartError(f"the machine's files cannot be made: {error}") from error

    def find(self, identity: ProcessIdentity, directory: Path) -> Q35Machine | None:
        """A machine an earlier process started. None: it is gone."""
        pidfd = process.open_process(identity)
        return None if pidfd is None else Q35Machine(identity.pid, pidfd, directory)


def check_parts(spec: Q35Spec) -> None:
    """Raises HostCapabilityError when this host lacks what the machine is made of, beside QEMU."""
    if spec.machine.tpm:
        find_program("swtpm")
    if spec.machine.firmware is Firmware.UEFI:
        for path in (q35_line.UEFI_CODE, q35_line.UEFI_VARIABLES):
            if not Path(path).is_file():
                raise HostCapabilityError(
                    f"there is no UEFI firmware: {path} is missing",
                    detail={"probe": "ovmf"},
                    remedy="apt-get install ovmf",
                )


def _make_files(spec: Q35Spec, places: Places) -> None:
    (places.directory / ROOM).mkdir(mode=0o755)
    (places.directory / RESOLVERS).write_bytes(places.resolvers)
    if spec.machine.tpm:
        (places.state / TPM).mkdir(mode=0o700)
    if places.saved is not None:
        copy_sparse(places.saved / OVERLAY, places.state / OVERLAY)
    if spec.machine.firmware is Firmware.UEFI:
        variables = Path(q35_line.UEFI_VARIABLES) if places.saved is None else places.saved / VARIABLES
        shutil.copyfile(variables, places.state / VARIABLES)


class _Descriptors:
    """All descriptors QEMU is started with; ours are closed afterwards."""

    def __init__(self, spec: Q35Spec, places: Places) -> None:
        self._spec = spec
        self._places = places
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> dict[int, int]:
        with contextlib.ExitStack() as stack:
            found = dict(self._open(stack))
            self._stack = stack.pop_all()
        return found

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> Iterator[tuple[int, int]]:
        places, machine = self._places, self._spec.machine

        def opened(path: Path, flags: int) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return fd

        sockets = [(q35_line.MONITOR_FD, QMP_SOCKET), (q35_line.SERIAL_FD, SERIAL_SOCKET)]
        sockets += [(q35_line.AGENT_FD, AGENT_SOCKET)] if machine.agent else []
        for number, name in sockets:
            yield number, stack.enter_context(listening(places.directory / name, backlog=16))
        yield q35_line.OVERLAY_FD, opened(places.state / OVERLAY, os.O_RDWR)
        yield q35_line.OVERLAY_READ_FD, opened(places.state / OVERLAY, os.O_RDONLY)
        for number, path in enumerate(places.disks, q35_line.DISKS_FD):
            yield number, opened(path, os.O_RDONLY)
        if machine.firmware is Firmware.UEFI:
            yield q35_line.VARIABLES_FD, opened(places.state / VARIABLES, os.O_RDWR)
            yield q35_line.VARIABLES_READ_FD, opened(places.state / VARIABLES, os.O_RDONLY)
        if machine.tpm:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            yield q35_line.TPM_FD, ours.fileno()
            yield TPM_SERVER_FD, theirs.fileno()
        if places.saved is not None:
            yield q35_line.STATE_FD, opened(places.saved / STATE, os.O_RDONLY)


class Q35Machine:
    """One QEMU. Calls raise SandboxLostError when it is gone, NodeError when it does not answer."""

    def __init__(self, pid: int, pidfd: int, directory: Path, *, words: int = -1) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.directory = directory
        self._words = words
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def monitor(self) -> AsyncIterator[Monitor]:
        """A connection to its monitor; who comes second waits."""
        try:
            async with monitor(self.directory / QMP_SOCKET) as qmp:
                yield qmp
        except MonitorLostError as error:
            if self.pidfd == -1 or await process.ends_soon(self.pidfd):
                raise SandboxLostError("the machine has ended") from error
            raise NodeError(f"QEMU (pid {self.pid}) does not answer: {error}") from error

    async def _execute(self, *commands: str) -> None:
        try:
            async with self.monitor() as qmp:
                for command in commands:
                    await qmp.execute(command)
        except MonitorError as error:
            raise NodeError(f"QEMU does not do what it is asked: {error}") from error

    async def wait_loaded(self, *, timeout_s: float) -> None:
        """Until its devices are made and a saved state is in. Raises TimeoutError as NodeError."""
        end = time.monotonic() + timeout_s
        async with self.monitor() as qmp:
            while (await qmp.execute("query-status"))["status"] == "inmigrate":
                if time.monotonic() > end:
                    raise NodeError(f"QEMU has not read the saved machine within {timeout_s:g} s")
                await asyncio.sleep(_POLL_S)

    async def pause(self) -> None:
        """Its processors stand still. Idempotent."""
        await self._execute("stop")

    async def resume(self) -> None:
        """Undo `pause`, and what a process that died within `save` has left. Idempotent."""
        await self._execute("migrate_cancel", "cont")  # its end would stop the machine again

    async def is_paused(self) -> bool:
        """Whether it stands still."""
        async with self.monitor() as qmp:
            return not (await qmp.execute("query-status"))["running"]

    async def press_power(self) -> None:
        """What a guest makes of its power button is its own business."""
        await self._execute("system_powerdown")

    @contextlib.asynccontextmanager
    async def turn(self, *, timeout_s: float | None = BUSY_S) -> AsyncIterator[None]:
        """While somebody relies on its processors running or standing still. Raises NodeError, retryable, when it is
        somebody else's for longer; None waits for that end."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise NodeError(
                f"the machine has been standing still for more than {timeout_s:g} s: it is being saved or packed",
                remedy="try again when that has ended",
                retryable=True,
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """It stands still, and all it has written is in its files. Afterwards it goes on, or stays paused, as it was.
        The caller has its turn."""
        running = not await self.is_paused()
        await self.pause()
        try:
            yield
        finally:
            if running:
                await self._execute("cont")

    async def save(self, target: Path, state: Path) -> None:
        """Memory, devices and disk below `target`; it stands still meanwhile and goes on as it was. The caller has its
        turn; others may ask for what needs none, as its picture.

        `state`: the directory of its overlay. Raises DiskFullError, NodeError.
        """
        running = not await self.is_paused()
        try:
            with disk_full_named(target):
                await self.pause()
                try:
                    await self._migrate(target / STATE)
                    await asyncio.to_thread(_copy_disk, state, target)
                finally:
                    # Also one that was paused: only then are its files its own again.
                    await self._execute(*(("cont",) if running else ("cont", "stop")))
                await asyncio.to_thread(make_own, target / STATE)  # while it goes on
        except MonitorError as error:
            raise NodeError(f"QEMU does not save the machine: {error}") from error

    async def _migrate(self, target: Path) -> None:
        """The monitor is taken for moments only: QEMU serves one at a time, and a save may take minutes."""
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            async with self.monitor() as qmp:
                await qmp.give("state", fd)
                await qmp.execute("migrate", {"uri": "fd:state"})
        finally:
            os.close(fd)
        try:
            await self._wait_saved(target)
        except BaseException:
            with contextlib.suppress(NodeError, SandboxLostError):
                await self._execute("migrate_cancel")  # whose end would stop it again
            raise

    async def _wait_saved(self, target: Path) -> None:
        end = time.monotonic() + SAVE_TIMEOUT_S
        while not _is_saved(await self._query("query-migrate"), target):
            if time.monotonic() > end:
                raise NodeError(f"the machine was not saved within {SAVE_TIMEOUT_S:g} s")
            await asyncio.sleep(_SAVE_POLL_S)

    async def _query(self, command: str) -> Mapping[str, Any]:
        async with self.monitor() as qmp:
            return cast("Mapping[str, Any]", await qmp.execute(command))

    async def agent_is_there(self) -> bool:
        """Whether something inside has the agent's port open."""
        async with self.monitor() as qmp:
            return any(one["label"] == "agent" and one["frontend-open"] for one in await qmp.execute("query-chardev"))

    async def kill(self) -> None:
        """End it at once; returns when it is gone. Idempotent."""
        if self.pidfd == -1:
            return
        process.send_signal(self.pidfd)
        try:
            await process.wait_ended(self.pidfd, timeout_s=GONE_TIMEOUT_S)
        except TimeoutError as error:
            raise NodeError(f"QEMU (pid {self.pid}) did not end within {GONE_TIMEOUT_S:g} s of SIGKILL") from error
        self.release()

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.pidfd == -1 or process.has_ended(self.pidfd)

    async def wait_ended(self) -> None:
        """Until it is gone, for whatever reason."""
        if self.pidfd != -1:
            await process.wait_ended(self.pidfd)

    def release(self) -> None:
        """Let go of it; one that has ended is reaped."""
        process.reap(self.pid)
        if self.pidfd != -1:
            os.close(self.pidfd)
        self.pidfd = -1
        self.forget_words()

    def last_words(self) -> str:
        """What it has complained about while it was started."""
        if self._words == -1:
            return ""
        os.set_blocking(self._words, False)
        with contextlib.suppress(BlockingIOError):
            return words_of(os.read(self._words, 65536))
        return ""

    def forget_words(self) -> None:
        """Nobody reads any more what a guest may make it complain about."""
        if self._words != -1:
            os.close(self._words)
        self._words = -1


def _is_saved(found: Mapping[str, Any], target: Path) -> bool:
    """By what QEMU says of it. Raises NodeError with its reason when it has failed, OSError when the disk is full."""
    if found.get("status") in ("failed", "cancelled"):
        why = found.get("error-desc", "QEMU does not say why")
        if shutil.disk_usage(target.parent).free < 1 << 20:
            raise OSError(errno.ENOSPC, f"the machine cannot be saved: {why}")
        raise NodeError(f"the machine cannot be saved: {why}")
    return found.get("status") == "completed"


def _copy_disk(state: Path, target: Path) -> None:
    copy_sparse(state / OVERLAY, target / OVERLAY)
    if (state / VARIABLES).exists():
        shutil.copyfile(state / VARIABLES, target / VARIABLES)
