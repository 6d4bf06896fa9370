"""One sandbox in the edge: performs what its lifecycle decides, and holds its connection, its journal and its commands.

Decisions are `lifecycle.step`; this file only acts. Everything long runs in the node's task group. A removal that
fails is tried again until nothing is left: a sandbox is never reported as ended while something of it may still exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opendsec import errors
from opendsec.backends.base import Backend, Capability, Handle, Parked, Running, StartPlan, Usage
from opendsec.edge import journal, lifecycle
from opendsec.edge.command import Command
from opendsec.edge.commands import CommandBook
from opendsec.edge.connection import Connection
from opendsec.edge.lifecycle import Instruction, Life
from opendsec.edge.origins import Origins
from opendsec.edge.recorder import RecentOutputs
from opendsec.edge.writer import WriterThread
from opendsec.guest.base import Guest, GuestError, GuestLostError
from opendsec.model.command import ExecRequest
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image
from opendsec.model.node import SandboxEnd, SandboxState, SandboxStatus
from opendsec.model.spec import Lifetime, SandboxSpec
from opendsec.wire import codec

log = logging.getLogger(__name__)

REMOVE_RETRY_S = 0.5
REMOVE_RETRY_MAX_S = 30.0
LAST_OUTPUT_S = 1.0
"""How long a stopped guest's connection may take to deliver what is still in it."""
_IN_BETWEEN = frozenset({SandboxState.CREATING, SandboxState.PAUSING, SandboxState.RESUMING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every sandbox of a node shares."""

    edge: str
    journal_writer: WriterThread
    output_writer: WriterThread
    recent: RecentOutputs
    start_turns: asyncio.Semaphore
    asking: asyncio.Semaphore
    """Turns to ask a guest of an earlier edge."""
    output_cap_bytes: int
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    on_change: Callable[[Sandbox], None]
    """Called after every step of its life."""
    on_ended: Callable[[Sandbox], None]
    origins: Origins


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of one sandbox."""

    own: Path
    """Journal and output files; stays until the sandbox is forgotten."""
    state: Path
    """The backend's, on the state file system."""
    run: Path
    """The backend's, on a tmpfs."""


class Sandbox:
    """See the module. `begin` starts a new one, `adopt` takes over one of an earlier edge."""

    def __init__(self, parts: Parts, backend: Backend, places: Places, created: journal.Created) -> None:
        self.sandbox_id: SandboxId = created.sandbox_id
        self.project = created.project
        self.spec: SandboxSpec = created.spec
        self.asked: SandboxSpec = created.asked or created.spec
        """As created, whatever was updated since: what a repeated create is compared with."""
        self.origin = created.origin
        self.slot = created.slot
        self.backend = backend
        self.places = places
        self.image_digest = created.image_digest
        self.image_config = created.image_config
        self.image_layers = created.image_layers
        self.image_parts = created.image_parts
        self.created_at = created.created_at
        self.ready_at: float | None = None
        self.ended_at: float | None = None
        self.handle: Handle | None = None
        self.life: Life = lifecycle.begin(created.spec.lifetime, created.created_mono_s)
        self.armed_at: float | None = None
        """When the node's timer looks at it next."""
        self.counted_creating = False
        """Owned by the node."""
        self.journal = journal.Journal(places.own, parts.journal_writer)
        self.commands = CommandBook(
            self,
            spec=created.spec,
            image=created.image_config,
            file=self.journal,
            output_writer=parts.output_writer,
            recent=parts.recent,
            output_cap_bytes=parts.output_cap_bytes,
            first=created.first_command,
            sessions=created.sessions,
        )
        self.connection = Connection(self, parts.asking)
        self.turn = asyncio.Lock()
        """Held while its state or its changes are being saved."""
        self._parts = parts
        self._start_failure: errors.OpenDSecError | None = None
        """When it is about what was asked for: told as it is, since a repeat would fail alike."""
        self._work_begun = 0
        self._updating = asyncio.Lock()
        self._pending: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    # Facts

    @property
    def state(self) -> SandboxState:
        return self.life.state

    @property
    def live(self) -> bool:
        return self.life.state not in lifecycle.ENDED_STATES

    @property
    def guest(self) -> Guest:
        """The present connection. Raises ConflictError before there is one."""
        return self.connection.guest

    def status(self, *, with_usage: bool = False) -> SandboxStatus:
        """As the API tells it."""
        shift = time.time() - time.monotonic()
        idle, hard = lifecycle.idle_expires_at(self.life), lifecycle.max_expires_at(self.life)
        return SandboxStatus(
            sandbox_id=self.sandbox_id,
            project=self.project,
            edge=self._parts.edge,
            state=self.life.state,
            spec=self.spec,
            image_digest=self.image_digest,
            image_parts=self.image_parts,
            created_at=self.created_at,
            ready_at=self.ready_at,
            ended_at=self.ended_at,
            end_reason=self.life.end_reason,
            end_detail=self.life.end_detail,
            running_commands=self.commands.running,
            idle_expires_at=None if idle is None else idle + shift,
            max_expires_at=None if hard is None else hard + shift,
            memory_bytes=self.usage().memory_bytes if with_usage and self.handle is not None and self.live else None,
        )

    def usage(self) -> Usage:
        """Counters now; all unknown once its control groups are gone, which may happen at any moment of its end."""
        try:
            return Usage() if self.handle is None else self.backend.usage(self.handle)
        except OSError as exc:
            log.debug("usage_unknown", extra={"fields": {"sandbox_id": self.sandbox_id, "reason": str(exc)}})
            return Usage()

    # Requests

    async def wait_ready(self) -> None:
        """Until it runs. Raises StartError when it could not be started, SandboxExitedError when it ended meanwhile."""
        while self.life.state is SandboxState.CREATING:
            await self.changed()
        if self.life.end_reason is SandboxEnd.START_FAILED:
            await self.wait_ended()
            if self._start_failure is not None:
                raise codec.error_from_fields(codec.error_fields(self._start_failure))
            raise errors.StartError(
                f"the sandbox could not be started: {self.life.end_detail}", sandbox_id=self.sandbox_id
            )
        if self.life.end_reason is not None:
            lifecycle.refuse_unless_running(self.life)

    async def delete(self) -> None:
        """End it and wait until nothing is left."""
        self.apply(lifecycle.DeleteRequested(time.monotonic()))
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Until nothing of it is left."""
        while self.live:
            await self.changed()

    async def pause(self) -> None:
        """Pause it; at once when it is paused. Raises UnsupportedError, ConflictError, SandboxExitedError."""
        self.require(Capability.PAUSE)
        self.apply(lifecycle.PauseRequested(time.monotonic()))
        while self.life.state is SandboxState.PAUSING:
            await self.changed()
        if self.life.state is SandboxState.RUNNING:
            raise errors.SandboxError(
                "the sandbox could not be paused; it goes on running", sandbox_id=self.sandbox_id, retryable=True
            )
        if self.life.end_reason is not None:
            lifecycle.refuse_unless_running(self.life)

    async def resume(self) -> None:
        """Until it runs, from whatever state leads there."""
        while self.life.state is not SandboxState.RUNNING:
            if self.life.state is SandboxState.PAUSED:
                self.apply(lifecycle.ResumeRequested(time.monotonic()))
            elif self.life.end_reason is not None:
                lifecycle.refuse_unless_running(self.life)
            await self.changed()

    async def update(self, *, lifetime: Lifetime | None, labels: Mapping[str, str] | None) -> None:
        """Change lifetime and labels, in the journal first. What is None stays, whoever else changes it meanwhile."""
        async with self._updating:
            now = lifetime or self.spec.lifetime
            lifecycle.step(self.life, lifecycle.LifetimeChanged(time.monotonic(), now))
            named = self.spec.labels if labels is None else labels
            if (now, named) != (self.spec.lifetime, self.spec.labels):
                await self.journal.append(journal.Updated(lifetime=now, labels=named))
            self.spec = replace(self.spec, lifetime=now, labels=named)
            self.apply(lifecycle.LifetimeChanged(time.monotonic(), now))

    @contextlib.asynccontextmanager
    async def working(self, needs: Capability | None = None) -> AsyncIterator[Guest]:
        """While an operation other than a command is in progress: it is running, and its idle time does not pass."""
        if needs is not None:
            self.require(needs)
        await self.connection.settled()
        await self.resume()
        self.work_begun()
        then = self.life
        try:
            yield self.guest
        except GuestLostError as exc:
            if self.life.end_reason is not None:
                lifecycle.refuse_unless_running(self.life)
            parked = lifecycle.parked_since(self.life, then, parks=self.backend.parks)
            why = "the sandbox was paused meanwhile" if parked else "the connection to the guest agent was lost"
            raise errors.SandboxLostError(why, sandbox_id=self.sandbox_id, retryable=True) from exc
        finally:
            self.work_ended()

    @contextlib.asynccontextmanager
    async def saving(self, what: Capability) -> AsyncIterator[Handle]:
        """While what it has written is being packed, or all of it saved, running or paused: no time limit ends it
        meanwhile. One that is parked is woken for it, and parked again unless somebody has used it since.
        """
        self.require(what)
        while self.life.state in _IN_BETWEEN:
            await self.changed()
        parked = self.backend.parks and self.life.state is SandboxState.PAUSED
        if parked:
            await self.resume()
        self.apply(lifecycle.PackBegun(time.monotonic()))
        assert self.handle is not None
        then = (self._work_begun, self.life.pauses)
        try:
            yield self.handle
        finally:
            self.apply(lifecycle.PackEnded(time.monotonic()))
            self.wake()
            if parked and then == (self._work_begun, self.life.pauses) and self.life.state is SandboxState.RUNNING:
                self.apply(lifecycle.PauseRequested(time.monotonic()))

    async def submit(self, request: ExecRequest) -> Command:
        """Start a command, or find it by its operation id."""
        self.require(Capability.EXEC)
        if request.pty is not None:
            self.require(Capability.PTY)
        if request.session is not None:
            self.require(Capability.SESSIONS)
        if self.life.state is not SandboxState.RUNNING and self.life.end_reason is None:
            await self.resume()
        return self.commands.submit(request, self.work_begun)

    def require(self, capability: Capability) -> None:
        """Raises UnsupportedError when the backend has not declared it."""
        if capability not in self.backend.capabilities:
            raise errors.UnsupportedError(
                f"the {self.backend.kind.value} backend of this node does not offer {capability.value!r}",
                detail={"capability": capability.value},
                remedy="use a backend that does: docs/reference/backends.md",
            )
        why = self.backend.lacks(self.image_config).get(capability)
        if why is not None:
            raise errors.UnsupportedError(
                f"this sandbox has no {capability.value}: {why}", detail={"capability": capability.value}
            )

    def work_begun(self) -> None:
        self._work_begun += 1
        self.apply(lifecycle.WorkBegun(time.monotonic()))

    def work_ended(self) -> None:
        self.apply(lifecycle.WorkEnded(time.monotonic()))

    def used(self) -> None:
        """An operation that needs nothing running."""
        self.apply(lifecycle.Used(time.monotonic()))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._parts.spawn(work, f"{self.sandbox_id}-{name}")

    # Life

    def never_began(self, detail: str) -> None:
        """It could not even be journalled; whoever waits for it is told."""
        self.life = lifecycle.ended(self.life, SandboxEnd.START_FAILED, detail, time.monotonic())
        self.wake()

    def begin(self, image: Image) -> None:
        """Start it; the journal has its first line already."""
        if self.life.state is SandboxState.STOPPING:
            self.apply(lifecycle.StartFailed(time.monotonic(), "it was deleted first"))
        else:
            self._pending = self._parts.spawn(self._start(image), f"{self.sandbox_id}-start")

    def apply(self, event: lifecycle.Event) -> None:
        """One step of its life, and what follows from it."""
        before = self.life.state
        self.life, instructions = lifecycle.step(self.life, event)
        for instruction in instructions:
            self._perform(instruction)
        if self.life.state is not before:
            log.debug(
                "sandbox_state", extra={"fields": {"sandbox_id": self.sandbox_id, "state": self.life.state.value}}
            )
            self.wake()
        self._parts.on_change(self)

    def _perform(self, instruction: Instruction) -> None:
        if instruction is Instruction.CANCEL_PENDING:
            # None: its first line is being written; the start that follows settles at once.
            if self._pending is not None:
                self._pending.cancel()
        elif instruction is Instruction.PAUSE:
            self._pending = self._parts.spawn(self._pause(), f"{self.sandbox_id}-pause")
        elif instruction is Instruction.RESUME:
            self._pending = self._parts.spawn(self._resume(), f"{self.sandbox_id}-resume")
        elif instruction is Instruction.RECORD_ENDING:
            # When this line is lost, a new edge finds the sandbox gone or runs into its limits again.
            self.journal.append_soon(
                journal.Ending(reason=self.life.end_reason or SandboxEnd.STOPPED, detail=self.life.end_detail)
            )
        elif instruction is Instruction.REMOVE:
            self._parts.spawn(self._remove(), f"{self.sandbox_id}-remove")
        elif instruction is Instruction.RECORD_ENDED:
            self.ended_at = time.time()
            self.journal.append_soon(journal.Ended(ended_at=self.ended_at))
            self.journal.close_soon()
            self._parts.on_ended(self)

    async def _start(self, image: Image) -> None:
        try:
            async with self._parts.start_turns:
                running = await self.backend.start(await self._start_plan(image))
                self.handle, self.connection.present = running.handle, running.guest
            ready_at = time.time()
            await self.journal.append(_started_record(running.handle, ready_at))
        except asyncio.CancelledError:
            self._settle_cancelled(lifecycle.StartFailed(time.monotonic(), "cancelled"))
            return
        except (errors.OpenDSecError, OSError, GuestLostError, GuestError) as exc:
            log.warning("start_failed", extra={"fields": {"sandbox_id": self.sandbox_id, "reason": str(exc)}})
            self._start_failure = exc if isinstance(exc, errors.ImageError | errors.RequestError) else None
            self.apply(lifecycle.StartFailed(time.monotonic(), str(exc)))
            return
        self.ready_at = ready_at
        self.connection.met(running.guest)
        self.apply(lifecycle.Started(time.monotonic()))
        if self.origin:
            self.commands.take_over_inherited()

    async def _start_plan(self, image: Image) -> StartPlan:
        snapshot = None
        if self.origin:
            use = self._parts.origins.use
            snapshot = await asyncio.to_thread(use, self.project, self.origin, self.sandbox_id)
        return StartPlan(
            sandbox_id=self.sandbox_id,
            spec=self.spec,
            image=image,
            state_dir=self.places.state,
            run_dir=self.places.run,
            slot=self.slot,
            snapshot=snapshot,
        )

    def _settle_cancelled(self, event: lifecycle.Event) -> None:
        """A cancelled step has settled. When it is the whole edge that stops, nothing is settled: the next edge
        finds it in the journal.
        """
        task = asyncio.current_task()
        assert task is not None
        if self.life.state is not SandboxState.STOPPING:
            raise asyncio.CancelledError
        task.uncancel()
        self.apply(event)

    async def _pause(self) -> None:
        assert self.handle is not None
        try:
            await self.journal.append(journal.PauseState(paused=True))
            await self.backend.pause(self.handle)
            if self.backend.parks and self.connection.present is not None:
                await self.connection.present.aclose()  # nothing is at its other end
        except asyncio.CancelledError:
            self._settle_cancelled(lifecycle.PauseFailed(time.monotonic()))
            return
        except (errors.OpenDSecError, OSError) as exc:
            log.warning("pause_failed", extra={"fields": {"sandbox_id": self.sandbox_id, "reason": str(exc)}})
            self.journal.append_soon(journal.PauseState(paused=False))
            self.apply(lifecycle.PauseFailed(time.monotonic()))
            return
        self.apply(lifecycle.Paused(time.monotonic()))

    async def _resume(self) -> None:
        assert self.handle is not None
        try:
            await self.backend.resume(self.handle)
            if self.backend.parks or self.connection.present is None:
                await self.connection.meet_again(self.handle)
            await self.journal.append(journal.PauseState(paused=False))
        except asyncio.CancelledError:
            self._settle_cancelled(lifecycle.ResumeFailed(time.monotonic(), "cancelled"))
            return
        except (errors.OpenDSecError, OSError) as exc:
            self.apply(lifecycle.ResumeFailed(time.monotonic(), str(exc)))
            return
        self.apply(lifecycle.Resumed(time.monotonic()))

    async def _remove(self) -> None:
        delay = REMOVE_RETRY_S
        while True:
            try:
                await self._remove_once()
                break
            except (errors.OpenDSecError, OSError) as exc:
                log.exception(
                    "remove_failed",
                    extra={"fields": {"sandbox_id": self.sandbox_id, "reason": str(exc), "again_in_s": delay}},
                )
            await asyncio.sleep(delay)
            delay = min(delay * 2, REMOVE_RETRY_MAX_S)
        self.apply(lifecycle.Removed(time.monotonic()))

    async def _remove_once(self) -> None:
        if self.handle is not None:
            await self.backend.stop(self.handle, grace_s=0.0)
        guest = self.connection.present
        if guest is not None:
            if self.commands.running:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_OUTPUT_S):
                        await guest.wait_closed()
            await guest.aclose()
        await self.commands.wait_idle()
        while self.life.packing:  # it gives up as soon as it sees that the sandbox ends
            await self.changed()
        await self.backend.destroy(
            self.sandbox_id, self.handle, state_dir=self.places.state, run_dir=self.places.run, slot=self.slot
        )
        await asyncio.to_thread(_remove_empty, self.places.state, self.places.run)
        if self.origin:
            await asyncio.to_thread(self._parts.origins.release, self.project, self.origin, self.sandbox_id)

    # The connection

    async def connected(self) -> Guest | None:
        """The present connection; waits for the first one after a restart. None when the sandbox is ending."""
        return self.connection.present or await self.connection.reconnected(None)

    async def reconnected(self, lost: Guest | None) -> Guest | None:
        """A connection that is not `lost`, once the sandbox is not parked; None when it is ending."""
        return await self.connection.reconnected(lost)

    async def changed(self) -> None:
        """Until its state is another, or `wake` was called."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self) -> None:
        """Whoever waits for a change looks again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def why_lost(self) -> tuple[SandboxEnd, str]:
        """What is told of one whose guest agent is gone."""
        killed = self.usage().oom_kills
        if killed and killed > self.commands.oom_kills:
            return SandboxEnd.OOM, "its guest agent was killed for lack of memory"
        return SandboxEnd.GUEST_LOST, "its guest agent is gone"

    # After a restart of the edge

    def adopt(self, found: Running | Parked, *, paused: bool) -> None:
        """It runs (or is paused): take it over. A parked one is not woken, nor one that is paused and did not answer in
        time, and what it was at waits."""
        self.handle = found.handle
        self.life = lifecycle.adopt(self.spec.lifetime, self.life.created_at, time.monotonic(), paused=paused)
        if isinstance(found, Running):
            self.connection.met(found.guest)

    def adopt_unreached(self) -> None:
        """It lives, and has not answered yet: take it over without a connection, and go on asking for one. Commands
        wait for it; a slow answer costs nobody a sandbox.
        """
        assert self.handle is not None
        self.life = lifecycle.adopt(self.spec.lifetime, self.life.created_at, time.monotonic())
        self.connection.reach(self.handle)

    def finish_removal(self, reason: SandboxEnd, detail: str) -> None:
        """It was ending, or nothing of it runs any more: remove what is left."""
        self.life = lifecycle.adopt(self.spec.lifetime, self.life.created_at, time.monotonic())
        self.apply(lifecycle.Perished(time.monotonic(), reason, detail))

    def recall_ended(self, reason: SandboxEnd, detail: str, ended_at: float) -> None:
        """It had ended before; it is kept for those who still ask."""
        self.ended_at = ended_at
        self.life = lifecycle.ended(self.life, reason, detail, time.monotonic() - max(0.0, time.time() - ended_at))


def _started_record(handle: Handle, ready_at: float) -> journal.Started:
    return journal.Started(
        backend=handle.backend.value, handle_version=handle.version, handle=handle.data, ready_at=ready_at
    )


def _remove_empty(*directories: Path) -> None:
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            directory.rmdir()
