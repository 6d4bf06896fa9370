"""The backends of one edge: opened once, side by side, and those that do not work known with the reason.

An edge is ready as soon as the backends that open quickly are, and those of which sandboxes live. One that takes its
time (`opens_at_leisure`) is opened beside that; who wants a sandbox of it earlier waits for it. A backend that does not
work here is no fault of the edge: its sandboxes are refused with what is wrong and what helps.
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


class Offered:
    """`async with Offered(backends) as offered`: opens them, and closes what it has opened."""

    def __init__(self, backends: Mapping[BackendKind, Backend]) -> None:
        self.backends = dict(backends)
        self.unavailable: dict[BackendKind, str] = {}
        """Why those do not work that do not."""
        self._leisurely: dict[BackendKind, asyncio.Task[None]] = {}
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(AsyncExitStack())
            group = await stack.enter_async_context(asyncio.TaskGroup())
            for kind, backend in self.backends.items():
                if backend.opens_at_leisure:
                    work = self._open_at_leisure(opened, kind, backend)
                    self._leisurely[kind] = group.create_task(work, name=f"open-{kind.value}")
            stack.callback(self._give_up)
            for kind, backend in self.backends.items():
                if not backend.opens_at_leisure:
                    await self._open(opened, kind, backend)
            self._closing = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    def _give_up(self) -> None:
        for task in self._leisurely.values():
            task.cancel()

    async def settled(self, kinds: Collection[BackendKind]) -> None:
        """Until those of these kinds work or are known not to."""
        wanted = {self._leisurely[kind] for kind in kinds if kind in self._leisurely}
        if wanted:
            await asyncio.wait(wanted)

    async def usable(self, kind: BackendKind) -> Backend:
        """One that works. Raises UnsupportedError (this edge was not given one), BackendUnavailableError, which is not
        worth another try: what did not open is not opened again."""
        backend = self.backends.get(kind)
        if backend is None:
            raise errors.UnsupportedError(
                f"backend: this edge has no {kind.value} backend",
                detail={"field": "backend"},
                remedy=f"use one of {', '.join(sorted(one.value for one in self.backends))}",
            )
        await self.settled([kind])
        if kind in self.unavailable:
            raise errors.BackendUnavailableError(
                f"the {kind.value} backend does not work on this node: {self.unavailable[kind]}",
                remedy="see `opendsec doctor`; what is put right counts from the next `opendsec up -d --restart` on",
                retryable=False,
            )
        return backend

    def reports(self) -> dict[str, BackendReport]:
        """How each of them is now."""
        return {kind.value: self._report(kind) for kind in self.backends}

    def _report(self, kind: BackendKind) -> BackendReport:
        if kind in self.unavailable:
            return BackendReport(available=False, reasons=(self.unavailable[kind],))
        opening = self._leisurely.get(kind)
        if opening is not None and not opening.done():
            return BackendReport(available=False, reasons=(PREPARING,), preparing=True)
        return self.backends[kind].report()

    async def _open(self, opened: AsyncExitStack, kind: BackendKind, backend: Backend) -> None:
        try:
            await backend.open()
        except errors.NodeError as exc:
            log.warning("backend_unavailable", extra={"fields": {"backend": kind.value, "reason": str(exc)}})
            self.unavailable[kind] = str(exc)
            return
        opened.push_async_callback(backend.close)

    async def _open_at_leisure(self, opened: AsyncExitStack, kind: BackendKind, backend: Backend) -> None:
        try:
            await self._open(opened, kind, backend)
        except Exception as exc:
            # A fault of ours or of this host; the edge does not depend on it.
            log.exception("backend_failed", extra={"fields": {"backend": kind.value}})
            self.unavailable[kind] = str(exc) or type(exc).__name__
