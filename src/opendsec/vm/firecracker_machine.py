"""One machine under Firecracker: talk to its guest, pause, save, end it. It needs nothing of the process that started
it but what its directory holds.

A save writes the pages that changed since the machine was restored, or saved before, where those files are still as
they were, and all memory where they are not, or where an earlier save failed half-way. It never writes to a file an
earlier save made.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from opendsec.errors import DiskFullError, NodeError, SandboxLostError, StartError
from opendsec.guest.base import GuestLostError
from opendsec.guest.channel import Channel, greet
from opendsec.linux import process
from opendsec.linux.process import ProcessIdentity
from opendsec.store.durable import NO_LINKS
from opendsec.store.sparse import make_own
from opendsec.vm import firecracker_saved, sparse
from opendsec.vm.base import Binding, MachineSpec, Vm
from opendsec.vm.firecracker_api import Api, ApiError, ApiGoneError
from opendsec.vm.firecracker_saved import MEMORY, STATE, Changes, FileIdentity, Shape
from opendsec.vm.firecracker_start import (
    API_SOCKET,
    CONSOLE_BYTES,
    JAIL,
    in_own_thread,
    mount_for_saving,
    root_of,
    unmount_after_saving,
)
from opendsec.vm.guest_setup import VSOCK_PORT
from opendsec.vm.saved import write_manifest
from opendsec.vm.userfault import LOST
from opendsec.vm.userfault_client import MemoryServer

RECORD, VSOCK, UFFD_SOCKET = "vm.json", "v.sock", "uffd.sock"
_OURS: Final = (RECORD, f".{RECORD}", VSOCK, UFFD_SOCKET, API_SOCKET, LOST, "kernel", "initrd")
_OUR_DIRECTORIES: Final = ("drives", "snapshot", JAIL)
KEPT_MEMORY: Final = "memory-"
"""How a link to the memory of a snapshot begins, in its sandbox's directory."""
GONE_S: Final = 30.0
"""A killed VMM is gone in a millisecond; a dead disk under it can hold it."""
SAVE_S: Final = 60.0
SAVE_MIB_A_SECOND: Final = 4.0
"""A save may take a minute and as long as this slow a disk needs."""
_FIRST_WAIT_S: Final = 0.0005
_MOST_WAIT_S: Final = 0.02
_HANG_UP_S: Final = 1.0
_GREETING_BYTES: Final = 32


class ServedBy(msgspec.Struct, frozen=True, kw_only=True):
    """The process that gives it its memory."""

    pid: int
    start_ticks: int


class Record(msgspec.Struct, kw_only=True):
    """vm.json."""

    identifier: str
    jailed: bool
    host_id: int
    shape: Shape
    pid: int = 0
    """0: it is being started, and is found by its identifier."""
    start_ticks: int = 0
    running: bool = False
    """It came up."""
    memory: list[FileIdentity] = []
    """What the pages known to be unchanged are in, topmost first; empty: nothing, all it uses has changed."""
    certain: bool = True
    """Firecracker's list of changed pages is relative to `memory`."""
    served_by: ServedBy | None = None

    @classmethod
    def fresh(cls, spec: MachineSpec, *, host_id: int) -> Record:
        """Of a machine that is about to be started."""
        return cls(identifier=secrets.token_hex(8), jailed=host_id != 0, host_id=host_id, shape=Shape.of(spec))

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """None: there is none, or it was cut short (then nothing was started yet)."""
        try:
            return msgspec.json.decode((directory / RECORD).read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        fresh = directory / f".{RECORD}"
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(directory / RECORD)

    def claim(self, directory: Path) -> None:
        """Write it where none is yet. Raises StartError when a machine lives there, or its remains lie there."""
        try:
            with (directory / RECORD).open("xb") as file:
                file.write(msgspec.json.encode(self))
        except FileExistsError:
            raise StartError(f"{directory} belongs to a machine already", retryable=False) from None

    def root(self, directory: Path) -> Path:
        """Where the VMM's relative names begin."""
        return root_of(directory, self.identifier, jailed=self.jailed)


def clear(directory: Path) -> None:
    """Remove what the driver made there. Idempotent. Raises OSError."""
    for name in _OURS:
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
    for name in _OUR_DIRECTORIES:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory / name)


