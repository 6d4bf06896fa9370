"""Images over HTTP, below `/v1/images`. Raw ASGI, because trees and differences are streams of lines.

Images are named in queries (`?image=`, `?before=`, `?after=`), percent-encoded: names hold `/`, `:` and `@`, which a
path does not survive on its way through proxies.
"""

from __future__ import annotations

from opendsec import errors
from opendsec.edge.image_desk import ImageDesk
from opendsec.edge.requests import flag, integer, nothing_else, require_right
from opendsec.model.ids import check_image_name
from opendsec.server.asgi import ASGIApp, Receive, Scope, Send, query, read_body, send_json
from opendsec.server.streams import send_stream
from opendsec.store.tagging import Composition
from opendsec.wire import codec
from opendsec.wire.contracts import (
    MAX_JSON_BODY,
    NDJSON_MEDIA_TYPE,
    RIGHT_BUILD,
    ComposeRequest,
    ImagePage,
    TagRequest,
)

MAX_IMAGES = 1000
"""On one page."""
MAX_DEPTH = 1_000_000


class ImageRoutes:
    """`desk` None: this edge has no store."""

    def __init__(self, desk: ImageDesk | None) -> None:
        self._given = desk
        self._routes: dict[tuple[str, str], ASGIApp] = {
            ("GET", ""): self.list,
            ("DELETE", ""): self.remove,
            ("GET", "inspect"): self.inspect,
            ("GET", "tree"): self.tree,
            ("GET", "diff"): self.diff,
            ("POST", "tag"): self.tag,
            ("POST", "compose"): self.compose,
        }

    def find(self, method: str, verb: str) -> ASGIApp | None:
        """The route of `/v1/images` (verb "") or `/v1/images/<verb>`; None when there is none."""
        return self._routes.get((method, verb))

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET images"""
        del receive
        found = query(scope)
        limit = integer(found, "limit", most=MAX_IMAGES)
        prefix, after = found.pop("prefix", ""), found.pop("cursor", "")
        nothing_else(found)
        if limit == 0:
            raise errors.InvalidSpecError("limit: is 0", detail={"field": "limit"})
        if self._given is None:
            await send_json(send, ImagePage(items=()))
            return
        items, cursor = await self._given.page(prefix=prefix, limit=limit or MAX_IMAGES, after=after)
        await send_json(send, ImagePage(items=items, cursor=cursor))

    async def remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE images"""
        del receive
        require_right(scope, RIGHT_BUILD)
        found = query(scope)
        name, force = _reference(found, "image"), flag(found, "force")
        nothing_else(found)
        await send_json(send, await self._desk.remove(name, force=force))

    async def inspect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET images/inspect"""
        del receive
        found = query(scope)
        reference = _reference(found, "image")
        nothing_else(found)
        await send_json(send, await self._desk.details(reference))

    async def tree(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET images/tree"""
        found = query(scope)
        reference, path = _reference(found, "image"), found.pop("path", "/")
        depth = integer(found, "depth", most=MAX_DEPTH)
        nothing_else(found)
        await read_body(scope, receive, limit=MAX_JSON_BODY)
        lines = self._desk.tree(reference, path, depth=depth)
        await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)

    async def diff(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET images/diff"""
        found = query(scope)
        before, after = _reference(found, "before"), _reference(found, "after")
        found.setdefault("times", "true")
        times = flag(found, "times")
        nothing_else(found)
        await read_body(scope, receive, limit=MAX_JSON_BODY)
        lines = self._desk.diff(before, after, times=times)
        await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)

    async def tag(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST images/tag"""
        require_right(scope, RIGHT_BUILD)
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), TagRequest)
        await send_json(send, await self._desk.tag(request))

    async def compose(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST images/compose"""
        require_right(scope, RIGHT_BUILD)
        request = codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), ComposeRequest)
        wanted = Composition(
            base=request.base, workspace=request.workspace or "", toolkits=request.toolkits, pin=request.pin
        )
        await send_json(send, await self._desk.compose(request.name, wanted, replace=request.replace))

    @property
    def _desk(self) -> ImageDesk:
        if self._given is None:
            raise errors.UnsupportedError("this edge has no image store")
        return self._given


def _reference(found: dict[str, str], name: str) -> str:
    """A parameter that names an image."""
    text = found.pop(name, None)
    if text is None:
        raise errors.InvalidSpecError(f"{name}: is missing", detail={"field": name})
    return check_image_name(text, field=name)
