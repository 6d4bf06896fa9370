"""What a new edge finds of an earlier one, and what becomes of it.

| the journal says       | and                  | then                                                    |
| ---------------------- | -------------------- | ------------------------------------------------------- |
| no whole first line    |                      | nothing was started: the directory is removed           |
| created                | no `started`         | half-made: removed, `start_failed`                      |
| created, started       | the backend finds it | adopted; its commands go on without a gap               |
| …, paused              | and parked           | adopted as it is; its commands wait and go on with it   |
| …, paused              | it runs still        | paused once more, for nobody was told it was resumed    |
| created, started       | it lives, and is     | adopted without a connection, which is asked for while  |
|                        | silent for now, or   | it lives (`REACH_S`); its commands wait for it. A       |
|                        | `ADOPT_S` are over   | paused one is met when it is resumed                    |
| created, started       | it does not          | removed, `guest_lost`; its commands end `sandbox_ended` |
| created, started       | we lack descriptors  | the edge ends: another one may have them                |
| …, a damaged line      | no `ending`          | removed, `node_lost`; its commands end `sandbox_ended`  |
| …, ending              | no `ended`           | half-deleted: the removal is finished                   |
| …, ended               |                      | kept for those who still ask                            |
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from opendsec import errors
from opendsec.backends.base import Backend, Capability, Handle, Parked, Running
from opendsec.edge import journal
from opendsec.edge.connection import is_our_own_want
from opendsec.edge.sandbox import Parts, Places, Sandbox
from opendsec.guest.base import GuestError, GuestLostError, KnownCommand
from opendsec.model.ids import SandboxId, is_id_of
from opendsec.model.node import SandboxEnd
from opendsec.model.spec import BackendKind
from opendsec.server.streams import first_failure

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0
ADOPT_S = 10.0
"""An edge answers no later: who has not been met by then is asked on, beside everything else."""
PAUSE_S = 5.0
ADOPT_TRIES = 3
ADOPT_PAUSE_S = 0.5


class Enrol(Protocol):
    """How the node takes a found sandbox in."""

    def __call__(self, sandbox: Sandbox, *, live: bool) -> None: ...


@dataclass(slots=True)
class Found:
    """One sandbox as its journal tells it."""

    created: journal.Created
    started: journal.Started | None = None
    paused: bool = False
    ending: journal.Ending | None = None
    ended: journal.Ended | None = None
    updated: journal.Updated | None = None
    damage: str = ""
    """What is wrong with the rest of its journal."""
    commands: list[tuple[int, journal.OfCommand]] = field(default_factory=list)

    @property
    def handle(self) -> Handle | None:
        if self.started is None:
            return None
        return Handle(
            backend=BackendKind(self.started.backend),
            sandbox_id=self.created.sandbox_id,
            version=self.started.handle_version,
            data=self.started.handle,
        )


@contextlib.asynccontextmanager
async def sole_edge(state_dir: Path) -> AsyncIterator[None]:
    """While this process owns the state directory. Waits a little for an edge that is just ending; raises
    ConflictError then.
    """
    fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_WAIT_S
        while not _locked(fd):
            if time.monotonic() > until:
                raise errors.ConflictError(
                    f"another edge is using {state_dir}", remedy="stop it, or give this one another name"
                )
            await asyncio.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def scan(root: Path, run_root: Path, *, edge: str) -> list[Found]:
    """Read every journal; remove what was never begun and run directories of this edge's that nobody owns.

    Blocking. Raises OSError, JournalError.
    """
    found = []
    for directory in sorted(root.iterdir()):
        one = _read(directory)
        if one is None:
            shutil.rmtree(directory)
        else:
            found.append(one)
    owned = {one.created.sandbox_id for one in found}
    for directory in run_root.iterdir():
        if directory.name not in owned and is_id_of(edge, directory.name):
            shutil.rmtree(directory)
    return found


def _read(directory: Path) -> Found | None:
    try:
        lines = journal.read(directory)
    except FileNotFoundError:
        return None
    except journal.JournalError as exc:
        if not exc.before:
            raise
        log.error("journal_damaged", extra={"fields": {"reason": str(exc)}})  # noqa: TRY400 - it is no surprise
        found = replay(exc.before)
        found.damage = f"its journal is damaged: {exc.message}"
        return found
    return None if not lines else replay(lines)


def replay(lines: list[tuple[int, journal.Record]]) -> Found:
    """The journal's lines, summed up. Raises JournalError when the first is not `created`."""
    first = lines[0][1]
    if not isinstance(first, journal.Created):
        raise journal.JournalError("a journal does not begin with `created`")
    found = Found(first)
    for position, record in lines[1:]:
        match record:
            case journal.Started():
                found.started = record
            case journal.PauseState():
                found.paused = record.paused
            case journal.Ending():
                found.ending = record
            case journal.Ended():
                found.ended = record
            case journal.Updated():
                found.updated = record
            case journal.Intent() | journal.Result() | journal.Refused():
                found.commands.append((position, _without_output(record)))
            case journal.Created():
                raise journal.JournalError(f"the journal of {first.sandbox_id} has two beginnings")
    return found


