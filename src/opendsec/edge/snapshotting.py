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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opendsec.backends.base import Capability
from opendsec.edge.long_work import KnownWork, LongWork, Words
from opendsec.edge.origins import Origins, new_token
from opendsec.edge.sandbox import Sandbox
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import check_snapshot_name
from opendsec.store.progress import Progress
from opendsec.store.snapshots import Snapshot, summary_of
from opendsec.wire.contracts import SnapshotEvent, SnapshotRequest, SnapshotResult

AT_ONCE = 2
WORDS = Words(noun="snapshot", done="saved")


class Saving(LongWork[SnapshotResult, SnapshotEvent]):
    """One sandbox being saved: where it stands, and how it ended."""

    def __init__(self, sandbox: Sandbox, request: SnapshotRequest) -> None:
        super().__init__(sandbox, WORDS, SnapshotEvent)
        self.request = request


class Snapshotting:
    """All snapshots and bases of one edge."""

    def __init__(self, origins: Origins, *, at_once: int = AT_ONCE) -> None:
        self._origins = origins
        self._at_once = asyncio.Semaphore(at_once)
        self._known: KnownWork[Saving] = KnownWork(WORDS.noun)

    def begin(self, sandbox: Sandbox, request: SnapshotRequest, *, key: str | None) -> Saving:
        """Start one, or find the one of this key. Raises InvalidSpecError, UnsupportedError, and ConflictError when it
        was another."""
        check_snapshot_name(request.name)
        sandbox.require(Capability.SNAPSHOT)
        _ = self._origins.published
        place = self._known.place(sandbox, key)
        known = self._known.find(place, request)
        if known is not None:
            return known
        saving = Saving(sandbox, request)
        self._known.keep(place, saving)
        sandbox.spawn(self._run(saving, self._publish, lambda: self._known.forget(place)), "snapshot")
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
        try:
            await saving.settle(self._saved(saving, keep))
        finally:
            if saving.result is None:
                forget()

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
