"""The shell of an edge: admits, creates, finds, lists and forgets sandboxes; runs their tasks, their time limits and
the recovery.

    async with Node(...) as node:          # locks the state directory, opens backends, adopts what an earlier edge left
        sandbox = await node.create(...)

Leaving cancels what the edge does, never what it has started: sandboxes and their commands go on and the next edge
adopts them. Refuses to share its state directory with another edge.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opendsec import errors
from opendsec.backends.base import Backend
from opendsec.edge import admission, journal, lifecycle, recovery
from opendsec.edge.admission import AdmissionLimits, NodeFacts
from opendsec.edge.connection import ASK_AT_ONCE
from opendsec.edge.facts import measure
from opendsec.edge.image_lookup import ImageLookup
from opendsec.edge.images import ImageSource
from opendsec.edge.offered import Offered
from opendsec.edge.origins import Origins, of_base, of_snapshot
from opendsec.edge.recorder import RecentOutputs
from opendsec.edge.sandbox import Parts, Places, Sandbox
from opendsec.edge.snapshot_spec import check_binding, from_snapshot, image_of
from opendsec.edge.timers import Timers
from opendsec.edge.writer import WriterThread
from opendsec.linux.spread import spread_subdirectories
from opendsec.model.ids import SandboxId, check_edge_name, edge_of
from opendsec.model.image import Image
from opendsec.model.node import MAX_REPORTED_IMAGES, NodeReport, SandboxEnd, SandboxState
from opendsec.model.spec import BackendKind, SandboxSpec, check_spec
from opendsec.store.snapshots import Snapshot

log = logging.getLogger(__name__)

FACTS_EVERY_S = 0.5
IMAGES_EVERY_S = 5.0
"""The names in the store are listed for the report; a create looks its image up by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Everything an edge is told."""

    edge: str = "local"
    state_dir: Path
    """Of this edge; on ext4, xfs or btrfs."""
    run_dir: Path
    """On a tmpfs; sandboxes get `sbx/<id>` below it."""
    start_concurrency: int = 16
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    output_cap_bytes: int = 512 * 1024 * 1024
    """Of output files per sandbox."""
    keep_ended_s: float = 3600.0
    """How long the status and the results of an ended sandbox can be asked for."""
    keep_ended: int = 10_000
    """At most so many ended ones."""


class Slots:
    """Small numbers, each used by one live sandbox at a time; the lowest free one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def reserve(self, slots: Iterable[int]) -> None:
        """At the start: these are in use."""
        used = set(slots)
        self._next = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._next) if slot not in used]


