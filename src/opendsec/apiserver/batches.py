"""Starting many sandboxes with one request: split over the edges, told as they become ready.

Every index gets exactly one line, a status or a typed error; the last line says `done`. A line that was handed to the
connection counts as told. When the client leaves early, the sandboxes it was not told about are deleted, unless an
idempotency key was given: then they stay, and the same request returns them. An edge that goes away in the middle is
asked again for the same ids; what an edge refuses for lack of room is asked of the others once. With a key, what
started is written down before it is told: the same request tells how those are now and tries the others again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from opendsec import errors
from opendsec.apiserver.connection import ConnectionLostError
from opendsec.apiserver.creating import Caller, digest, gone_again
from opendsec.apiserver.creations import Claim, Creations
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.link import EdgeLink
from opendsec.apiserver.placement import may_try_elsewhere, order, refusal, split
from opendsec.apiserver.reclaim import Reclaimer
from opendsec.model.ids import SandboxId, edge_of, new_sandbox_id
from opendsec.model.spec import MAX_BATCH
from opendsec.wire import codec
from opendsec.wire.contracts import BatchItem, BatchRequest

Deliver = Callable[[bytes], Awaitable[None]]
"""Hands NDJSON lines to the client."""

_STATUS_AT_ONCE = 64
_PAUSE_S = 0.02
"""Before an edge that has cut us off is asked again."""


def check_batch(request: BatchRequest) -> BatchRequest:
    """The request itself, or InvalidSpecError."""
    if not 1 <= request.count <= MAX_BATCH:
        raise errors.InvalidSpecError(
            f"count: {request.count} is not between 1 and {MAX_BATCH}", detail={"field": "count"}
        )
    if request.sandbox_ids:
        raise errors.InvalidSpecError("sandbox_ids: chosen by the apiserver", detail={"field": "sandbox_ids"})
    return request


@dataclass(slots=True)
class _Run:
    """One batch in progress: which sandbox each index stands for, and what is still open."""

    request: BatchRequest
    caller: Caller
    deliver: Deliver
    ids: list[SandboxId]
    claim: Claim | None
    open: set[int] = field(default_factory=set)
    refused: dict[int, errors.OpenDSecError] = field(default_factory=dict)
    """Index → why its edge could not take it; another edge may."""
    asked: set[SandboxId] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    """With a key: written down as started, never to be started again."""

    async def tell(self, items: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Lines for indexes that are still open."""
        fresh = [(index, item) for index, item in items if index in self.open]
        if fresh:
            await self.deliver(b"".join(codec.encode({**item, "index": index}) + b"\n" for index, item in fresh))
            self.open.difference_update(index for index, _ in fresh)

    async def fail(self, indexes: Sequence[int], error: errors.OpenDSecError) -> None:
        """The same error for several indexes."""
        if self.open.isdisjoint(indexes):
            return
        error.request_id = error.request_id or self.caller.request_id
        fields = codec.error_fields(error)
        await self.tell([(index, {"status": None, "error": fields, "done": False}) for index in indexes])


