"""Saving a sandbox whole, while it goes on: as a published snapshot, or as the base of a fork.

    turn → save memory and disk (backend, onto the state file system) → go on → hash, sync, publish (a thread)

The sandbox is held up only while the backend saves. Its pack and its snapshots come one after the other, and few at
once on a node. Saving belongs to the node, not to the request that asked for it: a client that leaves changes nothing,
and the same request with the same idempotency key follows it or hears its result again.

A fork is saved once and started many times, on this node. Its base has no name; it goes with the last sandbox that
reads it. An edge that dies over either leaves a directory the next one removes; nothing was published then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.edge.origins import Origins, new_token
from opendsec.edge.sandbox import Sandbox
from opendsec.model.ids import SandboxId
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import check_snapshot_name
from opendsec.store.progress import Progress
from opendsec.store.snapshots import Snapshot, summary_of
from opendsec.wire import codec
from opendsec.wire.contracts import SnapshotEvent, SnapshotRequest, SnapshotResult

log = logging.getLogger(__name__)

AT_ONCE = 2
TELL_EVERY_S = 1.0
REMEMBERED = 1000
"""Snapshots whose result can be asked for again."""


class Saving:
    """One sandbox being saved: where it stands, and how it ended."""

    def __init__(self, sandbox: Sandbox, request: SnapshotRequest) -> None:
        self.sandbox = sandbox
        self.request = request
        self.result: SnapshotResult | None = None
        self.error: errors.OpenDSecError | None = None
        self.progress = Progress(phase="waiting for its turn")
        self._ended = asyncio.Event()

    def tell(self, progress: Progress) -> None:
        """From its thread."""
        self.progress = progress

    def end(self, outcome: SnapshotResult | errors.OpenDSecError) -> None:
        """Once."""
        if isinstance(outcome, SnapshotResult):
            self.result = outcome
        else:
            self.error = outcome
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self._ended.is_set()

    async def wait(self) -> SnapshotResult:
        """Its result. Raises what it failed with."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    async def follow(self, request_id: str) -> AsyncGenerator[SnapshotEvent]:
        """Where it stands about once a second, then how it ended. What fails at once is raised."""
        told = False
        while not await self._ends_within(TELL_EVERY_S):
            told = True
            yield SnapshotEvent(phase=self.progress.phase, done=self.progress.done, total=self.progress.total)
        if self.error is None:
            yield SnapshotEvent(phase="saved", result=self.result)
            return
        if not told:
            raise codec.error_from_fields(codec.error_fields(self.error))
        yield SnapshotEvent(phase="failed", error={**codec.error_fields(self.error), "request_id": request_id})

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class Snapshotting:
    """All snapshots and bases of one edge."""

    def __init__(self, origins: Origins, *, at_once: int = AT_ONCE) -> None:
        self._origins = origins
        self._at_once = asyncio.Semaphore(at_once)
        self._savings: OrderedDict[tuple[SandboxId, str], Saving] = OrderedDict()

    def begin(self, sandbox: Sandbox, request: SnapshotRequest, *, key: str | None) -> Saving:
        """Start one, or find the one of this key. Raises InvalidSpecError, UnsupportedError, and ConflictError when it
        was another."""
        check_snapshot_name(request.name)
        sandbox.require(Capability.SNAPSHOT)
        _ = self._origins.published
        place = (sandbox.sandbox_id, secrets.token_hex(8) if key is None else key)
        known = self._savings.get(place)
        if known is not None:
            if known.request != request:
                raise errors.ConflictError(
                    "the same idempotency key was used for another snapshot of this sandbox",
                    remedy="use a new key for a new request",
                )
            return known
        saving = self._savings[place] = Saving(sandbox, request)
        while len(self._savings) > REMEMBERED:
            self._savings.popitem(last=False)
        sandbox.spawn(self._run(saving, self._publish, lambda: self._savings.pop(place, None)), "snapshot")
        return saving

    async def base_of(self, sandbox: Sandbox) -> Snapshot:
        """The base of a fork of it, which is there until `Origins.drop_base_if_unused` finds nobody needs it."""
        saving = Saving(sandbox, SnapshotRequest(name=new_token()))
        bases: list[Snapshot] = []

        def keep(saving: Saving, draft: Snapshot, made: Path) -> Snapshot:
            token = self._origins.publish_base(draft, made)
            bases.append(self._origins.base(draft.project, token))
            return bases[0]

        sandbox.spawn(self._run(saving, keep, lambda: None), "fork")
        await saving.wait()
        return bases[0]

    def _summary(self, snapshot: Snapshot) -> SnapshotSummary:
        """In a thread. A base is told to nobody."""
        if not any(file.digest for file in snapshot.files.values()):
            return summary_of(snapshot)
        return self._origins.published.summary(snapshot.project, snapshot.name)

    def _publish(self, saving: Saving, draft: Snapshot, made: Path) -> Snapshot:
        """In a thread."""
        snapshot = self._origins.published.publish(draft, made, on_progress=saving.tell)
        self._origins.trust(snapshot.project, snapshot.name)
        return snapshot

    async def _run(
        self,
        saving: Saving,
        keep: Callable[[Saving, Snapshot, Path], Snapshot],
        forget: Callable[[], Any],
    ) -> None:
        sandbox = saving.sandbox
        try:
            saving.end(await self._saved(saving, keep))
        except asyncio.CancelledError:
            saving.end(errors.NodeError("the edge was stopped while it saved; nothing was published", retryable=True))
            raise
        except errors.OpenDSecError as exc:
            saving.end(exc)
        except OSError as exc:
            log.warning("snapshot_failed", extra={"fields": {"sandbox_id": sandbox.sandbox_id, "reason": str(exc)}})
            saving.end(errors.NodeError(f"the sandbox could not be saved: {exc}"))
        finally:
            if not saving.has_ended:  # a fault of ours, which whoever spawned this logs: nobody may wait for it
                saving.end(errors.NodeError("the edge failed while it saved; see its log", retryable=False))
            if saving.result is None:
                forget()  # a repeat is a new try

    async def _saved(self, saving: Saving, keep: Callable[[Saving, Snapshot, Path], Snapshot]) -> SnapshotResult:
        sandbox = saving.sandbox
        began = time.monotonic()
        async with sandbox.turn, self._at_once, contextlib.AsyncExitStack() as stack:
            directory = await asyncio.to_thread(stack.enter_context, self._origins.saving())
            async with sandbox.saving(Capability.SNAPSHOT) as handle:
                saving.tell(Progress(phase="saving memory and disk"))
                saves = time.monotonic()
                await sandbox.backend.snapshot(handle, directory)
                took_s = time.monotonic() - saves
            # Asked now: what began while it was being saved may be part of it.
            draft = _draft(sandbox, saving.request.name)
            snapshot = await _whatever_happens(keep, saving, draft, directory)
        now = time.monotonic()
        summary = await asyncio.to_thread(self._summary, snapshot)
        return SnapshotResult(snapshot=summary, saving_ms=round(took_s * 1000, 3), duration_s=round(now - began, 4))


async def _whatever_happens(
    keep: Callable[[Saving, Snapshot, Path], Snapshot], saving: Saving, draft: Snapshot, directory: Path
) -> Snapshot:
    """In a thread; its directory stays until it has ended, also when nobody waits for it any more."""
    keeping = asyncio.ensure_future(asyncio.to_thread(keep, saving, draft, directory))
    try:
        return await asyncio.shield(keeping)
    finally:
        await asyncio.wait({keeping})


def _draft(sandbox: Sandbox, name: str) -> Snapshot:
    return Snapshot(
        name=name,
        project=sandbox.project,
        backend=sandbox.backend.kind,
        spec=sandbox.spec,
        source=sandbox.sandbox_id,
        binding=sandbox.backend.report().binding,
        image_digest=sandbox.image_digest,
        image_config=sandbox.image_config,
        image_layers=sandbox.image_layers,
        image_parts=sandbox.image_parts,
        next_command=sandbox.commands.next_number,
        sessions=sandbox.commands.session_names,
        files={},
        created_at=time.time(),
    )
