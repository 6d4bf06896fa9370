"""Management endpoints: decode, decide, call, encode; nothing else.

Everything about one sandbox goes through `forward` and never comes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from litestar import MediaType, Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from opendsec import errors
from opendsec.apiserver.batches import Batches, check_batch
from opendsec.apiserver.creating import Caller, Creating, check_timeout
from opendsec.apiserver.creations import check_key
from opendsec.apiserver.iam import Iam, Principal, require_admin
from opendsec.apiserver.listing import Listing
from opendsec.model.access import NewKey, Project
from opendsec.model.node import SandboxStatus
from opendsec.model.spec import check_spec
from opendsec.server.asgi import Receive, Scope, Send, header, principal, request_id
from opendsec.server.streams import AsgiAnswer, while_connected
from opendsec.wire.contracts import (
    HEADER_IDEMPOTENCY,
    HEADER_TIMEOUT,
    NDJSON_MEDIA_TYPE,
    AbandonRequest,
    BatchRequest,
    CreateRequest,
    Empty,
    KeyList,
    KeyRequest,
    ProjectList,
    ProjectRequest,
    SandboxPage,
)

Incoming = Request[Any, Any, Any]
Labels = FromQuery[list[str] | None]
_LIST_QUERY = frozenset({"label", "state", "limit", "cursor", "usage"})
InState = Annotated[str, QueryParameter(name="state")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes call; one per process, in `app.state.parts`."""

    iam: Iam
    creating: Creating
    batches: Batches
    listing: Listing


def _parts(request: Incoming) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


def _who(scope: Any) -> Principal:
    found: Principal = principal(scope)
    return found


def _caller(scope: Any) -> Caller:
    return Caller(
        project=_who(scope).project,
        request_id=request_id(scope),
        idempotency_key=check_key(header(scope, HEADER_IDEMPOTENCY.lower().encode("ascii"))),
        timeout=check_timeout(header(scope, HEADER_TIMEOUT.lower().encode("ascii"))),
    )


@post("/v1/sandboxes", summary="Start a sandbox; answers when it is ready", tags=["sandboxes"])
async def create_sandbox(request: Incoming, data: JSONBody[CreateRequest]) -> Response[SandboxStatus]:
    """Headers: `Idempotency-Key` (same key and body: same sandbox), `X-OpenDSec-Timeout` (seconds)."""
    if data.sandbox_id is not None:
        raise errors.InvalidSpecError("sandbox_id: chosen by the apiserver", detail={"field": "sandbox_id"})
    check_spec(data.spec)
    caller = _caller(request.scope)
    status: Any = await while_connected(request.receive, _parts(request).creating.create(data, caller))
    return Response(status, media_type=MediaType.JSON, status_code=201)


@post(
    "/v1/sandbox-batches",
    summary="Start up to 32,768 sandboxes; answers with NDJSON of BatchItem as they become ready",
    tags=["sandboxes"],
    status_code=200,
    media_type=NDJSON_MEDIA_TYPE,
)
async def create_batch(request: Incoming, data: JSONBody[BatchRequest]) -> AsgiAnswer:
    """Headers as for one. The last line has `done`; an answer without it was cut."""
    check_spec(data.spec)
    check_batch(data)
    caller = _caller(request.scope)
    batches = _parts(request).batches

    async def answer(_scope: Scope, receive: Receive, send: Send) -> None:
        await send_batch(batches, data, caller, receive, send)

    return AsgiAnswer(answer, media_type=NDJSON_MEDIA_TYPE)


async def send_batch(batches: Batches, data: BatchRequest, caller: Caller, receive: Receive, send: Send) -> None:
    """Lines as they come, no faster than the client reads; the client's leaving ends it."""
    begun = False

    async def deliver(lines: bytes) -> None:
        nonlocal begun
        if not begun:
            begun = True
            head = [(b"content-type", NDJSON_MEDIA_TYPE.encode("ascii"))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": lines, "more_body": True})

    await while_connected(receive, batches.run(data, caller, deliver))
    await send({"type": "http.response.body", "body": b""})


@post(
    "/v1/sandbox-batches/abandon",
    summary="End what a batch started and is not to be kept; it starts no more",
    tags=["sandboxes"],
    status_code=200,
)
async def abandon_batch(request: Incoming, data: JSONBody[AbandonRequest]) -> Empty:
    """The header `Idempotency-Key` names the batch. May be repeated."""
    caller = _caller(request.scope)
    if caller.idempotency_key is None:
        raise errors.InvalidSpecError(f"{HEADER_IDEMPOTENCY}: is missing", detail={"field": HEADER_IDEMPOTENCY})
    await _parts(request).batches.abandon(caller.project, caller.idempotency_key, frozenset(data.keep))
    return Empty()


@get("/v1/sandboxes", summary="List sandboxes of the project", tags=["sandboxes"])
async def list_sandboxes(
    request: Incoming,
    label: Labels = None,
    in_state: InState = "",
    limit: FromQuery[int] = 100,
    cursor: FromQuery[str] = "",
    usage: FromQuery[bool] = False,
) -> SandboxPage:
    """`label=key=value` may be repeated (all must match); `state` is `live` (default), `all` or states with commas
    between; `cursor` is the last page's; `usage=true` tells the memory in use of each.
    """
    for name in request.query_params:
        if name not in _LIST_QUERY:
            raise errors.InvalidSpecError(f"{name[:80]}: no such parameter here", detail={"field": name[:80]})
    return await _parts(request).listing.page(
        project=_who(request.scope).project,
        labels=tuple(label or ()),
        state=in_state,
        limit=limit,
        cursor=cursor,
        usage=usage,
        request_id=request_id(request.scope),
    )


@post("/v1/keys", summary="Make an API key (admin); its secret is told this once", tags=["keys"])
async def create_key(request: Incoming, data: JSONBody[KeyRequest]) -> NewKey:
    """For the caller's project unless another is named."""
    who = _who(request.scope)
    require_admin(who)
    return await _parts(request).iam.create_key(
        project=who.project if data.project is None else data.project, role=data.role, title=data.title
    )


@get("/v1/keys", summary="All API keys, without their secrets (admin)", tags=["keys"])
async def list_keys(request: Incoming) -> KeyList:
    """Oldest first."""
    require_admin(_who(request.scope))
    return KeyList(items=await _parts(request).iam.list_keys())


@delete("/v1/keys/{key_id:str}", summary="Delete an API key (admin)", tags=["keys"], status_code=204)
async def delete_key(request: Incoming, key_id: FromPath[str]) -> None:
    """It stops working at once here, and within seconds in other apiservers."""
    require_admin(_who(request.scope))
    await _parts(request).iam.delete_key(key_id)


@post("/v1/projects", summary="Make a project (admin)", tags=["keys"])
async def create_project(request: Incoming, data: JSONBody[ProjectRequest]) -> Project:
    """A name of 1 to 63 lower-case letters, digits and inner dashes."""
    require_admin(_who(request.scope))
    return await _parts(request).iam.create_project(data.name)


@get("/v1/projects", summary="All projects (admin)", tags=["keys"])
async def list_projects(request: Incoming) -> ProjectList:
    """By name."""
    require_admin(_who(request.scope))
    return ProjectList(items=await _parts(request).iam.list_projects())


ROUTES = (
    create_sandbox,
    create_batch,
    abandon_batch,
    list_sandboxes,
    create_key,
    list_keys,
    delete_key,
    create_project,
    list_projects,
)
