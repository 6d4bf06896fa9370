"""Snapshots and forks over HTTP. Raw ASGI, because the answers are streams of lines.

    POST   /v1/sandboxes/{id}/snapshot        publish a snapshot (right build)
    POST   /v1/sandboxes/{id}/fork            start further sandboxes of the same project that go on from its state
    GET    /v1/snapshots                      those of the project
    DELETE /v1/snapshots?name=&force=BOOL     (right build)

A line comes about every second, so no time limit on the way cuts a long save. When a client leaves a fork, what was
started stays, and the same request with the same idempotency key names it and starts the rest; with `abandon` it ends
what was started, and under this key nothing is started any more. That is what the SDK does when its key is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import replace

from opendsec import errors
from opendsec.backends.base import Capability
from opendsec.edge.long_work import TELL_EVERY_S
from opendsec.edge.node import Node
from opendsec.edge.origins import of_base
from opendsec.edge.requests import (
    DEFAULT_PROJECT,
    flag,
    key_of,
    nothing_else,
    project_of,
    require_right,
    sandbox_id_for,
)
from opendsec.edge.sandbox import Sandbox
from opendsec.edge.snapshotting import Snapshotting
from opendsec.model.ids import SandboxId
from opendsec.model.spec import SandboxSpec, check_labels, check_seconds, check_snapshot_name
from opendsec.server.asgi import Receive, Scope, Send, query, read_body, request_id, send_json
from opendsec.server.streams import ndjson, send_stream
from opendsec.store.snapshots import Snapshot
from opendsec.wire import codec
from opendsec.wire.contracts import (
    MAX_FORKS,
    MAX_JSON_BODY,
    NDJSON_MEDIA_TYPE,
    RIGHT_BUILD,
    ForkItem,
    ForkRequest,
    SnapshotEvent,
    SnapshotList,
    SnapshotRequest,
)

FORKS_AT_ONCE = 64
REMEMBERED = 1000
"""Forks that were abandoned."""


class SnapshotRoutes:
    """One per edge."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._snapshotting = Snapshotting(node.origins)
        self._abandoned: OrderedDict[SandboxId, None] = OrderedDict()  # by the first of each fork

    async def snapshot(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST sandboxes/{id}/snapshot"""
        require_right(scope, RIGHT_BUILD)
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), SnapshotRequest)
        saving = self._snapshotting.begin(sandbox, request, key=key_of(scope))

        async def events() -> AsyncGenerator[SnapshotEvent]:
            async for event in saving.follow(request_id(scope)):
                yield event

        await send_stream(receive, send, ndjson(events()), media_type=NDJSON_MEDIA_TYPE)

    async def list_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET snapshots"""
        del receive
        nothing_else(query(scope))
        found = await asyncio.to_thread(self._node.origins.summaries, project_of(scope) or DEFAULT_PROJECT)
        await send_json(send, SnapshotList(items=tuple(found)))

    async def remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE snapshots"""
        del receive
        require_right(scope, RIGHT_BUILD)
        found = query(scope)
        name, force = check_snapshot_name(found.pop("name", "")), flag(found, "force")
        nothing_else(found)
        published = self._node.origins.published
        project = project_of(scope) or DEFAULT_PROJECT
        await send_json(send, await asyncio.to_thread(published.remove, project, name, force=force))

    async def fork(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """POST sandboxes/{id}/fork"""
        sandbox = self._node.get(sandbox_id, project=project_of(scope))
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), ForkRequest)
        _check_fork(request)
        edge = self._node.settings.edge
        ids = [sandbox_id_for(scope, edge, None, index=index) for index in range(request.count)]
        if request.abandon:
            lines = ndjson(self._abandon(sandbox.project, ids))
            await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)
            return
        sandbox.require(Capability.SNAPSHOT)
        lines = ndjson(self._forked(sandbox, _spec_of(sandbox, request), ids, request_id(scope)))
        await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)

    async def _forked(
        self, sandbox: Sandbox, spec: SandboxSpec, ids: list[SandboxId], asked_as: str
    ) -> AsyncGenerator[ForkItem]:
        """Each index once, then `done`. What keeps the sandbox from being saved is raised."""
        unborn = [one for one in ids if not self._known(one, sandbox.project)]
        base: Snapshot | None = None
        if unborn:
            saving = asyncio.ensure_future(self._snapshotting.base_of(sandbox))
            try:
                while not saving.done():
                    await asyncio.wait({saving}, timeout=TELL_EVERY_S)
                    if not saving.done():
                        yield ForkItem(phase="saving memory and disk")
            finally:
                if not saving.done():  # nobody will start from it
                    sandbox.spawn(self._drop_when_saved(saving), "fork-unwanted")
            base = await saving
        holding = None if base is None else asyncio.ensure_future(asyncio.to_thread(self._hold, base, unborn))
        try:
            if holding is not None:
                await asyncio.shield(holding)
            async for item in self._started(sandbox.project, spec, ids, base, asked_as):
                yield item
        finally:
            if base is not None and holding is not None:
                await asyncio.shield(asyncio.ensure_future(self._end_hold(base, holding, unborn)))
        yield ForkItem(done=True)

    async def _end_hold(self, base: Snapshot, holding: asyncio.Future[None], ids: list[SandboxId]) -> None:
        """After the thread that holds it, which nothing stops: it would hold it for ever."""
        await asyncio.wait({holding})
        unborn = [one for one in ids if not self._known(one, base.project)]
        await asyncio.to_thread(self._let_go, base, unborn)

    async def _abandon(self, project: str, ids: list[SandboxId]) -> AsyncGenerator[ForkItem]:
        """End what this fork has started; what goes on with it starts nothing more."""
        self._abandoned[ids[0]] = None
        while len(self._abandoned) > REMEMBERED:
            self._abandoned.popitem(last=False)
        ending = asyncio.ensure_future(self._end(project, ids))
        while not ending.done():
            await asyncio.wait({ending}, timeout=TELL_EVERY_S)
            if not ending.done():
                yield ForkItem(phase="ending")
        await ending
        yield ForkItem(done=True)

    async def _end(self, project: str, ids: list[SandboxId]) -> None:
        live = [self._node.get(one, project=project) for one in ids if self._known(one, project)]
        await asyncio.gather(*(one.delete() for one in live))

    async def _drop_when_saved(self, saving: asyncio.Future[Snapshot]) -> None:
        with contextlib.suppress(errors.OpenDSecError):
            base = await saving
            await asyncio.to_thread(self._let_go, base, [])

    def _hold(self, base: Snapshot, ids: list[SandboxId]) -> None:
        """For all that are to come: none of them ends it for the others."""
        for sandbox_id in ids:
            self._node.origins.use(base.project, of_base(base.name), sandbox_id)

    def _let_go(self, base: Snapshot, unborn: list[SandboxId]) -> None:
        for sandbox_id in unborn:
            self._node.origins.release(base.project, of_base(base.name), sandbox_id)
        self._node.origins.drop_base_if_unused(base.project, base.name)

    def _known(self, sandbox_id: SandboxId, project: str) -> bool:
        try:
            return self._node.get(sandbox_id, project=project).live
        except errors.NotFoundError:
            return False

    async def _found_or_created(
        self, project: str, spec: SandboxSpec, sandbox_id: SandboxId, base: Snapshot | None
    ) -> Sandbox:
        if self._known(sandbox_id, project):
            return self._node.get(sandbox_id, project=project)
        return await self._node.create(spec, project=project, sandbox_id=sandbox_id, base=base)

    async def _started(
        self, project: str, spec: SandboxSpec, ids: list[SandboxId], base: Snapshot | None, asked_as: str
    ) -> AsyncGenerator[ForkItem]:
        turns = asyncio.Semaphore(FORKS_AT_ONCE)

        async def one(index: int, sandbox_id: SandboxId) -> ForkItem:
            async with turns:
                try:
                    if ids[0] in self._abandoned:
                        raise errors.ConflictError("this fork was abandoned", remedy="use a new key")
                    sandbox = await self._found_or_created(project, spec, sandbox_id, base)
                    await sandbox.wait_ready()
                    return ForkItem(index=index, status=sandbox.status())
                except errors.OpenDSecError as exc:
                    exc.request_id, exc.sandbox_id = asked_as, sandbox_id
                    return ForkItem(index=index, error=codec.error_fields(exc))

        starting = {asyncio.ensure_future(one(index, sandbox_id)) for index, sandbox_id in enumerate(ids)}
        try:
            while starting:
                done, starting = await asyncio.wait(starting, timeout=TELL_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
                if not done:
                    yield ForkItem(phase="starting")
        finally:
            for task in starting:
                task.cancel()
            if starting:
                await asyncio.wait(starting)
            if ids[0] in self._abandoned:  # one may have been admitted since
                await asyncio.shield(asyncio.ensure_future(self._end(project, ids)))


def _check_fork(request: ForkRequest) -> None:
    """Raise InvalidSpecError naming the field."""
    if not 1 <= request.count <= MAX_FORKS:
        raise errors.InvalidSpecError(
            f"count: {request.count} is not between 1 and {MAX_FORKS}", detail={"field": "count"}
        )
    if request.labels is not None:
        check_labels(request.labels)
    if request.lifetime is not None:
        check_seconds(request.lifetime.ttl_running_stop, "ttl_running_stop")
        check_seconds(request.lifetime.ttl_max_stop, "ttl_max_stop")


def _spec_of(sandbox: Sandbox, request: ForkRequest) -> SandboxSpec:
    """As the source is; not from the snapshot the source may have been started from, but from the source."""
    return replace(
        sandbox.spec,
        snapshot=None,
        labels=sandbox.spec.labels if request.labels is None else request.labels,
        lifetime=request.lifetime or sandbox.spec.lifetime,
    )
