"""Images over HTTP: who may, then `Images`. Every key may look; changing names needs what packing needs.

Images are named in queries, percent-encoded: their names hold `/`, `:` and `@`.
"""

from __future__ import annotations

from typing import Any

from litestar import Request, delete, get, post
from litestar.params import FromQuery, JSONBody

from opendsec import errors
from opendsec.apiserver.iam import require_build
from opendsec.apiserver.images import Images
from opendsec.model.ids import check_image_name
from opendsec.model.image_view import ImageDetails, ImageSummary
from opendsec.server.asgi import Receive, Scope, Send, principal, request_id
from opendsec.server.streams import AsgiAnswer, send_stream
from opendsec.wire.contracts import NDJSON_MEDIA_TYPE, ComposeRequest, ImagePage, TagRequest

Incoming = Request[Any, Any, Any]


def _images(request: Incoming) -> Images:
    images: Images = request.app.state.images
    return images


@get("/v1/images", summary="Images sandboxes can start from, a page at a time", tags=["images"])
async def list_images(
    request: Incoming, prefix: FromQuery[str] = "", limit: FromQuery[int] = 1000, cursor: FromQuery[str] = ""
) -> ImagePage:
    """Of every edge, each once, by name. `prefix`: only names that begin so; `limit`: 1 to 1000; `cursor` is the last
    page's.
    """
    return await _images(request).page(prefix=prefix, limit=limit, cursor=cursor, request_id=request_id(request.scope))


@get("/v1/images/inspect", summary="All about an image", tags=["images"])
async def inspect_image(request: Incoming, image: FromQuery[str] = "") -> ImageDetails:
    """`image`: a name or `name@sha256:…`."""
    return await _images(request).details(_given(image, "image"), request_id=request_id(request.scope))


@get(
    "/v1/images/tree",
    summary="What a sandbox that was just started from an image would see: NDJSON of TreeEntry",
    tags=["images"],
    media_type=NDJSON_MEDIA_TYPE,
)
async def image_tree(
    request: Incoming, image: FromQuery[str] = "", path: FromQuery[str] = "/", depth: FromQuery[int | None] = None
) -> AsgiAnswer:
    """From `path` on, directories before what is in them, names in the order of their bytes; `depth` 0 is the path
    alone.
    """
    _given(image, "image")
    return _stream(request, "tree")


@get(
    "/v1/images/diff",
    summary="Where two images differ: NDJSON of Difference",
    tags=["images"],
    media_type=NDJSON_MEDIA_TYPE,
)
async def image_diff(
    request: Incoming, before: FromQuery[str] = "", after: FromQuery[str] = "", times: FromQuery[bool] = True
) -> AsgiAnswer:
    """`times=false`: other times alone are no difference."""
    _given(before, "before")
    _given(after, "after")
    return _stream(request, "diff")


@delete("/v1/images", summary="Forget a name (right build)", tags=["images"], status_code=200)
async def remove_image(request: Incoming, image: FromQuery[str] = "", force: FromQuery[bool] = False) -> ImageSummary:
    """What the name meant. Sandboxes that run keep theirs. `force`: also when other images refer to it by this name."""
    require_build(principal(request.scope))
    return await _images(request).remove(_given(image, "image"), force=force, request_id=request_id(request.scope))


@post("/v1/images/tag", summary="Give an image another name (right build)", tags=["images"], status_code=200)
async def tag_image(request: Incoming, data: JSONBody[TagRequest]) -> ImageSummary:
    """Nothing is copied. May be repeated."""
    require_build(principal(request.scope))
    return await _images(request).tag(data, request_id=request_id(request.scope))


@post(
    "/v1/images/compose", summary="Make an image that refers to others (right build)", tags=["images"], status_code=200
)
async def compose_image(request: Incoming, data: JSONBody[ComposeRequest]) -> ImageSummary:
    """Nothing is copied. May be repeated."""
    require_build(principal(request.scope))
    return await _images(request).compose(data, request_id=request_id(request.scope))


def _given(image: str, field: str) -> str:
    """A reference that must be there, and could be one."""
    if not image:
        raise errors.InvalidSpecError(f"{field}: is missing", detail={"field": field})
    return check_image_name(image, field=field)


def _stream(request: Incoming, verb: str) -> AsgiAnswer:
    """Lines from an edge, with the query as it came: paths in it need not be UTF-8."""
    images = _images(request)
    raw: bytes = request.scope["query_string"]

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        lines = images.stream(verb, raw, request_id=request_id(scope))
        await send_stream(receive, send, lines, media_type=NDJSON_MEDIA_TYPE)

    return AsgiAnswer(answer, media_type=NDJSON_MEDIA_TYPE)


ROUTES = (list_images, inspect_image, image_tree, image_diff, remove_image, tag_image, compose_image)