def _without_output(record: journal.OfCommand) -> journal.OfCommand:
    """Output is read from the journal when somebody asks: memory may not hold all that of all sandboxes at once."""
    if not isinstance(record, journal.Result):
        return record
    return msgspec.structs.replace(
        record,
        stdout=None if record.stdout is None else b"",
        stderr=None if record.stderr is None else b"",
    )


async def adopt_all(
    found: list[Found],
    *,
    parts: Parts,
    backends: Mapping[BackendKind, Backend],
    unavailable: Mapping[BackendKind, str],
    places: Callable[[SandboxId], Places],
    enrol: Enrol,
) -> None:
    """Make sandboxes of everything found, many at a time. Raises BackendUnavailableError, NodeError."""
    until = asyncio.get_running_loop().time() + ADOPT_S
    _settle_slots(found)
    for what in found:
        _require_backend(what, backends, unavailable)

    async def one(what: Found) -> None:
        backend = backends[what.created.spec.backend]
        sandbox = _restored(what, parts, backend, places(what.created.sandbox_id))
        enrol(sandbox, live=what.ended is None)
        if what.ended is None:
            await _take_over(sandbox, what, parts.asking, until)

    try:
        async with asyncio.TaskGroup() as group:
            for what in found:
                group.create_task(one(what))
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


def _settle_slots(found: list[Found]) -> None:
    """A slot that was given away again proves its former owner removed, though the disk had no room for `ended`, or
    damaged it. Removing that one once more would take the other's addresses away.
    """
    owners: dict[int, Found] = {}
    for what in sorted((what for what in found if what.ended is None), key=lambda what: what.created.created_mono_s):
        former = owners.get(what.created.slot)
        if former is not None and (former.ending is not None or former.damage):
            former.ending = former.ending or journal.Ending(reason=SandboxEnd.NODE_LOST, detail=former.damage)
            former.ended = journal.Ended(ended_at=time.time())
        owners[what.created.slot] = what


def _require_backend(
    what: Found, backends: Mapping[BackendKind, Backend], unavailable: Mapping[BackendKind, str]
) -> None:
    """Sandboxes whose backend is not there can be neither adopted nor removed: better no edge than one that lies."""
    kind = what.created.spec.backend
    if kind not in backends or (what.ended is None and kind in unavailable):
        raise errors.BackendUnavailableError(
            f"sandbox {what.created.sandbox_id} needs the {kind.value} backend, which this edge does not have: "
            + unavailable.get(kind, "it was not given one"),
            remedy="start the edge with that backend working until its sandboxes have ended",
        )


def _restored(what: Found, parts: Parts, backend: Backend, where: Places) -> Sandbox:
    sandbox = Sandbox(parts, backend, where, what.created)
    if what.started is not None:
        sandbox.handle, sandbox.ready_at = what.handle, what.started.ready_at
    if what.updated is not None:
        sandbox.spec = replace(sandbox.spec, lifetime=what.updated.lifetime, labels=what.updated.labels)
    for position, record in what.commands:
        sandbox.commands.restore(position, record)
    if what.ended is not None:
        reason, detail = (
            (what.ending.reason, what.ending.detail) if what.ending is not None else (SandboxEnd.GUEST_LOST, "")
        )
        sandbox.recall_ended(reason, detail, what.ended.ended_at)
    return sandbox


async def _take_over(sandbox: Sandbox, what: Found, asking: asyncio.Semaphore, until: float) -> None:
    if what.ending is not None:
        await sandbox.commands.close_unfinished()
        sandbox.finish_removal(what.ending.reason, what.ending.detail)
    elif what.damage:
        await sandbox.commands.close_unfinished()
        sandbox.finish_removal(SandboxEnd.NODE_LOST, what.damage)
    elif sandbox.handle is None:
        sandbox.finish_removal(SandboxEnd.START_FAILED, "the edge was restarted while it was starting")
    elif why := await _adopt(sandbox, sandbox.handle, asking, until, paused=what.paused):
        await sandbox.commands.close_unfinished()
        sandbox.finish_removal(SandboxEnd.GUEST_LOST, why)


