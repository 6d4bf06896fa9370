"""Images across edges. Edges may share one store or have one each; either way an image is found where it is.

Questions go to one edge after the other until one has the image; changes go to every edge, and to those that have not
got it they mean nothing. An edge that does not answer fails a change, and a question nobody else could answer, with its
name: what might be there is never told as missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar
from urllib.parse import quote, urlencode

from opendsec import errors
from opendsec.apiserver.connection import ConnectionLostError, EdgeConnection
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.link import EdgeLink
from opendsec.model.image_view import ImageDetails, ImageSummary
from opendsec.server.streams import first_failure
from opendsec.wire import codec
from opendsec.wire.contracts import ComposeRequest, ImagePage, TagRequest

T = TypeVar("T")

MAX_PAGE = 1000


class Images:
    """One per process."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    async def page(self, *, prefix: str, limit: int, cursor: str, request_id: str) -> ImagePage:
        """Up to `limit` names of all edges, in order; an image several edges have counts once. The cursor is a name."""
        if not 1 <= limit <= MAX_PAGE:
            raise errors.InvalidSpecError(f"limit: {limit} is not between 1 and {MAX_PAGE}", detail={"field": "limit"})
        pairs = [(key, value) for key, value in (("prefix", prefix), ("cursor", cursor)) if value]
        target = _target("", [*pairs, ("limit", str(limit))])
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(_page_of(link, target, request_id)) for link in self._links()]
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        return merged([task.result() for task in asked], limit)

    async def details(self, image: str, *, request_id: str) -> ImageDetails:
        """From the first edge that has it."""
        target = _target("inspect", [("image", image)])
        missing = _Missing()
        for link in self._links():
            try:
                _, body = await link.call("GET", target, request_id=request_id, repeatable=True)
                return codec.decode_answer(body, ImageDetails)
            except (errors.ImageNotFoundError, errors.ConnectError) as exc:
                missing.add(exc)
        raise missing.worst()

    async def stream(self, verb: str, query_string: bytes, *, request_id: str) -> AsyncGenerator[bytes]:
        """The lines of `tree` or `diff` from the first edge that has the images; the query is passed as it came."""
        target = b"/v1/images/" + verb.encode("ascii") + b"?" + query_string
        missing = _Missing()
        for link in self._links():
            try:
                connection = await _asked(link, target, request_id)
            except (errors.ImageNotFoundError, errors.ConnectError) as exc:
                missing.add(exc)
                continue
            try:
                async for chunk in connection.chunks():
                    yield chunk
            finally:
                link.release(connection)  # closed, when the rest of the answer is not wanted
            return
        raise missing.worst()

    async def remove(self, image: str, *, force: bool, request_id: str) -> ImageSummary:
        """From every edge that has it."""
        target = _target("", [("image", image), ("force", "true" if force else "false")])
        return await self._everywhere("DELETE", target, b"", request_id, repeatable=False)

    async def tag(self, request: TagRequest, *, request_id: str) -> ImageSummary:
        """On every edge that has the image."""
        return await self._everywhere("POST", "/v1/images/tag", codec.encode(request), request_id, repeatable=True)

    async def compose(self, request: ComposeRequest, *, request_id: str) -> ImageSummary:
        """On every edge that has all it refers to."""
        return await self._everywhere("POST", "/v1/images/compose", codec.encode(request), request_id, repeatable=True)

    async def _everywhere(
        self, method: str, target: str, body: bytes, request_id: str, *, repeatable: bool
    ) -> ImageSummary:
        done: list[ImageSummary] = []
        missing = _Missing()
        failed: list[errors.OpenDSecError] = []
        for link in self._links():  # one after the other: edges that share a store would race for the name
            try:
                _, answer = await link.call(method, target, body=body, request_id=request_id, repeatable=repeatable)
                done.append(codec.decode_answer(answer, ImageSummary))
            except errors.ImageNotFoundError as exc:
                missing.add(exc)
            except errors.OpenDSecError as exc:
                exc.detail.setdefault("edge", link.name)
                failed.append(exc)
        if failed:
            raise failed[0]
        if not done:
            raise missing.worst()
        return done[0]

    def _links(self) -> list[EdgeLink]:
        return [link for _, link in sorted(self._edges.links.items())]


class _Missing:
    """Why no edge has answered so far."""

    def __init__(self) -> None:
        self._errors: list[errors.OpenDSecError] = []

    def add(self, error: errors.OpenDSecError) -> None:
        self._errors.append(error)

    def worst(self) -> errors.OpenDSecError:
        """An edge that is away may have it; only when all have answered it is missing."""
        if not self._errors:
            return errors.UnschedulableError("no edge is known", remedy="start one, or name it in OPENDSEC_EDGES")
        away = [error for error in self._errors if isinstance(error, errors.ConnectError)]
        return (away or self._errors)[0]


def merged(pages: list[ImagePage], limit: int) -> ImagePage:
    """Pages of several edges, each up to `limit` names from the same cursor on, as one."""
    found: dict[tuple[str, str], ImageSummary] = {}
    for page in pages:
        for item in page.items:
            found.setdefault((item.name, item.digest), item)
    # Behind the cursor of a page that goes on, nothing is known of that edge. (Its own name may have gone meanwhile.)
    known_to = min((page.cursor for page in pages if page.cursor), default="")
    keys = [key for key in sorted(found) if not known_to or key[0] <= known_to]
    names = sorted({name for name, _ in keys})
    last = names[limit - 1] if len(names) > limit else ""
    items = tuple(found[key] for key in keys if not last or key[0] <= last)
    return ImagePage(items=items, cursor=last or known_to)


async def _page_of(link: EdgeLink, target: str, request_id: str) -> ImagePage:
    _, body = await link.call("GET", target, request_id=request_id, repeatable=True)
    return codec.decode_answer(body, ImagePage)


async def _asked(link: EdgeLink, target: bytes, request_id: str) -> EdgeConnection:
    """A connection with the head of a good answer on it. Raises the edge's own error."""
    connection = await link.connection()
    try:
        head = link.request_head("GET", target, project="", request_id=request_id)
        connection.begin(head + b"content-length: 0\r\n\r\n", whole=True)
        await _check_good(link, connection)
    except ConnectionLostError as exc:
        link.release(connection)
        raise link.unknown_outcome(str(exc)) from exc
    except BaseException:
        link.release(connection)
        raise
    return connection


async def _check_good(link: EdgeLink, connection: EdgeConnection) -> None:
    status = await connection.head()
    if status >= 400:
        body = b"".join([chunk async for chunk in connection.chunks()])
        raise codec.decode_error(body, fallback=f"edge {link.name} answered with status {status}")


def _target(verb: str, pairs: list[tuple[str, str]]) -> str:
    path = f"/v1/images/{verb}" if verb else "/v1/images"
    return f"{path}?{urlencode(pairs, quote_via=quote, errors='surrogateescape')}"
