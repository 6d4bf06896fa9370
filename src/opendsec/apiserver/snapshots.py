"""Snapshots across edges: every key sees those of its project, changing them needs what packing needs.

Edges may share one store or have one each; a snapshot is found where it is. A list asks every edge, a removal goes to
every edge one after the other (edges that share a store would race), and an edge that does not answer fails either by
name: what might be there is never told as missing.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from litestar import Request, delete, get
from litestar.params import FromQuery

from opendsec import errors
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.iam import require_build
from opendsec.apiserver.link import EdgeLink
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import check_snapshot_name
from opendsec.server.asgi import principal, request_id
from opendsec.server.streams import first_failure
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_RIGHTS, RIGHT_BUILD, SnapshotList

Incoming = Request[Any, Any, Any]
_MAY_BUILD = [(HEADER_RIGHTS.lower().encode("ascii"), RIGHT_BUILD.encode("ascii"))]


class SnapshotsOfEdges:
    """One per process."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def all(self, project: str, request_id: str) -> SnapshotList:
        """By name; one that several edges have counts once."""

        async def of(link: EdgeLink) -> SnapshotList:
            _, body = await link.call("GET", "/v1/snapshots", project=project, request_id=request_id, repeatable=True)
            return codec.decode_answer(body, SnapshotList)

        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(of(link)) for link in self._links()]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        found: dict[tuple[str, str], SnapshotSummary] = {}
        for task in asked:
            for item in task.result().items:
                found.setdefault((item.name, item.source), item)
        return SnapshotList(items=tuple(found[key] for key in sorted(found)))

    async def remove(self, project: str, name: str, *, force: bool, request_id: str) -> SnapshotSummary:
        """From every edge that has it."""
        target = f"/v1/snapshots?name={quote(name, safe='')}&force={'true' if force else 'false'}"
        done: list[SnapshotSummary] = []
        failed: list[errors.OpenDSecError] = []
        missing: errors.OpenDSecError = errors.UnschedulableError("no edge is known")
        for link in self._links():
            try:
                _, body = await link.call(
                    "DELETE", target, project=project, request_id=request_id, headers=_MAY_BUILD, repeatable=False
                )
                done.append(codec.decode_answer(body, SnapshotSummary))
            except errors.NotFoundError as exc:
                missing = exc
            except errors.OpenDSecError as exc:
                exc.detail.setdefault("edge", link.name)
                failed.append(exc)
        if failed:
            raise failed[0]
        if not done:
            raise missing
        return done[0]

    def _links(self) -> list[EdgeLink]:
        return [link for _, link in sorted(self._edges.links.items())]


def _snapshots(request: Incoming) -> SnapshotsOfEdges:
    found: SnapshotsOfEdges = request.app.state.snapshots
    return found


@get("/v1/snapshots", summary="Snapshots of the project", tags=["snapshots"])
async def list_snapshots(request: Incoming) -> SnapshotList:
    """Of every edge, by name."""
    project = principal(request.scope).project
    return await _snapshots(request).all(project, request_id(request.scope))


@delete("/v1/snapshots", summary="Remove a snapshot (right build)", tags=["snapshots"], status_code=200)
async def remove_snapshot(
    request: Incoming, name: FromQuery[str] = "", force: FromQuery[bool] = False
) -> SnapshotSummary:
    """What it was. `force`: also while sandboxes that were started from it live."""
    require_build(principal(request.scope))
    check_snapshot_name(name)
    project = principal(request.scope).project
    return await _snapshots(request).remove(project, name, force=force, request_id=request_id(request.scope))


ROUTES = (list_snapshots, remove_snapshot)