async def _adopt(sandbox: Sandbox, handle: Handle, asking: asyncio.Semaphore, until: float, *, paused: bool) -> str:
    """Take a running sandbox over; else why it cannot be. Raises NodeError when that is no fault of the sandbox."""
    time_limit = asyncio.timeout_at(until)
    try:
        async with time_limit, asking:
            again = await _found_again(sandbox.backend, handle, paused=paused)
    except TimeoutError as exc:
        if not (time_limit.expired() and paused and await _still_paused(sandbox, handle)):
            _not_met(sandbox, exc)
            _go_on_unreached(sandbox, handle, paused=paused)
        return ""
    except (errors.OpenDSecError, OSError, GuestError, GuestLostError) as exc:
        _not_met(sandbox, exc)
        if is_our_own_want(exc):
            raise errors.NodeError(
                f"sandbox {sandbox.sandbox_id} cannot be taken over: {exc}",
                remedy="raise the edge's limits (LimitNOFILE, MemoryMax) and start it again; its sandboxes run on",
            ) from exc
        if isinstance(exc, GuestLostError | errors.NodeError):
            _go_on_unreached(sandbox, handle, paused=paused)
            return ""
        return f"it did not answer the restarted edge: {exc}"
    if again is None:
        return "it was gone when the edge was restarted"
    if again.paused is not paused:
        sandbox.journal.append_soon(journal.PauseState(paused=again.paused))
    _go_on(sandbox, again)
    return ""


def _not_met(sandbox: Sandbox, why: Exception) -> None:
    reason = str(why) or "there was no time to ask"
    log.warning("not_adopted", extra={"fields": {"sandbox_id": sandbox.sandbox_id, "reason": reason}})


async def _still_paused(sandbox: Sandbox, handle: Handle) -> bool:
    """Take over one that was paused and could not be met in time: it stays so. Whether it is."""
    if not sandbox.backend.parks:
        try:
            async with asyncio.timeout(PAUSE_S):
                await sandbox.backend.pause(handle)  # asking may have let it go on
        except (errors.OpenDSecError, OSError):
            return False
    _go_on(sandbox, _Again(found=Parked(handle=handle), paused=True))
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A sandbox met again, and what its guest says of its commands (nothing while it is parked)."""

    found: Running | Parked
    paused: bool
    known: list[KnownCommand] = field(default_factory=list)


async def _found_again(backend: Backend, handle: Handle, *, paused: bool) -> _Again | None:
    """As `_find`, with patience for the kernel's refusals, which may pass."""
    for _ in range(ADOPT_TRIES - 1):
        with contextlib.suppress(OSError):
            return await _find(backend, handle, paused=paused)
        await asyncio.sleep(ADOPT_PAUSE_S)
    return await _find(backend, handle, paused=paused)


async def _find(backend: Backend, handle: Handle, *, paused: bool) -> _Again | None:
    if backend.parks:
        return await _find_parking(backend, handle, paused=paused)
    if paused or Capability.PAUSE in backend.capabilities:
        # A guest that stands still cannot answer; an edge that died while it packed or saved has left it so.
        with contextlib.suppress(errors.SandboxLostError):
            await backend.resume(handle)
    running = await backend.recover(handle)
    if running is None:
        return None
    assert isinstance(running, Running)
    known = await running.guest.list_commands()
    if paused:
        await backend.pause(handle)
    return _Again(found=running, paused=paused, known=known)


async def _find_parking(backend: Backend, handle: Handle, *, paused: bool) -> _Again | None:
    found = await backend.recover(handle)
    if found is None or isinstance(found, Parked):
        return None if found is None else _Again(found=found, paused=True)
    known = await found.guest.list_commands()
    if not paused:
        return _Again(found=found, paused=False, known=known)
    try:
        await backend.pause(handle)
    except (errors.OpenDSecError, OSError) as exc:
        log.warning("pause_failed", extra={"fields": {"sandbox_id": handle.sandbox_id, "reason": str(exc)}})
        return _Again(found=found, paused=False, known=known)
    await found.guest.aclose()
    return _Again(found=Parked(handle=handle), paused=True)


def _go_on_unreached(sandbox: Sandbox, handle: Handle, *, paused: bool) -> None:
    """It may only be slow: many are met at once, and some are emulated. A paused one of a backend that parks needs no
    connection; any other runs now.
    """
    if paused and sandbox.backend.parks:
        _go_on(sandbox, _Again(found=Parked(handle=handle), paused=True))
        return
    if paused:
        sandbox.journal.append_soon(journal.PauseState(paused=False))
    sandbox.adopt_unreached()
    for _ in sandbox.commands.unfinished():
        sandbox.life = replace(sandbox.life, busy=sandbox.life.busy + 1)
    sandbox.commands.resume_when_awake()


def _go_on(sandbox: Sandbox, again: _Again) -> None:
    sandbox.adopt(again.found, paused=again.paused)
    for _ in sandbox.commands.unfinished():
        sandbox.life = replace(sandbox.life, busy=sandbox.life.busy + 1)
    if isinstance(again.found, Parked):
        sandbox.commands.resume_when_awake()
    else:
        sandbox.commands.resume({one.id: one for one in again.known}, again.found.guest)
