"""One microvm machine of QEMU's that runs, whoever started it: its agent, its monitor, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from opendsec.errors import (
    DiskFullError,
    NodeError,
    OpenDSecError,
    SandboxLostError,
    SnapshotInvalidError,
    StartError,
)
from opendsec.guest.base import Guest, GuestLostError
from opendsec.guest.channel import connect
from opendsec.linux import process
from opendsec.vm.base import Binding, Vm
from opendsec.vm.qemu_line import AGENT_SOCKET, CONSOLE, CONSOLE_BYTES, QMP_SOCKET, words_of
from opendsec.vm.qemu_saving import (
    DEVICES,
    Record,
    base_gone,
    describe_saved,
    load,
    loaded,
    save_devices,
    save_memory,
    why_not_saved,
)
from opendsec.vm.qmp import Monitor, MonitorError, MonitorLostError, monitor
from opendsec.vm.saved import SavedMachine

RECORD = "vmm.json"
GONE_TIMEOUT_S = 20.0
FIRST_TRY_S = 4.0
FIRST_TRY_OF_A_START_S = 8.0
"""Of a QEMU that is on its way: nobody was connected to it before, so nothing but the host's load is waited for."""
BETWEEN_TRIES_S = 0.05


class QemuVm(Vm):
    """One QEMU, started by this process or an earlier one. `loads`: it reads its devices by itself, and then runs."""

    def __init__(
        self,
        binding: Binding,
        record: Record,
        directory: Path,
        pidfd: int,
        *,
        stderr: int = -1,
        loads: bool = False,
    ) -> None:
        self.pid = record.pid
        self.record = record
        self._binding = binding
        self._directory = directory
        self._pidfd = pidfd
        self._stderr = stderr
        self._loads = loads
        self._guest: Guest | None = None

    # ── its agent ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self, *, timeout_s: float) -> Guest:
        """A guest may see that an earlier connection ended only after it has answered on this one, and then it takes
        the new one for ended too: so an answer counts when there is another after it, and each try waits longer.
        """
        end = time.monotonic() + timeout_s
        wait_s = FIRST_TRY_OF_A_START_S if self._loads else FIRST_TRY_S
        while True:
            if self._guest is not None:
                await self._guest.aclose()  # the port takes one connection after the other
                self._guest = None
            left = end - time.monotonic()
            try:
                self._guest = await _greeted(self._directory / AGENT_SOCKET, min(wait_s, left))
            except GuestLostError as error:
                if self._loads and await self._gives_up():
                    raise self._not_taken(str(error)) from error
                if left <= wait_s or self._pidfd == -1 or process.has_ended(self._pidfd):
                    raise
            else:
                self._is_running()
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

    # ── its monitor ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def pause(self) -> None:
        await self._execute("stop")

    async def resume(self) -> None:
        await self._execute("cont")
        self._is_running()

    async def save(self, target: Path, *, whole: bool = False) -> None:
        base = Path(self.record.memory)
        try:
            async with self._monitor() as qmp:
                await save_devices(qmp, target / DEVICES)
            await save_memory(self.record, target, whole=whole, must_live=self._must_live)
            refers = self.record.restored and not whole
            await asyncio.to_thread(
                describe_saved, self._binding, self.record, target, base=str(base) if refers else ""
            )
        except (FileNotFoundError, ProcessLookupError) as error:
            if self._pidfd == -1 or await process.ends_soon(self._pidfd):
                raise SandboxLostError("the VMM ended while it was being saved") from error
            if self.record.restored and not base.exists():
                raise base_gone(base) from error
            raise await why_not_saved(error, target) from error
        except (OSError, MonitorError) as error:
            raise await why_not_saved(error, target) from error

    async def load(self, saved: Path, found: SavedMachine, *, run: bool) -> None:
        """Into a machine that waits for it; it stands still afterwards, or runs. Raises as `Vmm.restore`."""
        try:
            async with self._monitor() as qmp:
                await load(qmp, self.pid, saved, found)
                if run:
                    await qmp.execute("cont")
                    self._is_running()
        except SandboxLostError as error:
            if not await self._gives_up():
                raise
            raise self._not_taken(error.message) from error
        except (OSError, ValueError, MonitorError) as error:
            raise SnapshotInvalidError(f"the saved machine cannot be loaded: {error}", remedy="make it anew") from error

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
                if self._loads:
                    await loaded(qmp)
                    self._is_running()
                yield qmp
        except MonitorLostError as error:
            if self._pidfd == -1 or await process.ends_soon(self._pidfd):
                words = words_of(self._last_words())
                raise SandboxLostError(f"QEMU has ended{': ' if words else ''}{words}") from error
            raise NodeError(f"QEMU (pid {self.pid}) does not answer: {error}") from error

    # ── its process ─────────────────────────────────────────────────────────────────────────────────────────────────

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

    def _must_live(self) -> None:
        if self.ended:
            raise ProcessLookupError(f"QEMU (pid {self.pid}) is gone")

    def _is_running(self) -> None:
        """Nobody reads what a running guest may make QEMU complain about."""
        self._loads = False
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

    async def _gives_up(self) -> bool:
        """Whether it ends by itself: who was killed says nothing about what it was reading."""
        return self._pidfd != -1 and await process.ends_soon(self._pidfd) and not process.was_killed(self._pidfd)

    def _not_taken(self, otherwise: str) -> SnapshotInvalidError:
        return SnapshotInvalidError(
            f"QEMU does not take the saved devices: {words_of(self._last_words()) or otherwise}", remedy="make it anew"
        )


@contextlib.asynccontextmanager
async def ended_on_failure(vm: QemuVm) -> AsyncIterator[None]:
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
