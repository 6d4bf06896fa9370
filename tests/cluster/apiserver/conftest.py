"""A whole apiserver in front of edge doubles, on Unix sockets, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.cluster.apiserver.edge_double import EdgeDouble, make_double

from opendsec.apiserver.app import apiserver
from opendsec.apiserver.database import open_database
from opendsec.apiserver.iam import insert_key, insert_project
from opendsec.apiserver.settings import Settings
from opendsec.model.access import Role
from opendsec.server.asgi import ASGIApp
from opendsec.server.runner import Address, listen, serve

TOKEN = "the-token-of-these-edges"


@dataclass
class Platform:
    """What a test talks to: `client` is an admin of project `default`, `edges` are the doubles behind."""

    folder: Path
    client: httpx.AsyncClient
    edges: dict[str, EdgeDouble]
    keys: dict[str, str] = field(default_factory=dict)

    def as_project(self, name: str) -> dict[str, str]:
        """Headers of a member of another project (`other`) or this one (`default`)."""
        return {"Authorization": f"Bearer {self.keys[name]}"}


def settings_for(folder: Path, *names: str) -> Settings:
    """An apiserver on a socket in `folder`, with one edge socket a name."""
    return Settings(
        listen=Address(path=folder / "api.sock"),
        edges={name: Address(path=folder / f"{name}.sock") for name in names},
        database_url=f"sqlite:///{folder}/iam.sqlite3",
        edge_token=TOKEN,
    )


def seed(settings: Settings) -> dict[str, str]:
    """Two projects and their keys; `default` is the admin's."""
    engine = open_database(settings.database_url)
    keys: dict[str, str] = {}
    with engine.begin() as connection:
        for name, role in (("default", Role.ADMIN), ("other", Role.MEMBER)):
            insert_project(connection, name)
            keys[name] = insert_key(connection, project=name, role=role, title="test").key
    engine.dispose()
    return keys


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """`app` on a Unix socket while inside."""
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve(app, listen(Address(path=path)), grace_s=1, on_listening=ready.set))
        await ready.wait()
        try:
            yield
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def client_for(folder: Path, key: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the apiserver in `folder`."""
    transport = httpx.AsyncHTTPTransport(uds=str(folder / "api.sock"))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers, timeout=30) as client:
        yield client


Start = Callable[..., AbstractAsyncContextManager[Platform]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`async with start("a", "b") as platform`: an apiserver with edges of these names; those `away` do not answer."""

    @contextlib.asynccontextmanager
    async def started(
        *names: str, patience_s: float = 2.0, away: frozenset[str] = frozenset()
    ) -> AsyncIterator[Platform]:
        settings = settings_for(tmp_path, *names)
        keys = seed(settings)
        edges = {name: EdgeDouble(name) for name in names}
        async with contextlib.AsyncExitStack() as stack:
            for name, double in edges.items():
                if name in away:
                    continue
                await stack.enter_async_context(serving(make_double(double, token=TOKEN), tmp_path / f"{name}.sock"))
            app = await stack.enter_async_context(apiserver(settings, patience_s=patience_s))
            await stack.enter_async_context(serving(app, tmp_path / "api.sock"))
            client = await stack.enter_async_context(client_for(tmp_path, keys["default"]))
            yield Platform(tmp_path, client, edges, keys)

    return started


@contextlib.asynccontextmanager
async def edge_process(name: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A double in a process of its own, killed with -9 on the way out."""
    path = folder / f"{name}.sock"
    root = Path(__file__).parents[3]
    words = [sys.executable, "-m", "tests.cluster.apiserver.edge_double", name, str(path), TOKEN]
    process = await asyncio.create_subprocess_exec(*words, cwd=root, env={**os.environ, "PYTHONPATH": f"{root}/src"})
    try:
        async with asyncio.timeout(20):
            while not await _answers(path):
                await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def alone(settings: Settings, folder: Path, *, patience_s: float) -> AsyncIterator[None]:
    """An apiserver without edges, on its socket."""
    async with apiserver(settings, patience_s=patience_s) as app, serving(app, folder / "api.sock"):
        yield
