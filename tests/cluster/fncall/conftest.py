"""An apiserver in the test's own loop before edges that answer calls from memory, each a real edge's HTTP over its own
socket."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from tests.cluster.apiserver.conftest import TOKEN, client_for, seed, serving, settings_for
from tests.unit.edge.edges import edge as dummy_node

from opendsec.apiserver.app import apiserver
from opendsec.edge.server import edge_app
from opendsec.fncall.base import FnCalls
from opendsec.fncall.dummy import DummyFnCalls
from opendsec.server.auth import constant_token


@dataclass
class Platform:
    """`client`: an admin of project `default`; `engines`: what the edges carry calls out with."""

    folder: Path
    client: httpx.AsyncClient
    engines: dict[str, DummyFnCalls]
    keys: dict[str, str]


Start = Callable[..., AbstractAsyncContextManager[Platform]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`async with start("a", "b") as platform`; `without` names edges that carry out no calls."""

    @contextlib.asynccontextmanager
    async def started(
        *names: str,
        patience_s: float = 2.0,
        run_code_project: str = "",
        without: frozenset[str] = frozenset(),
        **fields: int,
    ) -> AsyncIterator[Platform]:
        settings = replace(settings_for(tmp_path, *names), run_code_project=run_code_project)
        keys = seed(settings)
        engines = {name: DummyFnCalls(name, **fields) for name in names}
        async with contextlib.AsyncExitStack() as stack:
            for name in names:
                given = None if name in without else engines[name]
                await stack.enter_async_context(edge_serving(name, given, tmp_path))
            app = await stack.enter_async_context(apiserver(settings, patience_s=patience_s))
            await stack.enter_async_context(serving(app, tmp_path / "api.sock"))
            client = await stack.enter_async_context(client_for(tmp_path, keys["default"]))
            yield Platform(tmp_path, client, engines, keys)

    return started


@contextlib.asynccontextmanager
async def edge_serving(name: str, engine: FnCalls | None, folder: Path) -> AsyncIterator[None]:
    """An edge of that name on its socket in `folder`."""
    async with dummy_node(folder / name, edge=name) as node:
        app = edge_app(node, version="test", verify=constant_token(TOKEN), fncalls=engine)
        async with serving(app, folder / f"{name}.sock"):
            yield
