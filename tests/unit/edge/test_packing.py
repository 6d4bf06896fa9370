"""How packs end for whoever follows them, also when the edge itself fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from opendsec.backends.base import Capability, Changes, Handle
from opendsec.edge.packing import Packing
from opendsec.edge.sandbox import Sandbox
from opendsec.errors import NodeError
from opendsec.model.image import ImageConfig, ImagePart, PartKind
from opendsec.model.node import SandboxState
from opendsec.store.images import ImageStore
from opendsec.wire.contracts import PackEvent, PackRequest

pytestmark = pytest.mark.anyio


class BrokenBackend:
    """Fails as no backend should."""

    @asynccontextmanager
    async def changes(self, handle: Handle, *, image: object) -> AsyncGenerator[Changes]:
        raise ZeroDivisionError("a fault of ours")
        yield  # type: ignore[unreachable]


class Running:
    """As much of a sandbox as a pack looks at before its backend is asked."""

    sandbox_id = "sbx-x-1"
    backend = BrokenBackend()
    image_layers = ()
    image_parts = (ImagePart(kind=PartKind.IMAGE, name="x", digest=f"sha256:{'0' * 64}", layers=()),)
    image_digest = f"sha256:{'0' * 64}"
    image_config = ImageConfig()
    created_at = 0.0
    state = SandboxState.RUNNING
    live = True

    class spec:  # noqa: N801
        image = "x"

    class life:  # noqa: N801
        end_reason = None

    def __init__(self, group: anyio.abc.TaskGroup) -> None:
        self._group = group
        self.failures: list[BaseException] = []
        self.turn = anyio.Lock()

    @asynccontextmanager
    async def saving(self, what: Capability) -> AsyncIterator[object]:
        assert what is Capability.PACK
        yield object()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        async def run() -> None:
            try:
                await work
            except ZeroDivisionError as error:
                self.failures.append(error)

        self._group.start_soon(run, name=name)


async def test_nobody_waits_for_a_pack_that_broke(tmp_path: Path) -> None:
    packing = Packing(ImageStore(tmp_path / "store"))
    request = PackRequest(name="made")
    async with anyio.create_task_group() as group:
        sandbox = Running(group)
        pack = packing.begin(cast("Sandbox", sandbox), request, key="one")
        with anyio.fail_after(5), pytest.raises(NodeError, match="failed while it packed"):
            await _all(pack.follow("req"))
        assert packing.begin(cast("Sandbox", sandbox), request, key="one") is not pack  # a repeat is a new try
    assert len(sandbox.failures) == 2


async def _all(events: AsyncGenerator[PackEvent]) -> list[PackEvent]:
    return [event async for event in events]
