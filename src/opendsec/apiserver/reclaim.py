"""Deletes sandboxes nobody was told about: the client left, or the edge went away before it answered.

They are written down first, so they go even when this process is killed in between; an edge that is away is asked
again until it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

import sqlalchemy as sa

from opendsec import errors
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.schema import reclaims
from opendsec.apiserver.storage import Storage
from opendsec.model.ids import SandboxId

log = logging.getLogger(__name__)
RETRY_S = 2.0
SETTLE_S = 10.0
"""An id its edge does not know is asked for again until it is this old:

the request that makes it may still be on its way there.
"""
DELETE_S = 30.0
"""So long one may take; a sandbox that cannot be removed now does not keep the others waiting."""
_AT_ONCE = 32


class Reclaimer:
    """`run` works as long as it is not cancelled; `add` may be called any time."""

    def __init__(self, storage: Storage, edges: Edges) -> None:
        self._storage = storage
        self._edges = edges
        self._more = asyncio.Event()
        self._more.set()

    async def add(self, project: str, sandbox_ids: Iterable[SandboxId]) -> None:
        """Have them deleted soon. Finishes writing even when the caller is cancelled meanwhile."""
        rows = [{"sandbox_id": one, "project": project, "created_at": time.time()} for one in sandbox_ids]
        if not rows:
            return

        def work(connection: sa.Connection) -> None:
            known = set(connection.execute(sa.select(reclaims.c.sandbox_id)).scalars())
            fresh = [row for row in rows if row["sandbox_id"] not in known]
            if fresh:
                connection.execute(sa.insert(reclaims), fresh)

        try:
            await asyncio.shield(self._storage.run(work))
        finally:
            self._more.set()

    async def run(self) -> None:
        """Delete what is written down, for ever."""
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                left = await self._try_all()
            except errors.NodeError as exc:
                log.warning("reclaims_unreadable", extra={"fields": {"reason": str(exc)}})
                left = True
            if left:
                self._more.set()
                await asyncio.sleep(RETRY_S)

    async def _try_all(self) -> bool:
        """Whether some are left to be tried again. Raises NodeError for the database."""
        waiting = await self._storage.run(
            lambda connection: [tuple(row) for row in connection.execute(sa.select(reclaims)).all()]
        )
        limit = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(self._delete(limit, *row)) for row in waiting]
        gone = [task.result() for task in tries if task.result()]
        if gone:
            await self._strike_out(gone)
        return len(gone) < len(waiting)

    async def _delete(self, limit: asyncio.Semaphore, sandbox_id: str, project: str, created_at: float) -> str:
        """The id when it is gone, "" to try again."""
        async with limit:
            try:
                link = self._edges.of(sandbox_id)
                async with asyncio.timeout(DELETE_S):
                    await link.call("DELETE", f"/v1/sandboxes/{sandbox_id}", project=project, repeatable=True)
            except errors.RequestError:
                return sandbox_id if time.time() > created_at + SETTLE_S else ""
            except (TimeoutError, errors.OpenDSecError) as exc:
                log.warning("reclaim_failed", extra={"fields": {"sandbox_id": sandbox_id, "reason": str(exc)}})
                return ""
        log.info("sandbox_reclaimed", extra={"fields": {"sandbox_id": sandbox_id}})
        return sandbox_id

    async def _strike_out(self, gone: list[str]) -> None:
        def work(connection: sa.Connection) -> None:
            for start in range(0, len(gone), 500):
                connection.execute(sa.delete(reclaims).where(reclaims.c.sandbox_id.in_(gone[start : start + 500])))

        await self._storage.run(work)
