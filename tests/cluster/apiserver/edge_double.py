"""An edge from memory: speaks the HTTP contract, starts nothing. What it was asked is kept, so tests can count.

Also a program: `python -m tests.cluster.apiserver.edge_double NAME SOCKET TOKEN` serves one until SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from litestar import Request, Response, delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from opendsec import errors
from opendsec.model.ids import SandboxId
from opendsec.model.image import ImageConfig
from opendsec.model.image_view import ImageDetails, ImageSummary
from opendsec.model.node import NodeReport, SandboxState, SandboxStatus
from opendsec.model.spec import SandboxSpec
from opendsec.server.app import make_app
from opendsec.server.asgi import ASGIApp, Scope, body_chunks, header, query
from opendsec.server.auth import constant_token
from opendsec.server.runner import Address, listen, run, serve
from opendsec.server.streams import AsgiAnswer, StreamAnswer, ndjson_answer
from opendsec.wire import codec
from opendsec.wire.contracts import (
    NDJSON_MEDIA_TYPE,
    BatchItem,
    BatchRequest,
    CreateRequest,
    ImagePage,
    SandboxPage,
    TagRequest,
)

Incoming = Request[Any, Any, Any]
Labels = FromQuery[list[str] | None]
InState = Annotated[str, QueryParameter(name="state")]


@dataclass
class EdgeDouble:
    """`capacity`: sandboxes it admits; `start_s`: how long a start takes; `cut_after`: bytes a download breaks at;
    `stuck`: a sandbox whose removal never ends; `keeps_images`: refuses to remove one."""

    name: str
    capacity: int = 1_000_000
    start_s: float = 0.0
    cut_after: int = 0
    stuck: str = ""
    keeps_images: bool = False
    images: tuple[str, ...] = ("debian",)
    sandboxes: dict[SandboxId, SandboxStatus] = field(default_factory=dict)
    starts: list[SandboxId] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    """Targets without an endpoint here, with the header x-custom."""
    live: int = 0
    gone: int = 0
    streaming: int = 0

    async def start(self, sandbox_id: SandboxId, spec: SandboxSpec, project: str) -> SandboxStatus:
        """Asked twice for one id, it starts one sandbox."""
        if sandbox_id in self.sandboxes:
            return self.sandboxes[sandbox_id]
        if spec.image not in self.images:
            raise errors.ImageNotFoundError(f"no image {spec.image}", detail={"field": "image"})
        if self.live >= self.capacity:
            raise errors.CapacityError(f"edge {self.name} is full")
        status = SandboxStatus(
            sandbox_id=sandbox_id,
            project=project,
            edge=self.name,
            state=SandboxState.RUNNING,
            spec=spec,
            created_at=time.time(),
        )
        self.sandboxes[sandbox_id] = status
        self.starts.append(sandbox_id)
        self.live += 1
        if self.start_s:
            await asyncio.sleep(self.start_s)
        return status

    def find(self, sandbox_id: str, request: Incoming) -> SandboxStatus:
        status = self.sandboxes.get(SandboxId(sandbox_id))
        if status is None or status.project != header(request.scope, b"x-opendsec-project"):
            raise errors.NotFoundError(f"no sandbox {sandbox_id}", sandbox_id=sandbox_id)
        return status


def _double(request: Incoming) -> EdgeDouble:
    double: EdgeDouble = request.app.state.double
    headers = {key.decode(): value.decode("latin-1") for key, value in request.scope["headers"]}
    target = request.scope["raw_path"] + b"?" + request.scope["query_string"]
    double.requests.append((request.method, target.decode("latin-1"), headers))
    return double


def _project(request: Incoming) -> str:
    return header(request.scope, b"x-opendsec-project") or ""


@post("/v1/sandboxes")
async def create(request: Incoming, data: JSONBody[CreateRequest]) -> SandboxStatus:
    assert data.sandbox_id is not None
    return await _double(request).start(data.sandbox_id, data.spec, _project(request))


@post("/v1/sandbox-batches", status_code=200)
async def batch(request: Incoming, data: JSONBody[BatchRequest]) -> StreamAnswer:
    double = _double(request)

    async def items() -> AsyncGenerator[BatchItem]:
        for index, sandbox_id in enumerate(data.sandbox_ids):
            try:
                yield BatchItem(index=index, status=await double.start(sandbox_id, data.spec, _project(request)))
            except errors.OpenDSecError as exc:
                yield BatchItem(index=index, error=codec.error_fields(exc))
        yield BatchItem(done=True)

    return ndjson_answer(items())


@get("/v1/sandboxes")
async def list_all(
    request: Incoming,
    label: Labels = None,
    in_state: InState = "",
    limit: FromQuery[int] = 100,
    cursor: FromQuery[str] = "",
) -> SandboxPage:
    wanted = dict(pair.split("=", 1) for pair in label or ())
    found = [
        status
        for sandbox_id, status in sorted(_double(request).sandboxes.items())
        if status.project == _project(request)
        and (not in_state or status.state == in_state)
        and wanted.items() <= dict(status.spec.labels).items()
        and sandbox_id > cursor
    ]
    return SandboxPage(items=tuple(found[:limit]), cursor=found[limit - 1].sandbox_id if len(found) > limit else "")


@get("/v1/sandboxes/{sandbox_id:str}")
async def one(request: Incoming, sandbox_id: FromPath[str]) -> SandboxStatus:
    return _double(request).find(sandbox_id, request)


@delete("/v1/sandboxes/{sandbox_id:str}", status_code=200)
async def stop(request: Incoming, sandbox_id: FromPath[str]) -> SandboxStatus:
    double = _double(request)
    found = double.find(sandbox_id, request)
    if sandbox_id == double.stuck:
        await asyncio.Event().wait()
    double.live -= found.state is SandboxState.RUNNING
    status = replace(found, state=SandboxState.STOPPED, ended_at=time.time())
    double.sandboxes[status.sandbox_id] = status
    return status


@get("/v1/sandboxes/{sandbox_id:str}/files/content")
async def download(request: Incoming, sandbox_id: FromPath[str]) -> StreamAnswer:
    """`length` bytes in chunks of 256 KiB, counted so that a test sees when its reader has gone."""
    double = _double(request)
    double.find(sandbox_id, request)
    length = int(query(request.scope).get("length", "0"))

    async def chunks() -> AsyncGenerator[bytes]:
        double.streaming += 1
        sent = 0
        try:
            while sent < length:
                if double.cut_after and sent >= double.cut_after:
                    raise errors.NodeError("cut by the test")
                piece = min(256 * 1024, length - sent)
                yield bytes([sent // (256 * 1024) % 251]) * piece
                sent += piece
        finally:
            double.streaming -= 1
            double.gone += sent < length

    return StreamAnswer(chunks(), media_type="application/octet-stream")


@put("/v1/sandboxes/{sandbox_id:str}/files/content", request_max_body_size=None)
async def upload(request: Incoming, sandbox_id: FromPath[str]) -> Response[dict[str, int]]:
    double = _double(request)
    double.find(sandbox_id, request)
    total = crc = 0
    async for chunk in body_chunks(request.receive):
        total += len(chunk)
        crc = (crc + sum(chunk[:64])) % 65536
        if query(request.scope).get("refuse_after") and total > int(query(request.scope)["refuse_after"]):
            raise errors.FileError("no space", detail={"errno": "ENOSPC", "path": "/x"})
    return Response({"bytes": total, "crc": crc})


@post("/v1/sandboxes/{sandbox_id:str}/commands", request_max_body_size=None)
async def echo(request: Incoming, sandbox_id: FromPath[str]) -> AsgiAnswer:
    """Sends every chunk of the request straight back, so both directions flow at once."""
    _double(request).find(sandbox_id, request)

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-double", b"yes")]})
        async for chunk in body_chunks(receive):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return AsgiAnswer(answer, media_type="application/octet-stream")


def _summary(name: str) -> ImageSummary:
    return ImageSummary(
        name=name,
        digest=f"sha256:{name}",
        created_at=1.0,
        source="",
        roles=(),
        layer_count=0,
        size_bytes=0,
        shared_bytes=0,
    )


def _known(double: EdgeDouble, image: str) -> str:
    if image not in double.images:
        raise errors.ImageNotFoundError(f"no image {image!r}", detail={"image": image})
    return image


@get("/v1/images")
async def images(
    request: Incoming, prefix: FromQuery[str] = "", limit: FromQuery[int] = 1000, cursor: FromQuery[str] = ""
) -> ImagePage:
    names = [name for name in sorted(_double(request).images) if name > cursor and name.startswith(prefix)]
    return ImagePage(items=tuple(map(_summary, names[:limit])), cursor=names[limit - 1] if len(names) > limit else "")


@get("/v1/images/inspect")
async def inspect_image(request: Incoming, image: FromQuery[str]) -> ImageDetails:
    double = _double(request)
    return ImageDetails(
        name=_known(double, image),
        digest=f"sha256:{image}",
        created_at=1.0,
        source=f"edge {double.name}",
        config=ImageConfig(),
        layers=(),
        base="",
        toolkits=(),
        size_bytes=0,
    )


@delete("/v1/images", status_code=200)
async def remove_image(request: Incoming, image: FromQuery[str], force: FromQuery[bool] = False) -> ImageSummary:
    double = _double(request)
    if double.keeps_images and not force:
        raise errors.ConflictError(f"image {image!r} is needed")
    summary = _summary(_known(double, image))
    double.images = tuple(name for name in double.images if name != image)
    return summary


@post("/v1/images/tag", status_code=200)
async def tag_image(request: Incoming, data: JSONBody[TagRequest]) -> ImageSummary:
    double = _double(request)
    _known(double, data.image)
    double.images = (*double.images, data.name)
    return _summary(data.name)


@get("/v1/images/tree")
async def image_tree(request: Incoming, image: FromQuery[str]) -> StreamAnswer:
    """`cut_after` bytes at most of 20,000 lines."""
    double = _double(request)
    _known(double, image)

    async def lines() -> AsyncGenerator[bytes]:
        double.streaming += 1
        sent = 0
        try:
            for number in range(20_000):
                if double.cut_after and sent >= double.cut_after:
                    raise errors.NodeError("cut by the test")
                line = b'{"number": %d}\n' % number
                sent += len(line)
                yield line
        finally:
            double.streaming -= 1
            double.gone += sent < 300_000

    return StreamAnswer(lines(), media_type=NDJSON_MEDIA_TYPE)


@get("/v1/node")
async def node(request: Incoming) -> NodeReport:
    double = _double(request)
    return NodeReport(edge=double.name, version="double", accepting=double.live < double.capacity, live=double.live)


def make_double(double: EdgeDouble, *, token: str) -> ASGIApp:
    """Its ASGI app."""
    about_images = [images, inspect_image, remove_image, tag_image, image_tree]
    routes = [create, batch, list_all, one, stop, download, upload, echo, *about_images, node]

    def raw(scope: Scope) -> ASGIApp | None:
        if "nowhere" in scope["path"]:
            target = scope["raw_path"] + b"?" + scope["query_string"]
            double.missed.append((target.decode("latin-1"), header(scope, b"x-custom") or ""))
        return None

    return make_app(
        routes, title="double", version="0", verify=constant_token(token), raw=raw, state={"double": double}
    )


if __name__ == "__main__":
    name, path, secret = sys.argv[1:4]
    run(serve(make_double(EdgeDouble(name), token=secret), listen(Address(path=Path(path)))))