class Batches:
    """Starts batches."""

    def __init__(self, edges: Edges, creations: Creations, reclaimer: Reclaimer) -> None:
        self._edges = edges
        self._creations = creations
        self._reclaimer = reclaimer

    async def run(self, request: BatchRequest, caller: Caller, deliver: Deliver) -> None:
        """Start them all and deliver a line for each, then `done`.

        Raises before the first line for what is wrong with the request.
        """
        if caller.idempotency_key is None:
            await self._run_fresh(request, caller, deliver, await self._choose(request.count), None)
            return
        async with self._creations.alone(caller.project, caller.idempotency_key):
            claim = await self._creations.claim(
                project=caller.project,
                key=caller.idempotency_key,
                body_digest=digest(request),
                sandbox_ids=await self._choose(request.count),
                timeout_s=caller.timeout_s,
            )
            await self._run_fresh(request, caller, deliver, claim.sandbox_ids, claim)

    async def abandon(self, project: str, key: str, keep: frozenset[int]) -> None:
        """End what the batch of this key started, but for the indexes to keep; the key starts nothing any more.

        Raises NotFoundError.
        """
        async with self._creations.alone(project, key):
            claim = await self._creations.find(project, key)
            unwanted = [one for index, one in enumerate(claim.sandbox_ids) if index not in keep]
            await self._reclaimer.add(project, unwanted)
            await self._creations.complete(claim)

    async def _choose(self, count: int) -> tuple[SandboxId, ...]:
        views = await self._edges.views()
        if not views:
            raise refusal({})
        shares = split(count, views)
        return tuple(new_sandbox_id(name) for name, share in shares.items() for _ in range(share))

    async def _run_fresh(
        self, request: BatchRequest, caller: Caller, deliver: Deliver, ids: Sequence[SandboxId], claim: Claim | None
    ) -> None:
        run = _Run(request, caller, deliver, list(ids), claim, open=set(range(len(ids))))
        if claim is not None:
            run.started = set(run.open if claim.completed else claim.started)
        whole = False
        try:
            await self._tell_statuses(run, sorted(run.started))
            await self._ask_all(run)
            if run.refused:
                await self._ask_elsewhere(run)
            if run.claim is not None and len(run.started) == request.count and not run.claim.completed:
                await self._creations.complete(run.claim)
            await deliver(codec.encode(BatchItem(done=True)) + b"\n")
            whole = True
        finally:
            if not whole and claim is None:
                untold = [run.ids[index] for index in run.open if run.ids[index] in run.asked]
                await self._reclaimer.add(caller.project, untold)

    async def _ask_all(self, run: _Run) -> None:
        shares: dict[str, list[int]] = {}
        for index in sorted(run.open):
            shares.setdefault(edge_of(run.ids[index]), []).append(index)
        async with asyncio.TaskGroup() as group:
            for indexes in shares.values():
                group.create_task(self._ask_edge(run, self._edges.of(run.ids[indexes[0]]), indexes))

    async def _ask_elsewhere(self, run: _Run) -> None:
        """Once more, on the edges that have not refused; what is refused again, or has nowhere to go, is told."""
        full = {edge_of(run.ids[index]) for index in run.refused}
        views = [view for view in await self._edges.views() if view.name not in full]
        refused, run.refused = run.refused, {}
        away = [index for index, error in refused.items() if isinstance(error, errors.ConnectError)]
        if run.claim is not None:  # an earlier request with this key may have reached that edge
            await self._reclaimer.add(run.caller.project, [run.ids[index] for index in away])
        if views:
            names = order(views, seed=secrets.randbits(32))
            for position, index in enumerate(sorted(refused)):
                run.ids[index] = new_sandbox_id(names[position % len(names)])
            if run.claim is not None:
                run.claim = await self._creations.move(run.claim, run.ids)
                run.ids = list(run.claim.sandbox_ids)
            await self._ask_all(run)
            refused = {index: run.refused.get(index, error) for index, error in refused.items()}
        for index in sorted(refused):
            await run.fail([index], refusal({edge_of(run.ids[index]): refused[index]}))

    async def _ask_edge(self, run: _Run, link: EdgeLink, indexes: Sequence[int]) -> None:
        """Ask one edge until it has said something about each index, or is away for too long."""
        give_up = asyncio.get_running_loop().time() + link.patience_s
        while asked := [index for index in indexes if index in run.open and index not in run.refused]:
            try:
                await self._ask_once(run, link, asked)
                left = [index for index in asked if index in run.open and index not in run.refused]
                await run.fail(left, errors.ProtocolError(f"edge {link.name} said nothing about this sandbox"))
            except ConnectionLostError as exc:
                if asyncio.get_running_loop().time() > give_up:
                    left = [index for index in asked if index in run.open]
                    await self._reclaim_unknown(run, left)
                    await run.fail(left, link.unknown_outcome(str(exc)))
                await asyncio.sleep(_PAUSE_S)
            except errors.OpenDSecError as exc:
                if may_try_elsewhere(exc):
                    run.refused.update((index, exc) for index in asked if index in run.open)
                else:
                    await run.fail(asked, exc)

    async def _reclaim_unknown(self, run: _Run, indexes: Sequence[int]) -> None:
        if run.claim is None:
            await self._reclaimer.add(run.caller.project, [run.ids[index] for index in indexes])

    async def _ask_once(self, run: _Run, link: EdgeLink, indexes: Sequence[int]) -> None:
        ids = tuple(run.ids[index] for index in indexes)
        body = codec.encode(BatchRequest(spec=run.request.spec, count=len(ids), sandbox_ids=ids))
        head = link.request_head(
            "POST",
            b"/v1/sandbox-batches",
            project=run.caller.project,
            request_id=run.caller.request_id,
            headers=run.caller.headers,
        )
        connection = await link.connection()
        run.asked.update(ids)
        self._edges.placed(link.name, len(ids))
        try:
            connection.begin(b"".join((head, b"content-length: %d\r\n\r\n" % len(body), body)), whole=True)
            status = await connection.head()
            if status != 200:
                answer = b"".join([chunk async for chunk in connection.chunks()])
                raise codec.decode_error(answer, fallback=f"edge {link.name} answered with status {status}")
            rest = b""
            async for chunk in connection.chunks():
                lines = b"".join((rest, chunk, connection.at_hand())).split(b"\n")
                rest = lines.pop()
                await self._take_lines(run, lines, indexes)
        finally:
            link.release(connection)

    async def _take_lines(self, run: _Run, lines: Sequence[bytes], indexes: Sequence[int]) -> None:
        told: list[tuple[int, Mapping[str, Any]]] = []
        failed: set[int] = set()
        for line in lines:
            item: dict[str, Any] = msgspec.json.decode(line) if line else {"done": True}
            if item.get("done"):
                continue
            index = indexes[int(item["index"])]
            if item.get("error") is not None:
                error = codec.error_from_fields(item["error"])
                if may_try_elsewhere(error):
                    run.refused[index] = error
                    continue
                if not isinstance(error, errors.SandboxExitedError):
                    failed.add(index)
            told.append((index, item))
        await self._write_down(run, {index for index, _ in told} - failed)
        await run.tell(told)

    async def _write_down(self, run: _Run, indexes: set[int]) -> None:
        """Before they are told. Raises TransportError when that is not possible: a repeat finds them."""
        if run.claim is None or not indexes:
            return
        try:
            await self._creations.mark_started(run.claim, indexes)
        except errors.NodeError as exc:
            raise errors.TransportError(f"what was started could not be written down: {exc}") from exc
        run.started |= indexes

    async def _tell_statuses(self, run: _Run, indexes: Sequence[int]) -> None:
        """How sandboxes that were told about before are now."""
        limit = asyncio.Semaphore(_STATUS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for index in indexes:
                group.create_task(self._tell_status(run, index, limit))

    async def _tell_status(self, run: _Run, index: int, limit: asyncio.Semaphore) -> None:
        sandbox_id = run.ids[index]
        async with limit:
            try:
                _, answer = await self._edges.of(sandbox_id).call(
                    "GET", f"/v1/sandboxes/{sandbox_id}", project=run.caller.project, repeatable=True
                )
            except errors.NotFoundError:
                await run.fail([index], gone_again(sandbox_id))
            except errors.OpenDSecError as exc:
                await run.fail([index], exc)
            else:
                await run.tell([(index, {"status": msgspec.Raw(answer), "error": None, "done": False})])
