"""Containers of the pools, made and ended; and found again after the edge that made them was killed.

Each has a directory `<state>/containers/<name>` with its slot in it, written before the container starts: whatever
happens, the next engine removes what is named there. Nothing of an earlier engine is used again, a container whose last
call nobody saw the end of is nobody's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from opendsec.backends.base import Capability
from opendsec.backends.container import ContainerBackend
from opendsec.backends.container_policy import Lock, LockedPlan
from opendsec.errors import CapacityError, InvalidSpecError, OpenDSecError, StartError
from opendsec.fncall.box import USER_ID, Box, writable_places
from opendsec.fncall.member import Group, Member
from opendsec.fncall.settings import FnCallSettings
from opendsec.fncall.zygote import ImportFailedError, Zygote, start_zygote
from opendsec.guest.base import GuestError, GuestLostError
from opendsec.linux.launch import Bind
from opendsec.linux.slots import CALL_SLOTS
from opendsec.model.ids import SandboxId, new_token
from opendsec.model.spec import Resources, SandboxSpec

log = logging.getLogger(__name__)

START_MEMORY_MB = 4096
"""Limit while it starts and imports; each run has its own."""
_MISSING = re.compile(r"^ModuleNotFoundError: No module named '([\w.]{1,200})'[^\n]*\s*\Z", re.MULTILINE)
"""The end of the traceback of an import."""
START_PROCESSES = 512
_KILL, _SETGID, _SETUID = 5, 6, 7
"""linux/capability.h"""
CAPS = sum(1 << number for number in (0, _KILL, _SETGID, _SETUID))
"""CHOWN, KILL, SETGID, SETUID: what the guest agent and a fork server need to start others as nobody and end them."""
OPEN_FILES = 4096
SYSCTLS = {"kernel/shmmni": "0", "kernel/msgmni": "0", "kernel/sem": "0 0 0 0", "fs/mqueue/queues_max": "0"}
"""No System V or POSIX queue, segment or semaphore can be made: they would outlive their process."""
_SLOT_FILE = "slot"
_LIMITS = {Capability.MEMORY_LIMIT: "memory_mb", Capability.PIDS_LIMIT: "processes"}


class Slots:
    """Ranges of user ids that are of calls, each used by one container at a time."""

    def __init__(self) -> None:
        self._free = list(CALL_SLOTS)

    def take(self) -> int:
        """Raises CapacityError."""
        if not self._free:
            raise CapacityError("all containers for calls are in use or ending")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """When nothing uses it any more."""
        self._free.append(slot)


class Starting:
    """Makes and ends containers of pools."""

    def __init__(self, settings: FnCallSettings, containers: ContainerBackend) -> None:
        self._settings = settings
        self._containers = containers
        self._root = settings.state_dir / "containers"
        self._run = settings.run_dir
        self._slots = Slots()

    async def remove_leftovers(self) -> int:
        """End and remove whatever an earlier engine with these directories left. Returns how many containers."""
        for directory in (self._root, self._run):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = sorted(self._root.iterdir())
        for directory in found:
            try:
                slot = int((directory / _SLOT_FILE).read_text(encoding="ascii"))
            except (FileNotFoundError, ValueError):  # it was killed before anything was started
                pass
            else:
                await self._destroy(SandboxId(directory.name), slot)
            shutil.rmtree(directory)
        for directory in self._run.iterdir():
            shutil.rmtree(directory)
        return len(found)

    def user_of(self, member: Member) -> int:
        """The host's id of everything untrusted in it."""
        return self._containers.host_root(member.slot) + USER_ID

    async def start(
        self,
        group: Group,
        *,
        env: Mapping[str, str] | None = None,
        name: str = "",
        binds: tuple[Bind, ...] = (),
        on_gone: Callable[[], None] = lambda: None,
    ) -> Member:
        """A container, ready for its first run. Raises StartError, CapacityError, DiskFullError, and InvalidSpecError
        for imports the image has not; nothing is left then. `on_gone`: called when it could not be started, once
        nothing of it is left; what cannot be removed is logged, and keeps its slot and whatever else it was given.
        """
        name = name or self.new_name()
        try:
            slot = self._slots.take()
        except CapacityError:
            on_gone()
            raise
        try:
            return await self._start(SandboxId(name), slot, group, env or {}, binds)
        except BaseException:
            await asyncio.shield(self._undo(SandboxId(name), slot, on_gone))
            raise

    async def _undo(self, name: SandboxId, slot: int, on_gone: Callable[[], None]) -> None:
        if await self._forget(name, slot):
            on_gone()

    def unlimited(self) -> tuple[str, ...]:
        """What runs are asked to keep to and this host cannot hold them to."""
        return tuple(words for limit, words in _LIMITS.items() if limit not in self._containers.capabilities)

    def _resources(self) -> Resources:
        able = self._containers.capabilities
        return Resources(
            memory_limit_mb=START_MEMORY_MB if Capability.MEMORY_LIMIT in able else None,
            pids_limit=START_PROCESSES if Capability.PIDS_LIMIT in able else None,
        )

    def new_name(self) -> str:
        """Of a container."""
        return f"fnc-{self._settings.edge}-{new_token()}"

    async def _start(
        self,
        name: SandboxId,
        slot: int,
        group: Group,
        env: Mapping[str, str],
        binds: tuple[Bind, ...],
    ) -> Member:
        image = group.source
        assert image is not None
        state, run = self._make_directories(name, slot)
        plan = LockedPlan(
            sandbox_id=name,
            spec=SandboxSpec(
                image=image.name,
                resources=self._resources(),
            ),
            image=image,
            state_dir=state,
            run_dir=run,
            slot=slot,
            lock=replace(self._lock(), binds=binds),
        )
        running = await self._containers.start(plan)
        files = self._containers.group_files(name)
        try:
            box = Box(int(running.handle.data["pid"]), self._containers.host_root(slot) + USER_ID)
        except OSError as error:
            files.close()
            raise StartError(f"the container's places cannot be opened: {error}") from error
        member = Member(
            name=name,
            slot=slot,
            group=group,
            image=image,
            handle=running.handle,
            guest=running.guest,
            files=files,
            box=box,
            zygote=None,
            env=env,
            processes=0,
            memory_bytes=0,
        )
        try:
            if group.imports is not None:
                member.zygote = await self._zygote(member, group.imports)
            box.remember()  # the fork server's connection keeps the file its socket had
            member.processes = files.processes()
            member.memory_bytes = files.memory_bytes() or 0
        except BaseException:
            _let_go(member)
            raise
        return member

    async def _zygote(self, member: Member, imports: tuple[str, ...]) -> Zygote:
        try:
            return await start_zygote(member.guest, member.box, imports, member.environment({}))
        except ImportFailedError as failed:
            raise not_imported(str(failed), member.image.name) from failed
        except (GuestLostError, GuestError, OSError) as failed:
            raise StartError(f"the fork server did not start: {failed}") from failed

    def _lock(self) -> Lock:
        return Lock(
            tmpfs=writable_places(self._settings.disk_mb),
            caps=CAPS,
            sysctls={name: value for name, value in SYSCTLS.items() if Path("/proc/sys", name).exists()},
            rlimits={resource.RLIMIT_NOFILE: (OPEN_FILES, OPEN_FILES)},
        )

    def _make_directories(self, name: SandboxId, slot: int) -> tuple[Path, Path]:
        own, run = self._root / name, self._run / name
        own.mkdir(mode=0o700)
        (own / _SLOT_FILE).write_text(str(slot), encoding="ascii")
        state = own / "box"
        state.mkdir(mode=0o755)
        run.mkdir(mode=0o700)
        return state, run

    # The end

    async def end(self, member: Member) -> bool:
        """End it and remove everything of it; whether all is gone. What cannot be removed now is logged, and keeps its
        slot.
        """
        _let_go(member)
        try:
            await self._containers.stop(member.handle, grace_s=0)
        except OpenDSecError as error:
            log.warning("fncall_container_not_ended", extra={"fields": {"name": member.name, "reason": str(error)}})
            return False
        return await self._forget(SandboxId(member.name), member.slot)

    async def _forget(self, name: SandboxId, slot: int) -> bool:
        try:
            await self._destroy(name, slot)
            for directory in (self._root / name, self._run / name):
                with suppress(FileNotFoundError):
                    shutil.rmtree(directory)
        except (OpenDSecError, OSError) as error:
            log.warning("fncall_container_not_removed", extra={"fields": {"name": name, "reason": str(error)}})
            return False
        self._slots.give_back(slot)
        return True

    async def _destroy(self, name: SandboxId, slot: int) -> None:
        await self._containers.destroy(
            name, None, state_dir=self._root / name / "box", run_dir=self._run / name, slot=slot
        )


def not_imported(said: str, image: str) -> InvalidSpecError:
    """The refusal for what a fork server said of its imports: a module that is not there by name, else all of it."""
    missing = _MISSING.search(said)
    if missing is None:
        return InvalidSpecError(
            f"imports: {said}"[:2000],
            detail={"field": "imports"},
            remedy="name modules that the image's python3 can import",
        )
    return InvalidSpecError(
        f"imports: image {image} has no module {missing[1]}",
        detail={"field": "imports", "module": missing[1]},
        remedy="build an image that has it, or name modules that the image's python3 can import",
    )


def _let_go(member: Member) -> None:
    if member.zygote is not None:
        member.zygote.close()
        member.zygote = None
    member.box.close()
    member.files.close()
