"""The edges this apiserver knows, and how full they were when last asked.

With one edge nobody is asked: it decides for itself. With several, reports are at most VIEW_AGE_S old and our own
placements and calls since then are added, so a burst does not all go to the edge that was emptiest before it
(`benchmarks/placement.py` has the figures).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from opendsec import errors
from opendsec.apiserver.link import EdgeLink
from opendsec.apiserver.placement import EdgeView
from opendsec.model.ids import edge_of
from opendsec.model.node import NodeReport
from opendsec.wire import codec

VIEW_AGE_S = 1.0
_REPORT_TIMEOUT_S = 1.0


class Edges:
    """Links by name, and views for placement."""

    def __init__(self, links: Mapping[str, EdgeLink]) -> None:
        self.links = links
        self._views: dict[str, EdgeView] = {}
        self._fresh_until = 0.0
        self._placed: Counter[str] = Counter()
        self._called: Counter[str] = Counter()
        self._asking = asyncio.Lock()

    def of(self, sandbox_id: str) -> EdgeLink:
        """The link a sandbox id names. Raises InvalidSpecError (malformed) or NotFoundError (no such edge)."""
        link = self.links.get(edge_of(sandbox_id))
        if link is None:
            raise errors.NotFoundError(
                f"no sandbox {sandbox_id}", detail={"field": "sandbox_id"}, sandbox_id=sandbox_id
            )
        return link

    def placed(self, name: str, count: int) -> None:
        """Remember that we just sent `count` sandboxes there."""
        self._placed[name] += count

    def called(self, name: str, count: int) -> None:
        """Remember that we just sent `count` calls there."""
        self._called[name] += count

    async def views(self) -> list[EdgeView]:
        """Every edge as far as known; one that does not answer is shown as not accepting."""
        if len(self.links) == 1:
            return [EdgeView(name=name) for name in self.links]
        now = asyncio.get_running_loop().time
        async with self._asking:
            if now() >= self._fresh_until:
                # What is sent while they are asked may be in no report: it counts from here on.
                self._placed, self._called = Counter(), Counter()
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(self._ask(link)) for link in self.links.values()]
                self._views = {task.result().name: task.result() for task in asked}
                self._fresh_until = now() + VIEW_AGE_S
        return [
            replace(view, live=view.live + self._placed[view.name], calls=view.calls + self._called[view.name])
            for view in self._views.values()
        ]

    async def _ask(self, link: EdgeLink) -> EdgeView:
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                _, body = await link.call("GET", "/v1/node")
            report = codec.decode_answer(body, NodeReport)
        except (TimeoutError, errors.OpenDSecError):
            return EdgeView(name=link.name, accepting=False, takes_calls=False)
        calls = report.backends.get("fncall")
        return EdgeView(
            name=link.name,
            live=report.live + report.creating,
            accepting=report.accepting,
            calls=0 if calls is None else calls.live,
            takes_calls=calls is not None and calls.available,
            gpu=calls is not None and "gpu" in calls.capabilities,
        )

    def close(self) -> None:
        """Close idle connections."""
        for link in self.links.values():
            link.close()
