"""The backends of one edge: opened side by side, and those that do not work known with the reason.

An edge is ready as soon as the backends that open quickly are, and those of which sandboxes live. One that takes its
time (`opens_at_leisure`) is opened beside that; who wants a sandbox of it earlier waits for it. A backend that does not
work here is no fault of the edge: its sandboxes are refused with what is wrong and what helps. It is looked at again
when somebody wants a sandbox of it, and when the edge is told to (`look_again`); only who wants that backend waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from opendsec import errors
from opendsec.backends.base import Backend
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind

log = logging.getLogger(__name__)

PREPARING = "it is being prepared"
LOOK_AGAIN_S = 3.0
"""A create looks again at a backend that did not work so long ago or longer; a burst of them looks once."""
PUT_RIGHT = "see `opendsec doctor`; once it is put right the next create finds it"
FAULT = "see the edge's log; `opendsec up -d --restart` tries it again, and sandboxes go on"


class Offered:
    """`async with Offered(backends) as offered`: opens them, and closes what it has opened.

    `look_again_s`: see LOOK_AGAIN_S.
    """

    def __init__(self, backends: Mapping[BackendKind, Backend], *, look_again_s: float = LOOK_AGAIN_S) -> None:
        self.backends = dict(backends)
        self.unavailable: dict[BackendKind, str] = {}
        """Why those do not work that do not."""
        self._look_again_s = look_again_s
        self._faults: set[BackendKind] = set()
        """Nobody knows what those have left behind: they are not opened again."""
        self._failed_at: dict[BackendKind, float] = {}
        self._opening: dict[BackendKind, asyncio.Task[None]] = {}
        """The last time each was opened beside everything else."""
        self._closing = AsyncExitStack()
        self._opened = AsyncExitStack()
        self._group = asyncio.TaskGroup()
        self._leaving = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._opened)
            await stack.enter_async_context(self._group)
            for kind, backend in self.backends.items():
                if backend.opens_at_leisure:
                    self._begin(kind)
            stack.callback(self._give_up)
            for kind, backend in self.backends.items():
                if not backend.opens_at_leisure:
                    await self._open(kind)
            self._closing = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    def _give_up(self) -> None:
        self._leaving = True
        for task in self._opening.values():
            task.cancel()

    async def settled(self, kinds: Collection[BackendKind]) -> None:
        """Until those of these kinds work or are known not to."""
        wanted = {self._opening[kind] for kind in kinds if kind in self._opening}
        if wanted:
            await asyncio.wait(wanted)

    async def usable(self, kind: BackendKind) -> Backend:
        """One that works, looked at again where it did not. Raises UnsupportedError (this edge was not given one),
        BackendUnavailableError, which is not worth another try until somebody has put it right."""
        backend = self.backends.get(kind)
        if backend is None:
            raise errors.UnsupportedError(
                f"backend: this edge has no {kind.value} backend",
                detail={"field": "backend"},
                remedy=f"use one of {', '.join(sorted(one.value for one in self.backends))}",
            )
        await self.settled([kind])
        if kind in self.unavailable and self._is_due(kind):
            self._begin(kind)
            await self.settled([kind])
        if kind in self.unavailable:
            raise errors.BackendUnavailableError(
                f"the {kind.value} backend does not work on this node: {self.unavailable[kind]}",
                remedy=FAULT if kind in self._faults else PUT_RIGHT,
                retryable=False,
            )
        return backend

    async def look_again(self) -> None:
        """Open those that did not work, for something was put right; until all are known to work or not. One that was
        being opened already is looked at once more: it may have begun before that.
        """
        await self.settled(self.backends)
        kinds = [kind for kind in self.unavailable if kind not in self._faults]
        for kind in kinds:
            self._begin(kind)
        await self.settled(kinds)

    def reports(self) -> dict[str, BackendReport]:
        """How each of them is now."""
        return {kind.value: self._report(kind) for kind in self.backends}

    def _report(self, kind: BackendKind) -> BackendReport:
        if self._is_opening(kind):
            return BackendReport(available=False, reasons=(PREPARING,), preparing=True)
        if kind in self.unavailable:
            return BackendReport(available=False, reasons=(self.unavailable[kind],))
        return self.backends[kind].report()

    def _is_opening(self, kind: BackendKind) -> bool:
        task = self._opening.get(kind)
        return task is not None and not task.done()

    def _is_due(self, kind: BackendKind) -> bool:
        since = asyncio.get_running_loop().time() - self._failed_at[kind]
        return kind not in self._faults and since >= self._look_again_s

    def _begin(self, kind: BackendKind) -> None:
        """Open it beside everything else, unless that is going on."""
        if not self._is_opening(kind) and not self._leaving:
            self._opening[kind] = self._group.create_task(self._open_beside(kind), name=f"open-{kind.value}")

    async def _open(self, kind: BackendKind) -> None:
        backend = self.backends[kind]
        try:
            await backend.open()
        except errors.NodeError as exc:
            self._failed(kind, str(exc))
            return
        self._opened.push_async_callback(backend.close)
        if self.unavailable.pop(kind, None) is not None:
            log.info("backend_available", extra={"fields": {"backend": kind.value}})

    def _failed(self, kind: BackendKind, reason: str) -> None:
        if self.unavailable.get(kind) != reason:
            log.warning("backend_unavailable", extra={"fields": {"backend": kind.value, "reason": reason}})
        self.unavailable[kind] = reason
        self._failed_at[kind] = asyncio.get_running_loop().time()

    async def _open_beside(self, kind: BackendKind) -> None:
        try:
            await self._open(kind)
        except Exception as exc:
            # A fault of ours or of this host; the edge does not depend on it.
            log.exception("backend_failed", extra={"fields": {"backend": kind.value}})
            self._failed(kind, str(exc) or type(exc).__name__)
            self._faults.add(kind)
