"""The engine of calls of one edge, made and opened after its backends. Part of the composition root.

It runs its containers with the edge's own container backend. Where that does not work, or a GPU is there that cannot be
given to a container, the edge goes on without calls and says why; nothing else of it depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec import errors
from opendsec.backends.container import ContainerBackend
from opendsec.edge.images import ImageSource
from opendsec.edge.node import Node
from opendsec.fncall.base import FnCalls
from opendsec.fncall.dummy import DummyFnCalls
from opendsec.fncall.engine import Engine
from opendsec.fncall.gpu import GpuDesk, GpuInventory
from opendsec.fncall.gpu_inventory import SETTING, probe, read_simulated
from opendsec.fncall.settings import FnCallSettings
from opendsec.linux.slots import CALL_SLOTS
from opendsec.model.fncall import FnCallResult, FnCallSpec
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind

log = logging.getLogger(__name__)

DEFAULT_IMAGE = "debian"
MOST_CONTAINERS = len(CALL_SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What an edge is told about calls."""

    image: str = DEFAULT_IMAGE
    containers: int | None = None
    """None: the engine's own default."""
    gpu_inventory: Path | None = None
    """None: what the driver says."""


def read_calls(environment: Mapping[str, str]) -> CallSettings:
    """Raises InvalidSpecError naming the variable."""
    text = environment.get("OPENDSEC_FNCALL_CONTAINERS", "")
    if text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CONTAINERS):
        raise errors.InvalidSpecError(
            f"OPENDSEC_FNCALL_CONTAINERS: {text!r} is not a number from 1 to {MOST_CONTAINERS}",
            detail={"field": "OPENDSEC_FNCALL_CONTAINERS"},
        )
    inventory = environment.get(SETTING, "")
    return CallSettings(
        image=environment.get("OPENDSEC_FNCALL_IMAGE") or DEFAULT_IMAGE,
        containers=int(text) if text else None,
        gpu_inventory=Path(inventory) if inventory else None,
    )


class NoCalls(FnCalls):
    """An engine that does not work here, and says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def open(self) -> None:
        """Nothing to prepare."""

    async def close(self) -> None:
        """Nothing to remove."""

    def report(self) -> BackendReport:
        return BackendReport(available=False, reasons=(self._reason,))

    async def call(self, spec: FnCallSpec, *, project: str) -> FnCallResult:
        del spec, project
        raise errors.BackendUnavailableError(
            f"this edge carries out no calls: {self._reason}",
            remedy="see `opendsec doctor`; what is put right counts from the next `opendsec up -d --restart` on",
        )


@asynccontextmanager
async def carrying_out(
    node: Node, images: ImageSource, settings: CallSettings, *, run_dir: Path, dummy: bool
) -> AsyncIterator[FnCalls]:
    """The engine, open. `node` has opened its backends; `dummy`: calls from memory."""
    engine = await _engine(node, images, settings, run_dir=run_dir, dummy=dummy)
    try:
        await engine.open()
    except (errors.OpenDSecError, OSError) as exc:
        log.warning("calls_unavailable", extra={"fields": {"reason": str(exc)}})
        engine = NoCalls(str(exc))
    try:
        yield engine
    finally:
        await engine.close()


async def _engine(node: Node, images: ImageSource, settings: CallSettings, *, run_dir: Path, dummy: bool) -> FnCalls:
    edge = node.settings.edge
    if dummy:
        return DummyFnCalls(edge)
    try:
        containers = await node.backend(BackendKind.CONTAINER)
        gpus = GpuDesk(await _inventory(settings))
    except (errors.UnsupportedError, errors.NodeError) as exc:
        return NoCalls(str(exc))
    assert isinstance(containers, ContainerBackend)
    given = {} if settings.containers is None else {"containers": settings.containers}
    return Engine(
        settings=FnCallSettings(
            edge=edge,
            state_dir=node.settings.state_dir / "fncall",
            run_dir=run_dir / "edge" / edge / "fncall",
            image=settings.image,
            **given,
        ),
        containers=containers,
        images=images,
        gpus=gpus if gpus.inventory.instances else None,
    )


async def _inventory(settings: CallSettings) -> GpuInventory:
    return await probe() if settings.gpu_inventory is None else read_simulated(settings.gpu_inventory)
