"""The whole road in one event loop: SDK → apiserver → edges over the dummy backend, on Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.edge.edges import PLENTY

import opendsec
from opendsec.apiserver.app import apiserver
from opendsec.apiserver.database import open_database
from opendsec.apiserver.iam import insert_key, insert_project
from opendsec.apiserver.settings import Settings
from opendsec.backends.dummy import DummyBackend
from opendsec.edge.images import AnyImage
from opendsec.edge.node import Node, NodeSettings
from opendsec.edge.origins import Origins
from opendsec.edge.server import edge_app
from opendsec.model.access import Role
from opendsec.model.spec import BackendKind
from opendsec.server.runner import Address, listen, serve
from opendsec.store.images import ImageStore

TOKEN = "the-token-of-these-edges"


@dataclass
class Road:
    """A running platform."""

    url: str
    nodes: dict[str, Node]
    backends: dict[str, DummyBackend]
    keys: dict[str, str] = field(default_factory=dict)

    def client(self, whose: str = "builder") -> opendsec.DSecClient:
        """A client with the key of that role, or of the builder of the other project (`other`)."""
        return opendsec.DSecClient(self.url, self.keys[whose], timeout=20)


@contextlib.asynccontextmanager
async def whole_road(
    root: Path, *, edges: Sequence[str] = ("a",), own_stores: bool = False, parks: bool = False
) -> AsyncIterator[Road]:
    """`own_stores`: the edges share no store."""
    road = Road(url=f"unix:{root}/api.sock", nodes={}, backends={})
    settings = Settings(
        listen=Address(path=root / "api.sock"),
        edges={name: Address(path=root / f"{name}.sock") for name in edges},
        database_url=f"sqlite:///{root}/iam.sqlite3",
        edge_token=TOKEN,
    )
    _seed(settings, road)
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        serving: list[asyncio.Task[None]] = []
        stack.callback(lambda: [task.cancel() for task in serving])
        for name in edges:
            backend = road.backends[name] = DummyBackend(parks=parks)
            place = NodeSettings(edge=name, state_dir=root / name, run_dir=root / f"{name}-run", limits=PLENTY)
            place.state_dir.mkdir()
            store = ImageStore(root / (f"store-{name}" if own_stores else "store"))
            node = await stack.enter_async_context(
                Node(
                    place,
                    backends={BackendKind.DUMMY: backend},
                    images=AnyImage(),
                    origins=Origins(place.state_dir, store),
                )
            )
            road.nodes[name] = node
            app = edge_app(node, version="test", verify=None)
            serving.append(group.create_task(serve(app, listen(settings.edges[name]), grace_s=0.1)))
        app = await stack.enter_async_context(apiserver(settings, patience_s=1.0))
        serving.append(group.create_task(serve(app, listen(settings.listen), grace_s=0.1)))
        yield road
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)


def _seed(settings: Settings, road: Road) -> None:
    engine = open_database(settings.database_url)
    with engine.begin() as connection:
        for project in ("default", "other"):
            insert_project(connection, project)
        for whose, project, role in (
            ("builder", "default", Role.BUILDER),
            ("runner", "default", Role.RUNNER),
            ("other", "other", Role.BUILDER),
        ):
            road.keys[whose] = insert_key(connection, project=project, role=role, title=whose).key
    engine.dispose()