class Node:
    """One edge. `backends`: those this node offers, by kind; the composition root decides."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        backends: Mapping[BackendKind, Backend],
        images: ImageSource,
        version: str = "",
        origins: Origins | None = None,
    ) -> None:
        check_edge_name(settings.edge)
        self.settings = settings
        self._sandbox_root = settings.state_dir / "sandboxes"
        self._trash = settings.state_dir / "trash"
        self._run_root = settings.run_dir / "sbx"
        self._offered = Offered(backends)
        self._version = version
        self._sandboxes: dict[SandboxId, Sandbox] = {}
        self._ended: OrderedDict[SandboxId, Sandbox] = OrderedDict()
        self._live = 0
        self._creating = 0
        self._slots = Slots()
        self._timers: Timers[Sandbox] = Timers(self._deadline, self._due)
        self._facts = NodeFacts(memory_total_mb=0, memory_available_mb=0, disk_free_mb=0, cpu_count=0)
        self._image_names: list[str] = []
        self._lookup = ImageLookup(images)
        self.origins = origins or Origins(settings.state_dir, None)
        self._started_at = time.time()
        self._recent = RecentOutputs()
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._removals: WriterThread | None = None
        self.accepting = True

    # Lifetime

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for directory in (self._sandbox_root, self._trash, self._run_root):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for directory in (self._sandbox_root, self._run_root):
                spread_subdirectories(directory)
            await stack.enter_async_context(recovery.sole_edge(self.settings.state_dir))
            stack.callback(self._close_journals)
            stack.callback(self._lookup.close)
            journal_writer = await stack.enter_async_context(WriterThread("journal", at_once=True))
            output_writer = await stack.enter_async_context(WriterThread("output", at_once=True))
            self._removals = await stack.enter_async_context(WriterThread("removal"))
            await asyncio.to_thread(self.origins.open)
            await stack.enter_async_context(self._offered)
            group = await stack.enter_async_context(_CancelledAtExit())
            self._parts = Parts(
                edge=self.settings.edge,
                journal_writer=journal_writer,
                output_writer=output_writer,
                recent=self._recent,
                start_turns=asyncio.Semaphore(self.settings.start_concurrency),
                asking=asyncio.Semaphore(ASK_AT_ONCE),
                output_cap_bytes=self.settings.output_cap_bytes,
                spawn=group.spawn,
                on_change=self._timers.look,
                on_ended=self._sandbox_ended,
                origins=self.origins,
            )
            self._facts = await asyncio.to_thread(measure, self.settings.state_dir)
            await self._look_for_images()  # the first report tells them: `up` shows it
            await self._recover()
            group.spawn(self._measure_again_and_again(), "facts", vital=True)
            group.spawn(self._timers.run(), "timers", vital=True)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.accepting = False
        await self._stack.aclose()

    # Requests

    async def create(
        self, spec: SandboxSpec, *, project: str, sandbox_id: SandboxId, base: Snapshot | None = None
    ) -> Sandbox:
        """Admit and begin one; it is `creating` then. A repeat finds the first one, unless that could not be
        started: then it is a new try. `base`: of a fork it is one of. Raises for whatever forbids it, and then nothing
        is left.
        """
        while True:
            known = await self._known(spec, project, sandbox_id)
            if known is not None:
                return known
            self._check(spec, sandbox_id)
            backend = await self._offered.usable(spec.backend)
            admission.check_supported(spec, backend.capabilities)
            self._admit()
            start = await self._start_of(spec, project, backend, base)
            admission.check_image(start.spec, start.image)
            admission.check_memory(start.spec, self._facts)
            if sandbox_id not in self._sandboxes:
                self._check(spec, sandbox_id)
                self._admit()  # others were admitted while the image was looked up
                return await self._create(start, project, sandbox_id, backend)

    def get(self, sandbox_id: str, *, project: str | None) -> Sandbox:
        """A sandbox of this project (None: of any). Raises NotFoundError for unknown and foreign ones alike."""
        sandbox = self._sandboxes.get(SandboxId(sandbox_id))
        if sandbox is None or (project is not None and sandbox.project != project):
            raise errors.NotFoundError(f"no sandbox {sandbox_id[:80]!r}", detail={"sandbox_id": sandbox_id[:80]})
        return sandbox

    def all(self, *, project: str | None) -> list[Sandbox]:
        """Sandboxes of this project (None: all), live and ended, in the order of their ids."""
        return [one for _, one in sorted(self._sandboxes.items()) if project is None or one.project == project]

    async def backend(self, kind: BackendKind) -> Backend:
        """One that works here. Raises UnsupportedError (this edge was not given one), BackendUnavailableError."""
        return await self._offered.usable(kind)

    async def look_again(self) -> None:
        """Open the backends that did not work before; `report` says what has come of it."""
        await self._offered.look_again()

    def report(self) -> NodeReport:
        """How this edge is."""
        reasons = list(admission.refusals(self._facts, self.settings.limits, live=self._live, creating=self._creating))
        if not self.accepting:
            reasons.append("this edge is stopping")
        return NodeReport(
            edge=self.settings.edge,
            version=self._version,
            accepting=not reasons,
            reasons=tuple(reasons),
            backends=self._offered.reports(),
            images=tuple(self._image_names[:MAX_REPORTED_IMAGES]),
            image_count=len(self._image_names),
            live=self._live,
            creating=self._creating,
            memory_total_mb=self._facts.memory_total_mb,
            memory_available_mb=self._facts.memory_available_mb,
            disk_free_mb=self._facts.disk_free_mb,
            cpu_count=self._facts.cpu_count,
            started_at=self._started_at,
        )

    # Creating

    async def _known(self, spec: SandboxSpec, project: str, sandbox_id: SandboxId) -> Sandbox | None:
        """The sandbox of this id. One that could not be started (its edge was killed meanwhile, say) was nobody's:
        it is forgotten, and may be made again.
        """
        while (known := self._sandboxes.get(sandbox_id)) is not None:
            repeated = _repeated(known, spec, project)
            if repeated.life.end_reason is not SandboxEnd.START_FAILED:
                return repeated
            await repeated.wait_ended()
            if self._sandboxes.get(sandbox_id) is repeated:
                self._forget(repeated)
        return None

    def _check(self, spec: SandboxSpec, sandbox_id: SandboxId) -> None:
        check_spec(spec)
        if edge_of(sandbox_id) != self.settings.edge:
            raise errors.InvalidSpecError(
                f"sandbox_id {sandbox_id!r} belongs to another edge", detail={"field": "sandbox_id"}
            )
        if not self.accepting:
            raise errors.UnschedulableError("this edge is stopping", detail={"reasons": ["this edge is stopping"]})

    def _admit(self) -> None:
        admission.check(self._facts, self.settings.limits, live=self._live, creating=self._creating)

    async def _start_of(self, spec: SandboxSpec, project: str, backend: Backend, base: Snapshot | None) -> _Start:
        if base is not None:
            return _Start(spec=spec, asked=None, image=image_of(base), origin=of_base(base.name), snapshot=base)
        if spec.snapshot is None:
            return _Start(spec=spec, asked=None, image=await self._lookup.find(spec))
        snapshot = await self.origins.find(project, spec.snapshot)
        whole = from_snapshot(spec, snapshot)
        check_binding(snapshot, backend.report().binding)
        origin = of_snapshot(spec.snapshot)
        return _Start(spec=whole, asked=spec, image=image_of(snapshot), origin=origin, snapshot=snapshot)

    async def _create(self, start: _Start, project: str, sandbox_id: SandboxId, backend: Backend) -> Sandbox:
        assert self._parts is not None
        image = start.image
        created = journal.Created(
            sandbox_id=sandbox_id,
            project=project,
            spec=start.spec,
            asked=start.asked,
            origin=start.origin,
            first_command=1 if start.snapshot is None else start.snapshot.next_command,
            sessions=() if start.snapshot is None else start.snapshot.sessions,
            image_digest=image.digest,
            image_config=image.config,
            image_layers=image.layers,
            image_parts=image.parts,
            slot=self._slots.take(),
            created_at=time.time(),
            created_mono_s=time.monotonic(),
        )
        sandbox = Sandbox(self._parts, backend, self._places(sandbox_id), created)
        self._enrol(sandbox)
        places = sandbox.places
        try:
            await sandbox.journal.create(created, directories=(places.own, places.state, places.run))
        except errors.NodeError as exc:
            self._strike(sandbox)
            sandbox.never_began(str(exc))
            raise
        except asyncio.CancelledError:
            # The caller has gone, and may ask for the same id again: what has begun goes on.
            self._parts.spawn(self._begin_unattended(sandbox, image), f"{sandbox_id}-create")
            raise
        sandbox.begin(image)
        return sandbox

    async def _begin_unattended(self, sandbox: Sandbox, image: Image) -> None:
        if await sandbox.journal.is_begun():
            sandbox.begin(image)
        else:
            self._strike(sandbox)
            sandbox.never_began("its journal could not be written")

    def _enrol(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.sandbox_id] = sandbox
        self._live += 1
        self._creating += 1
        sandbox.counted_creating = True

    def _strike(self, sandbox: Sandbox) -> None:
        del self._sandboxes[sandbox.sandbox_id]
        self._live -= 1
        self._settled(sandbox)
        self._slots.give_back(sandbox.slot)

    def _settled(self, sandbox: Sandbox) -> None:
        if sandbox.counted_creating:
            sandbox.counted_creating = False
            self._creating -= 1

    # Time

    def _deadline(self, sandbox: Sandbox) -> float | None:
        if sandbox.counted_creating and sandbox.state is not SandboxState.CREATING:
            self._settled(sandbox)
        if self._sandboxes.get(sandbox.sandbox_id) is not sandbox:
            return None
        if sandbox.live:
            return lifecycle.deadline(sandbox.life)
        return (sandbox.life.ended_at or 0.0) + self.settings.keep_ended_s

    def _due(self, sandbox: Sandbox) -> None:
        if sandbox.live:
            sandbox.apply(lifecycle.TimePassed(time.monotonic()))
        else:
            self._forget(sandbox)

    async def _measure_again_and_again(self) -> None:
        images_due = 0.0
        while True:
            try:
                self._facts = await asyncio.to_thread(measure, self.settings.state_dir)
            except OSError as exc:
                # What was measured last counts until there is something newer.
                log.warning("facts_unknown", extra={"fields": {"reason": str(exc)}})
            if time.monotonic() >= images_due and await self._look_for_images():
                images_due = time.monotonic() + IMAGES_EVERY_S
            await asyncio.sleep(FACTS_EVERY_S)

    async def _look_for_images(self) -> bool:
        """Whether they are known now; else those known before count."""
        try:
            self._image_names = await self._lookup.names()
        except (OSError, errors.OpenDSecError) as exc:
            log.warning("images_unknown", extra={"fields": {"reason": str(exc)}})
            return False
        return True

    # The end of a sandbox

    def _sandbox_ended(self, sandbox: Sandbox) -> None:
        self._live -= 1
        self._settled(sandbox)
        self._slots.give_back(sandbox.slot)
        self._keep(sandbox)

    def _keep(self, sandbox: Sandbox) -> None:
        self._ended[sandbox.sandbox_id] = sandbox
        while len(self._ended) > self.settings.keep_ended:
            self._forget(next(iter(self._ended.values())))

    def _forget(self, sandbox: Sandbox) -> None:
        """Nobody asks any more: its files go, out of the way at once and for good in the background."""
        assert self._removals is not None
        assert self._parts is not None
        self._ended.pop(sandbox.sandbox_id, None)
        self._sandboxes.pop(sandbox.sandbox_id, None)
        self._timers.drop(sandbox)
        sandbox.commands.forget_all()
        sandbox.journal.close_soon()
        own, trash = sandbox.places.own, self._trash / f"{sandbox.sandbox_id}.{secrets.token_hex(4)}"
        removals = self._removals
        # In the journals' thread: a sandbox of the same id may be made next.
        moved = self._parts.journal_writer.run(lambda: _move(own, trash))
        moved.add_done_callback(_log_failed_removal)
        moved.add_done_callback(
            lambda _: removals.run(lambda: _remove_tree(trash)).add_done_callback(_log_failed_removal)
        )

    def _close_journals(self) -> None:
        for sandbox in self._sandboxes.values():
            sandbox.journal.close()

    # Recovery

    async def _recover(self) -> None:
        assert self._parts is not None
        assert self._removals is not None
        edge = self.settings.edge
        found = await asyncio.to_thread(recovery.scan, self._sandbox_root, self._run_root, edge=edge)
        self._removals.run(lambda: _empty(self._trash)).add_done_callback(_log_failed_removal)
        await self._offered.settled({one.created.spec.backend for one in found if one.ended is None})
        await recovery.adopt_all(
            found,
            parts=self._parts,
            backends=self._offered.backends,
            unavailable=self._offered.unavailable,
            places=self._places,
            enrol=self._enrol_found,
        )
        live = [one for one in self._sandboxes.values() if one.live]
        await asyncio.to_thread(self.origins.sweep, [one.sandbox_id for one in live])
        self._slots.reserve(one.slot for one in live)
        for sandbox in sorted(
            (one for one in self._sandboxes.values() if not one.live), key=lambda one: one.ended_at or 0.0
        ):
            self._keep(sandbox)
        for sandbox in list(self._sandboxes.values()):
            self._timers.look(sandbox)
        if found:
            log.info("recovered", extra={"fields": {"live": len(live), "ended": len(self._ended)}})

    def _enrol_found(self, sandbox: Sandbox, *, live: bool) -> None:
        self._sandboxes[sandbox.sandbox_id] = sandbox
        self._live += live

    # Places

    def _places(self, sandbox_id: SandboxId) -> Places:
        own = f"{self._sandbox_root}/{sandbox_id}"
        return Places(own=Path(own), state=Path(f"{own}/box"), run=Path(f"{self._run_root}/{sandbox_id}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a sandbox is started from."""

    spec: SandboxSpec
    """Whole."""
    asked: SandboxSpec | None
    """What the request said, where that is less."""
    image: Image
    origin: str = ""
    snapshot: Snapshot | None = None


