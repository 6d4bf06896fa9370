"""Composition of an apiserver:

settings in, a serving process out. Keeps no state of sandboxes; any number of these may run side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version

from opendsec.apiserver import image_routes, snapshots
from opendsec.apiserver.batches import Batches
from opendsec.apiserver.call_routes import CallRoutes
from opendsec.apiserver.calls import Calls
from opendsec.apiserver.contract import described
from opendsec.apiserver.creating import Creating
from opendsec.apiserver.creations import Creations
from opendsec.apiserver.database import open_database
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.forward import Forward
from opendsec.apiserver.fusion_door import FusionDoor
from opendsec.apiserver.iam import RIGHTS, Iam
from opendsec.apiserver.images import Images
from opendsec.apiserver.link import PATIENCE_S, EdgeLink
from opendsec.apiserver.listing import Listing
from opendsec.apiserver.reclaim import Reclaimer
from opendsec.apiserver.routes import ROUTES, Parts
from opendsec.apiserver.settings import Settings
from opendsec.apiserver.storage import Storage
from opendsec.server.app import make_app
from opendsec.server.asgi import ASGIApp, Scope, principal
from opendsec.server.runner import listen, serve
from opendsec.wire.contracts import VIEW_ROOT


def _version() -> str:
    try:
        return version("opendsec")
    except PackageNotFoundError:
        return "0"


def _project_of(scope: Scope) -> str:
    return str(principal(scope).project)


def _rights_of(scope: Scope) -> tuple[str, ...]:
    return tuple(sorted(RIGHTS[principal(scope).role]))


@contextlib.asynccontextmanager
async def apiserver(settings: Settings, *, patience_s: float = PATIENCE_S) -> AsyncIterator[ASGIApp]:
    """The ASGI app of an apiserver, with what it needs open around it."""
    edges = Edges(
        {
            name: EdgeLink(name, address, token=settings.edge_token, patience_s=patience_s)
            for name, address in settings.edges.items()
        }
    )
    engine = await asyncio.to_thread(open_database, settings.database_url)
    storage = Storage(engine)
    reclaimer = Reclaimer(storage, edges)
    creations = Creations(storage)
    iam = Iam(storage)
    parts = Parts(
        iam=iam,
        creating=Creating(edges, creations, reclaimer),
        batches=Batches(edges, creations, reclaimer),
        listing=Listing(edges),
    )
    forward = Forward(edges.links, project_of=_project_of, rights_of=_rights_of)
    calls = CallRoutes(Calls(edges))
    door = FusionDoor(iam.verify, anonymous_project=settings.run_code_project)
    with contextlib.closing(storage), contextlib.closing(edges):
        async with asyncio.TaskGroup() as group:
            reclaiming = group.create_task(reclaimer.run())
            app = make_app(
                [*ROUTES, *image_routes.ROUTES, *snapshots.ROUTES, *described()],
                title="OpenDSec",
                version=_version(),
                verify=door.verify,
                raw=lambda scope: forward.route(scope) or calls.route(scope),
                open_paths=frozenset({VIEW_ROOT}),
                state={"parts": parts, "images": Images(edges), "snapshots": snapshots.SnapshotsOfEdges(edges)},
            )
            yield door.before(app)
            reclaiming.cancel()


async def run_apiserver(settings: Settings, *, on_listening: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM."""
    async with apiserver(settings) as app:
        await serve(app, listen(settings.listen), on_listening=on_listening)
