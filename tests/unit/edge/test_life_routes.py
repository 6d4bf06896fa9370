"""Ending a sandbox over HTTP when it will not end."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.edge.edges import created, edge

from opendsec.backends.dummy import DummyBackend
from opendsec.edge.life_routes import LifeRoutes
from opendsec.errors import NodeError
from opendsec.model.node import SandboxState

pytestmark = pytest.mark.anyio


class Clinging(DummyBackend):
    """Its sandboxes cannot be removed."""

    async def destroy(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


async def test_nobody_waits_for_ever_for_what_cannot_be_ended(tmp_path: Path) -> None:
    scope = {"type": "http", "method": "DELETE", "path": "/", "query_string": b"", "headers": []}

    async def nothing(*_: Any) -> Any:
        raise AssertionError("neither read nor answered")

    async with asyncio.timeout(30), edge(tmp_path, Clinging()) as node:
        sandbox = await created(node)
        with pytest.raises(NodeError, match="removal goes on") as caught:
            await LifeRoutes(node, end_answer_s=0.05).end(sandbox.sandbox_id, scope, nothing, nothing)
        assert caught.value.retryable
        assert caught.value.sandbox_id == sandbox.sandbox_id
        assert sandbox.life.state is SandboxState.STOPPING
