"""The endpoints of one sandbox and of calls, as data: what OpenAPI says about the paths that are passed on.

Forwarder and call routes answer these paths before Litestar sees them; the handlers made here only carry the
description. The edge owns their behaviour, `wire.contracts` their meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from litestar import MediaType
from litestar.enums import RequestEncodingType
from litestar.handlers import HTTPRouteHandler
from litestar.params import BodyKwarg, FromPath, QueryParameter

from opendsec import errors
from opendsec.apiserver.fusion import RUN_CODE
from opendsec.model.command import CommandStatus, ExecRequest, PtySize
from opendsec.model.file import FileStat
from opendsec.model.fncall import FnCallResult, FnCallSpec
from opendsec.model.node import SandboxStatus
from opendsec.model.screen import InputRequest, ScreenSize, SerialStatus, View, ViewRequest
from opendsec.wire import contracts as wire

_ID = "/v1/sandboxes/{sandbox_id:str}"
_CID = _ID + "/commands/{command_id:str}"
_OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One forwarded endpoint."""

    method: str
    path: str
    summary: str
    body: Any = None
    """A dataclass, or bytes for a raw body."""
    answer: Any = None
    """A dataclass, or bytes for a raw or streamed answer."""
    media_type: str = MediaType.JSON
    status: int = 200
    tag: str = "one sandbox"
    query: Mapping[str, Any] = field(default_factory=dict)


_FILE_QUERY: Mapping[str, Any] = {"path": str, "user": str | None}

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(method="GET", path=_ID, summary="How a sandbox is", answer=SandboxStatus),
    Endpoint(
        method="PATCH", path=_ID, summary="Change lifetime or labels", body=wire.UpdateRequest, answer=SandboxStatus
    ),
    Endpoint(method="DELETE", path=_ID, summary="Stop a sandbox; may be repeated", answer=SandboxStatus),
    Endpoint(method="POST", path=_ID + "/pause", summary="Stop using CPU, keep memory", answer=SandboxStatus),
    Endpoint(method="POST", path=_ID + "/resume", summary="Go on after a pause", answer=SandboxStatus),
    Endpoint(
        method="POST",
        path=_ID + "/pack",
        summary="Make an image of what it has written (role builder): NDJSON of PackEvent",
        body=wire.PackRequest,
        answer=bytes,
        media_type=wire.NDJSON_MEDIA_TYPE,
    ),
    Endpoint(
        method="POST",
        path=_ID + "/snapshot",
        summary="Save it whole under a name (role builder): NDJSON of SnapshotEvent",
        body=wire.SnapshotRequest,
        answer=bytes,
        media_type=wire.NDJSON_MEDIA_TYPE,
    ),
    Endpoint(
        method="POST",
        path=_ID + "/fork",
        summary="Start further sandboxes that go on from its present state: NDJSON of ForkItem",
        body=wire.ForkRequest,
        answer=bytes,
        media_type=wire.NDJSON_MEDIA_TYPE,
    ),
    Endpoint(
        method="GET",
        path=_ID + "/screen",
        summary="What a full VM's display shows, as PNG; its WebSocket `/screen/vnc` shows it all the time",
        answer=bytes,
        media_type="image/png",
    ),
    Endpoint(method="GET", path=_ID + "/screen/size", summary="Its size in pixels", answer=ScreenSize),
    Endpoint(
        method="POST",
        path=_ID + "/screen/view",
        summary="An address that shows it in a browser, for a while",
        body=ViewRequest,
        answer=View,
        status=201,
    ),
    Endpoint(
        method="POST",
        path=_ID + "/input",
        summary="Mouse and keyboard of a full VM; answered when all of it is done",
        body=InputRequest,
        answer=wire.Empty,
    ),
    Endpoint(
        method="GET",
        path=_ID + "/serial",
        summary="What a full VM's serial console has said; the header X-OpenDSec-Offset says from where",
        answer=bytes,
        media_type="application/octet-stream",
        query={"offset": int | None, "wait": float | None},
    ),
    Endpoint(
        method="POST",
        path=_ID + "/serial",
        summary="Say something to it",
        body=bytes,
        answer=SerialStatus,
    ),
    Endpoint(
        method="POST",
        path=_ID + "/ports/{port:int}",
        summary="A connection to a port inside: bytes in, a port stream out, both at once",
        body=bytes,
        answer=bytes,
        media_type=wire.PORT_MEDIA_TYPE,
    ),
    Endpoint(
        method="POST",
        path=_ID + "/commands",
        summary="Run a command: an exec stream, or with detach=true its status (201)",
        body=ExecRequest,
        answer=bytes,
        media_type=wire.STREAM_MEDIA_TYPE,
        query={"detach": bool | None},
    ),
    Endpoint(method="GET", path=_ID + "/commands", summary="All commands, oldest first", answer=wire.CommandList),
    Endpoint(method="GET", path=_CID, summary="How a command is", answer=CommandStatus),
    Endpoint(
        method="DELETE",
        path=_CID,
        summary="End a command and all it started",
        answer=CommandStatus,
        query={"grace": float | None},
    ),
    Endpoint(
        method="GET",
        path=_CID + "/output",
        summary="Output from these byte offsets, and how it ends, as an exec stream",
        answer=bytes,
        media_type=wire.STREAM_MEDIA_TYPE,
        query={"stdout": int | None, "stderr": int | None},
    ),
    Endpoint(
        method="POST",
        path=_CID + "/stdin",
        summary="Bytes for stdin from an offset",
        body=bytes,
        answer=wire.StdinStatus,
        query={"offset": int, "eof": bool | None},
    ),
    Endpoint(
        method="POST", path=_CID + "/signal", summary="Signal a command", body=wire.SignalRequest, answer=CommandStatus
    ),
    Endpoint(method="POST", path=_CID + "/resize", summary="Resize its terminal", body=PtySize, answer=CommandStatus),
    Endpoint(
        method="GET",
        path=_ID + "/files/content",
        summary="Bytes of a file",
        answer=bytes,
        media_type=_OCTETS,
        query={**_FILE_QUERY, "offset": int | None, "length": int | None},
    ),
    Endpoint(
        method="PUT",
        path=_ID + "/files/content",
        summary="Write a file, atomically",
        body=bytes,
        answer=FileStat,
        query={**_FILE_QUERY, "mode": str | None, "parents": bool | None},
    ),
    Endpoint(
        method="GET",
        path=_ID + "/files/tree",
        summary="A tree as a tree stream",
        answer=bytes,
        media_type=wire.TREE_MEDIA_TYPE,
        query=_FILE_QUERY,
    ),
    Endpoint(
        method="PUT",
        path=_ID + "/files/tree",
        summary="Make a tree from a tree stream",
        body=bytes,
        answer=wire.TreeStatus,
        query=_FILE_QUERY,
    ),
    Endpoint(
        method="GET",
        path=_ID + "/files/watch",
        summary="Changes below a directory, as NDJSON of FileEvent",
        answer=bytes,
        media_type=wire.NDJSON_MEDIA_TYPE,
        query={**_FILE_QUERY, "recursive": bool | None},
    ),
    Endpoint(method="POST", path=_ID + "/files/stat", summary="lstat", body=wire.FileRequest, answer=FileStat),
    Endpoint(
        method="POST", path=_ID + "/files/list", summary="List a directory", body=wire.FileRequest, answer=wire.FileList
    ),
    Endpoint(
        method="POST", path=_ID + "/files/mkdir", summary="Make a directory", body=wire.FileRequest, answer=FileStat
    ),
    Endpoint(method="POST", path=_ID + "/files/move", summary="Rename", body=wire.FileRequest, answer=FileStat),
    Endpoint(method="POST", path=_ID + "/files/remove", summary="Remove", body=wire.FileRequest, answer=wire.Empty),
    Endpoint(
        method="POST", path=_ID + "/files/chmod", summary="Change mode bits", body=wire.FileRequest, answer=FileStat
    ),
    Endpoint(
        method="POST",
        path="/v1/fncalls",
        summary="Carry out one short call; answers when it has ended",
        body=FnCallSpec,
        answer=FnCallResult,
        tag="calls",
    ),
    Endpoint(
        method="POST",
        path="/v1/fncall-batches",
        summary="Carry out up to 32,768 calls: NDJSON of FnCallItem as they end, in any order",
        body=wire.FnCallBatch,
        answer=bytes,
        media_type=wire.NDJSON_MEDIA_TYPE,
        tag="calls",
    ),
    Endpoint(
        method="POST",
        path=RUN_CODE,
        summary="SandboxFusion's run_code (docs/howto/fncall.md)",
        body=bytes,
        answer=bytes,
        tag="calls",
    ),
)