class _CancelledAtExit:
    """A task group whose tasks are cancelled when the block is left, and whose tasks' failures are logged, not
    spread. The failure of a vital one ends the block: an edge without time limits would lie, and the next one takes
    everything over.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = False) -> asyncio.Task[None]:
        task = self._group.create_task(work if vital else _logged(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One cancelled before its first step has never touched its work.
        task.add_done_callback(lambda _: work.close())
        if self._leaving:
            task.cancel()  # what follows from the cancelled ones is the next edge's to do
        return task


async def _logged(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except Exception:
        log.exception("task_failed", extra={"fields": {"task": name}})


def _repeated(known: Sandbox, spec: SandboxSpec, project: str) -> Sandbox:
    if known.project != project or known.asked != spec:
        raise errors.ConflictError(
            "the same sandbox id or idempotency key was used for another request",
            detail={"sandbox_id": known.sandbox_id},
            remedy="use a new key for a new request",
        )
    return known


def _move(own: Path, trash: Path) -> None:
    if own.exists():
        own.rename(trash)


def _remove_tree(trash: Path) -> None:
    if trash.exists():
        shutil.rmtree(trash)


def _empty(trash: Path) -> None:
    for leftover in trash.iterdir():
        shutil.rmtree(leftover)


def _log_failed_removal(done: asyncio.Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("files_not_removed", extra={"fields": {"reason": str(error)}})
