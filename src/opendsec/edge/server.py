"""The edge's HTTP server: which request goes where (`wire.contracts` is the contract).

Creates, ends, packs, commands and files are raw ASGI; the rest are plain Litestar handlers, each decode → one call →
encode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request, get, patch, post
from litestar.params import FromPath, JSONBody

from opendsec import errors
from opendsec.edge.exec_routes import ExecRoutes
from opendsec.edge.file_routes import VERBS, FileRoutes
from opendsec.edge.fncall_routes import FnCallRoutes
from opendsec.edge.image_desk import ImageDesk
from opendsec.edge.image_routes import ImageRoutes
from opendsec.edge.life_routes import LifeRoutes
from opendsec.edge.node import Node
from opendsec.edge.pack_routes import PackRoutes
from opendsec.edge.packing import Packing
from opendsec.edge.port_routes import PortRoutes
from opendsec.edge.requests import project_of
from opendsec.edge.sandbox import Sandbox
from opendsec.edge.screen_routes import ScreenRoutes
from opendsec.edge.snapshot_routes import SnapshotRoutes
from opendsec.edge.views import Views
from opendsec.fncall.base import FnCalls
from opendsec.model.node import LIVE_STATES, NodeReport, SandboxState, SandboxStatus
from opendsec.model.spec import BackendKind, check_labels, check_seconds
from opendsec.server.app import make_app
from opendsec.server.asgi import ASGIApp, Receive, Scope, Send
from opendsec.server.auth import Verify
from opendsec.wire.contracts import SandboxPage, UpdateRequest

_Asked = Request[Any, Any, Any]
DEFAULT_PAGE, MAX_PAGE = 1000, 10_000
USAGE_AT_ONCE = 32
"""Counters of so many sandboxes are read (some small files each) before others have their turn."""


def edge_app(
    node: Node,
    *,
    version: str,
    verify: Verify | None,
    packing: Packing | None = None,
    desk: ImageDesk | None = None,
    fncalls: FnCalls | None = None,
) -> ASGIApp:
    """The whole server. `verify` None: behind a Unix socket. `packing` None: nothing can be packed. `desk` None: this
    edge has no images. `fncalls` None: it carries out no calls."""
    return make_app(
        [
            list_sandboxes,
            get_sandbox,
            update_sandbox,
            pause_sandbox,
            resume_sandbox,
            report_node,
            look_again,
        ],
        title="OpenDSec edge",
        version=version,
        verify=verify,
        raw=RawPaths(node, packing, desk, fncalls),
        state={"node": node, "fncalls": fncalls},
    )


class RawPaths:
    """Finds the raw route of a request; None leaves it to Litestar."""

    def __init__(
        self,
        node: Node,
        packing: Packing | None = None,
        desk: ImageDesk | None = None,
        fncalls: FnCalls | None = None,
    ) -> None:
        self._lives, execs, files = LifeRoutes(node), ExecRoutes(node), FileRoutes(node)
        self._packs = PackRoutes(node, packing)
        self._snapshots = SnapshotRoutes(node)
        self._ports = PortRoutes(node)
        self._screens, self._views = ScreenRoutes(node), Views(node)
        self._images = ImageRoutes(desk)
        calls = FnCallRoutes(fncalls)
        self._top: dict[tuple[str, str], ASGIApp] = {
            ("POST", "sandboxes"): self._lives.create,
            ("POST", "sandbox-batches"): self._lives.create_batch,
            ("GET", "snapshots"): self._snapshots.list_all,
            ("DELETE", "snapshots"): self._snapshots.remove,
            ("POST", "fncalls"): calls.call,
            ("POST", "fncall-batches"): calls.batch,
        }
        self._commands: dict[str, Callable[..., Any]] = {"POST": execs.start, "GET": execs.list}
        self._command: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", ""): execs.get,
            ("DELETE", ""): execs.end,
            ("GET", "output"): execs.output,
            ("POST", "stdin"): execs.stdin,
            ("POST", "signal"): execs.signal,
            ("POST", "resize"): execs.resize,
        }
        self._files: dict[tuple[str, str], Callable[..., Any]] = {
            ("GET", "content"): files.download,
            ("PUT", "content"): files.upload,
            ("GET", "tree"): files.pack,
            ("PUT", "tree"): files.unpack,
            ("GET", "watch"): files.watch,
            **{("POST", verb): partial(_verb, files, verb) for verb in VERBS},
        }

    def __call__(self, scope: Scope) -> ASGIApp | None:
        parts = scope["path"].split("/")
        if len(parts) < 3 or parts[1] != "v1":
            return self._views.route(scope)
        method = scope["method"]
        if parts[2] == "images":
            return self._images.find(method, "/".join(parts[3:]))
        if len(parts) == 3:
            return self._top.get((method, parts[2]))
        if len(parts) < 4 or parts[2] != "sandboxes":
            return None
        route = self._below(method, parts) if len(parts) > 4 else self._itself(method, parts[3])
        return None if route is None else _told_whose(parts[3], route)

    def _itself(self, method: str, sandbox_id: str) -> ASGIApp | None:
        return partial(self._lives.end, sandbox_id) if method == "DELETE" else None

    def _below(self, method: str, parts: list[str]) -> ASGIApp | None:
        found: Callable[..., Any] | None = None
        given = [parts[3]]
        if parts[4] == "commands":
            if len(parts) == 5:
                found = self._commands.get(method)
            elif len(parts) <= 7:
                found = self._command.get((method, parts[6] if len(parts) == 7 else ""))
                given.append(parts[5])
        elif parts[4] == "pack" and len(parts) == 5 and method == "POST":
            found = self._packs.pack
        elif parts[4] == "ports" and len(parts) == 6 and method == "POST":
            found = self._ports.connect
            given.append(parts[5])
        elif parts[4] in ("snapshot", "fork") and len(parts) == 5 and method == "POST":
            found = self._snapshots.snapshot if parts[4] == "snapshot" else self._snapshots.fork
        elif parts[4] == "files" and len(parts) == 6:
            found = self._files.get((method, parts[5]))
        else:
            rest = "/".join(parts[4:])
            found = self._screens.find(method, rest) or self._views.find(method, rest)
        return None if found is None else partial(found, *given)


def _told_whose(sandbox_id: str, route: ASGIApp) -> ASGIApp:
    """Errors of this route name the sandbox."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await route(scope, receive, send)
        except errors.OpenDSecError as exc:
            exc.sandbox_id = exc.sandbox_id or sandbox_id[:80]
            raise

    return answer