class FirecrackerVm(Vm):
    """Made by `FirecrackerVmm`. Whoever has one ends it by `kill`, or lets go of it by `release`."""

    def __init__(self, record: Record, directory: Path, pidfd: int, binding: Binding, memory: MemoryServer) -> None:
        self.pid = record.pid
        self._record = record
        self._directory = directory
        self._root = record.root(directory)
        self._pidfd = pidfd
        self._binding = binding
        self._saving = asyncio.Lock()
        self._older: Changes | None = _changes_of(record)
        self._unwatch: Callable[[], None] = lambda: None
        if record.served_by is not None:
            identity = ProcessIdentity(record.served_by.pid, record.served_by.start_ticks)
            self._unwatch = memory.on_end(identity, self._memory_lost)

    # Its guest.

    async def connect(self, *, timeout_s: float) -> Channel:
        deadline = time.monotonic() + timeout_s
        why, wait_s = "nothing was tried", _FIRST_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            if self.ended:
                raise GuestLostError(self._lost_sentence())
            try:
                async with asyncio.timeout(left):
                    sock = await self._dial()
                return await greet(sock, max(0.001, deadline - time.monotonic()))
            except TimeoutError:
                why = "Firecracker does not answer on the vsock"
                continue
            except OSError as error:
                why = f"the guest does not listen: {error!r}"
            except GuestLostError as error:  # what an older connection left may reset this one
                why = str(error)
            await asyncio.sleep(min(wait_s, left))
            wait_s = min(wait_s * 2, _MOST_WAIT_S)
        if self.ended:
            raise GuestLostError(self._lost_sentence())
        raise GuestLostError(f"no guest agent within {timeout_s:g} seconds: {why}")

    async def _dial(self) -> socket.socket:
        """A stream to the agent's port. Raises OSError."""
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, os.fspath(self._root / VSOCK))
            await loop.sock_sendall(sock, b"CONNECT %d\n" % VSOCK_PORT)
            greeting = await _line(sock)
            if not (greeting.startswith(b"OK ") and greeting.endswith(b"\n")):
                raise ConnectionRefusedError(f"Firecracker answered {greeting!r}")  # noqa: TRY301
        except BaseException:
            sock.close()
            raise
        return sock

    def console(self) -> str:
        """The first 64 KiB its guest printed. Raises SandboxLostError."""
        try:
            with Path(f"/proc/{self.pid}/fd/1").open("rb") as file:
                content = os.pread(file.fileno(), CONSOLE_BYTES, 0)
        except OSError as error:
            raise self._lost() from error
        return content.rstrip(b"\0").decode("utf-8", "replace")

    # Its processors.

    async def pause(self) -> None:
        await self._set_state("Paused")

    async def resume(self) -> None:
        await self._set_state("Resumed")

    async def _set_state(self, state: str) -> None:
        try:
            async with Api(self._root / API_SOCKET) as api:
                await api.patch("vm", {"state": state})
        except (ApiError, ApiGoneError) as error:
            raise await self._failed(error) from error

    # Its state.

    async def save(self, target: Path, *, whole: bool = False) -> None:
        """As `Vm.save`. With `whole` the directory needs no other file, and carries checksums of its memory."""
        async with self._saving:
            try:
                await self._save(target, whole=whole)
            except BaseException:
                for name in firecracker_saved.FILES:
                    with contextlib.suppress(FileNotFoundError):
                        (target / name).unlink()
                raise

    async def _save(self, target: Path, *, whole: bool) -> None:
        record = self._record
        try:
            only_changes = record.certain and await asyncio.to_thread(self._may_save_changes, target)
            record.certain = False  # until all of it has gone well
            record.write(self._directory)
            await self._create(target, "Diff" if only_changes else "Full")
            base = record.memory[-1].path if only_changes and record.memory else ""
            record.memory = await asyncio.to_thread(self._complete, target, base, whole)
        except OSError as error:
            raise self._save_error(target, str(error), full=error.errno in sparse.FULL) from error
        record.certain = True
        record.write(self._directory)

    def keep_base(self, directory: Path) -> None:
        record = self._record
        if len(record.memory) != 1:
            return  # changes, which whoever saved them keeps in place
        kept = directory / f"{KEPT_MEMORY}{secrets.token_hex(4)}"
        try:
            os.link(record.memory[0].path, kept)
        except OSError as error:
            if error.errno not in NO_LINKS and error.errno != errno.EXDEV:
                raise
            return
        record.memory = [FileIdentity.of(kept)]
        record.write(self._directory)
        for older in directory.glob(f"{KEPT_MEMORY}*"):
            if older != kept:
                older.unlink()

    def _may_save_changes(self, target: Path) -> bool:
        memory = self._record.memory
        if memory and not memory[-1].is_there():
            return False
        return (len(memory) < 2 or self._older is not None) and sparse.reports_holes(target)

    async def _create(self, target: Path, kind: str) -> None:
        names = {"snapshot_path": str(target / STATE), "mem_file_path": str(target / MEMORY)}
        if self._record.jailed:
            names = {"snapshot_path": f"save/{STATE}", "mem_file_path": f"save/{MEMORY}"}
            os.chown(target, self._record.host_id, self._record.host_id)
            await in_own_thread(lambda: mount_for_saving(self.pid, target))
        try:
            limit = SAVE_S + self._record.shape.memory_mib / SAVE_MIB_A_SECOND
            async with Api(self._root / API_SOCKET) as api:
                await api.put("snapshot/create", {"snapshot_type": kind, **names}, timeout_s=limit)
        except ApiError as error:
            raise self._save_error(target, error.fault, full="os error 28" in error.fault) from error
        except ApiGoneError as error:
            raise await self._failed(error) from error
        finally:
            if self._record.jailed:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                    await in_own_thread(lambda: unmount_after_saving(self.pid))
                os.chown(target, 0, 0)

    def _complete(self, target: Path, base: str, whole: bool) -> list[FileIdentity]:
        """Make what Firecracker wrote a saved machine; what its memory is in. Blocking. Raises OSError."""
        _must_be_plain(target)
        memory = target / MEMORY
        if whole and self._record.jailed:
            for name in (STATE, MEMORY):
                make_own(target / name)
        if base:
            firecracker_saved.complete_changes(memory, self._older)
        if whole:
            firecracker_saved.make_whole(memory, base)
            base = ""
        for name in (STATE, MEMORY):
            os.chown(target / name, 0, 0)
            (target / name).chmod(0o444)
        write_manifest(target, firecracker_saved.manifest(target, self._binding, self._record.shape, base=base))
        older, self._older = self._older, Changes(memory) if base else None
        if older is not None:
            older.close()
        return [FileIdentity.of(path) for path in (memory, *((Path(base),) if base else ()))]

    def _save_error(self, target: Path, words: str, *, full: bool) -> Exception:
        if full:
            return DiskFullError(
                f"no space left on the disk of {target} for a machine's memory",
                detail={"path": str(target)},
                remedy="give it more room, or stop sandboxes",
            )
        return NodeError(f"the machine could not be saved: {words}")

    # Its end.

    async def kill(self) -> None:
        if self._pidfd < 0:
            return
        process.send_signal(self._pidfd)
        try:
            await process.wait_ended(self._pidfd, timeout_s=GONE_S)
        except TimeoutError:
            raise NodeError(f"Firecracker (pid {self.pid}) does not end within {GONE_S:g} seconds") from None
        process.reap(self.pid)
        await self.release()
        await asyncio.to_thread(clear, self._directory)

    async def wait_ended(self) -> None:
        if self._pidfd >= 0:
            await process.wait_ended(self._pidfd)
            process.reap(self.pid)

    async def release(self) -> None:
        self._unwatch()
        if self._older is not None:
            self._older.close()
            self._older = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def ended(self) -> bool:
        return self._pidfd < 0 or process.has_ended(self._pidfd)

    def _memory_lost(self) -> None:
        """The process that gives it its memory is gone: its next fault would wait for ever."""
        reason = self._directory / LOST
        if self._directory.exists() and not reason.exists():
            reason.write_text("the process that gives it its saved memory has ended", encoding="utf-8")
        if self._pidfd >= 0:
            process.send_signal(self._pidfd)

    def _lost_sentence(self) -> str:
        try:
            why = (self._directory / LOST).read_text(encoding="utf-8")
        except FileNotFoundError:
            return "the machine's VMM has ended"
        return f"the machine was ended: {why}"

    def _lost(self) -> SandboxLostError:
        return SandboxLostError(self._lost_sentence())

    async def _failed(self, error: ApiError | ApiGoneError) -> Exception:
        """What a call that did not work means."""
        if isinstance(error, ApiGoneError) and self._pidfd >= 0:
            with contextlib.suppress(TimeoutError):  # an API hangs up a moment before its process is gone
                await process.wait_ended(self._pidfd, timeout_s=_HANG_UP_S)
        return self._lost() if self.ended else NodeError(f"Firecracker does not do what it is asked: {error}")


def _must_be_plain(target: Path) -> None:
    """A jailed VMM had this directory to itself: nothing but the files it was asked for, or root would follow a link of
    its making. Raises OSError.
    """
    for entry in target.iterdir():
        status = entry.lstat()
        if entry.name not in (STATE, MEMORY) or not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(errno.EPERM, f"{entry.name!r} is nothing that Firecracker writes")


async def _line(sock: socket.socket) -> bytes:
    """Up to its first newline, and not one byte of what comes after it. Raises OSError."""
    loop = asyncio.get_running_loop()
    line = b""
    while b"\n" not in line and len(line) < _GREETING_BYTES:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock)
        ahead = sock.recv(_GREETING_BYTES, socket.MSG_PEEK)
        if not ahead:
            break
        line += sock.recv(ahead.find(b"\n") + 1 or len(ahead))
    return line


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _changes_of(record: Record) -> Changes | None:
    """None also when the file is gone: the next save is whole then."""
    if len(record.memory) < 2 or not record.memory[0].is_there():
        return None
    try:
        return Changes(Path(record.memory[0].path))
    except OSError:
        return None