def described() -> list[HTTPRouteHandler]:
    """Litestar handlers that put ENDPOINTS into the OpenAPI document."""
    return [_handler(endpoint) for endpoint in ENDPOINTS]


def _marked(kind: Any, marker: object) -> Any:
    """`Annotated[kind, marker]` for a type that is only known at run time."""
    form: Any = Annotated  # a subscription works in every Python; how it is done inside changed with 3.13
    return form[kind, marker]


def _handler(endpoint: Endpoint) -> HTTPRouteHandler:
    async def forwarded(**_values: object) -> None:
        raise errors.OpenDSecError("a sandbox's endpoint reached the apiserver's own routes")

    kinds: dict[str, Any] = {}
    if "sandbox_id" in endpoint.path:
        kinds["sandbox_id"] = FromPath[str]
    if "command_id" in endpoint.path:
        kinds["command_id"] = FromPath[str]
    kinds.update({name: _marked(kind, QueryParameter()) for name, kind in endpoint.query.items()})
    optional = {name for name, kind in endpoint.query.items() if type(None) in getattr(kind, "__args__", ())}
    if endpoint.body is bytes:
        kinds["data"] = _marked(bytes, BodyKwarg(media_type=_OCTETS))
    elif endpoint.body is not None:
        kinds["data"] = _marked(endpoint.body, BodyKwarg(media_type=RequestEncodingType.JSON))
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=None if name in optional else inspect.Parameter.empty,
        )
        for name, kind in kinds.items()
    ]
    forwarded.__signature__ = inspect.Signature(parameters, return_annotation=endpoint.answer)  # type: ignore[attr-defined]
    forwarded.__annotations__ = {**kinds, "return": endpoint.answer}
    verb = endpoint.path.rsplit("/", 1)[-1].strip("{}").partition(":")[0]
    forwarded.__name__ = f"{endpoint.method.lower()}_{verb}"
    return HTTPRouteHandler(
        endpoint.path,
        http_method=endpoint.method,  # type: ignore[arg-type]
        status_code=endpoint.status,
        media_type=endpoint.media_type,
        summary=endpoint.summary,
        tags=[endpoint.tag],
    )(forwarded)