async def _verb(files: FileRoutes, verb: str, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
    await files.verb(sandbox_id, verb, scope, receive, send)


def _node(request: _Asked) -> Node:
    node: Node = request.app.state.node
    return node


def _sandbox(request: _Asked, sandbox_id: FromPath[str]) -> Sandbox:
    return _node(request).get(sandbox_id, project=project_of(request.scope))  # type: ignore[arg-type]


@get("/v1/sandboxes", summary="List sandboxes")
async def list_sandboxes(request: _Asked) -> SandboxPage:
    """Live ones unless `state` names states (`all` for every one). `label=key=value` may be repeated. Ordered by id.
    With `usage=true` the memory in use of each.
    """
    page = parse_listing(request.scope.get("query_string", b"").decode("latin-1"))
    found = [
        one
        for one in _node(request).all(project=project_of(request.scope))  # type: ignore[arg-type]
        if one.sandbox_id > page.cursor and one.state in page.states and page.labels.items() <= one.spec.labels.items()
    ]
    items = found[: page.limit]
    told = []
    for number, one in enumerate(items, start=1):
        told.append(one.status(with_usage=page.usage))
        if page.usage and not number % USAGE_AT_ONCE:
            await asyncio.sleep(0)
    return SandboxPage(items=tuple(told), cursor=items[-1].sandbox_id if len(found) > page.limit else "")


class Listing:
    """What a listing asks for."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.states: frozenset[SandboxState] = LIVE_STATES
        self.limit = DEFAULT_PAGE
        self.cursor = ""
        self.usage = False


def parse_listing(query_string: str) -> Listing:
    """Raises InvalidSpecError naming the parameter."""
    listing = Listing()
    for name, value in parse_qsl(query_string, keep_blank_values=True):
        if name == "label":
            key, equals, wanted = value.partition("=")
            if not equals:
                raise errors.InvalidSpecError(f"label: {value[:80]!r} is not key=value", detail={"field": "label"})
            listing.labels[key] = wanted
        elif name == "state":
            listing.states = _states(value)
        elif name == "limit":
            if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MAX_PAGE:
                raise errors.InvalidSpecError(f"limit: is not a number from 1 to {MAX_PAGE}", detail={"field": "limit"})
            listing.limit = int(value)
        elif name == "cursor":
            listing.cursor = value
        elif name == "usage":
            if value not in ("true", "false"):
                raise errors.InvalidSpecError("usage: is true or false", detail={"field": "usage"})
            listing.usage = value == "true"
        else:
            raise errors.InvalidSpecError(f"{name[:80]}: no such parameter here", detail={"field": name[:80]})
    return listing


def _states(text: str) -> frozenset[SandboxState]:
    if text in ("", "live"):
        return LIVE_STATES
    if text == "all":
        return frozenset(SandboxState)
    try:
        return frozenset(SandboxState(word) for word in text.split(","))
    except ValueError:
        known = ", ".join(state.value for state in SandboxState)
        raise errors.InvalidSpecError(
            f"state: {text[:80]!r} is not of {known}, live, all", detail={"field": "state"}
        ) from None


@get("/v1/sandboxes/{sandbox_id:str}", summary="One sandbox, also for a while after its end")
async def get_sandbox(request: _Asked, sandbox_id: FromPath[str]) -> SandboxStatus:
    """With its memory in use."""
    return _sandbox(request, sandbox_id).status(with_usage=True)


@patch("/v1/sandboxes/{sandbox_id:str}", summary="Change lifetime and labels")
async def update_sandbox(request: _Asked, sandbox_id: FromPath[str], data: JSONBody[UpdateRequest]) -> SandboxStatus:
    """Fields left out stay."""
    sandbox = _sandbox(request, sandbox_id)
    if data.lifetime is not None:
        check_seconds(data.lifetime.ttl_running_stop, "ttl_running_stop")
        check_seconds(data.lifetime.ttl_max_stop, "ttl_max_stop")
    if data.labels is not None:
        check_labels(data.labels)
    await sandbox.update(lifetime=data.lifetime, labels=data.labels)
    return sandbox.status()


@post("/v1/sandboxes/{sandbox_id:str}/pause", status_code=200, summary="Stop using CPU, keep everything")
async def pause_sandbox(request: _Asked, sandbox_id: FromPath[str]) -> SandboxStatus:
    """Answered when it is paused. Any operation resumes it."""
    sandbox = _sandbox(request, sandbox_id)
    await sandbox.pause()
    return sandbox.status()


@post("/v1/sandboxes/{sandbox_id:str}/resume", status_code=200, summary="Undo pause")
async def resume_sandbox(request: _Asked, sandbox_id: FromPath[str]) -> SandboxStatus:
    """Answered when it runs."""
    sandbox = _sandbox(request, sandbox_id)
    await sandbox.resume()
    return sandbox.status()


@get("/v1/node", summary="How this edge is")
async def report_node(request: _Asked) -> NodeReport:
    """Load, backends, and why it takes no more if it does not."""
    return _report(request)


@post("/v1/node/backends", status_code=200, summary="Look again at backends that do not work")
async def look_again(request: _Asked) -> NodeReport:
    """For something was put right. Answered when each works or is known not to."""
    await _node(request).look_again()
    return _report(request)


def _report(request: _Asked) -> NodeReport:
    report = _node(request).report()
    engine: FnCalls | None = request.app.state.fncalls
    if engine is None:
        return report
    return replace(report, backends={**report.backends, BackendKind.FNCALL.value: engine.report()})
