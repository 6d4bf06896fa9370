"""`client.images`: which images there are, what is in them, how two differ, and what names mean."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transport import Body, Query, Transport, decode_answer, target
from opendsec.errors import InvalidSpecError, ProtocolError
from opendsec.model.ids import check_image_name
from opendsec.model.image import ImageConfig
from opendsec.model.image_view import Difference, ImageDetails, ImageSummary, TreeEntry
from opendsec.wire.contracts import ComposeRequest, ImagePage, TagRequest

PAGE = 1000


class Images:
    """Images of one platform. A reference is a name, or `name@sha256:…` for what a name meant once and for ever.

    Reading needs any key; changing what names mean needs one that may build. Raises ImageNotFoundError,
    ImageInvalidError, InvalidSpecError naming the field, ForbiddenError, TransportError.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self, *, prefix: str = "", page_size: int = PAGE) -> AsyncIterator[ImageSummary]:
        """All images whose names begin with `prefix`, by name, page by page."""
        cursor = ""
        while True:
            query = {"prefix": prefix or None, "limit": page_size, "cursor": cursor or None}
            page = await self._transport.call("GET", target("images", query=query), ImagePage)
            for summary in page.items:
                yield summary
            cursor = page.cursor
            if not cursor:
                return

    async def inspect(self, image: str) -> ImageDetails:
        """All about an image: layers, what it refers to, what it shares, and how much a start of it really reads."""
        query = {"image": check_image_name(image)}
        return await self._transport.call("GET", target("images", "inspect", query=query), ImageDetails)

    async def tree(self, image: str, path: str = "/", *, depth: int | None = None) -> AsyncGenerator[TreeEntry, None]:
        """What a sandbox that was just started would see at `path` and below, without starting one; directories before
        what is in them. `depth` 0 is the path alone, None all. Symbolic links are not followed. Close the iterator
        (`contextlib.aclosing`) when you leave it early.

        Raises NotFoundError for a path that is not there. An answer that is cut raises TransportError.
        """
        query: Query = {"image": check_image_name(image), "path": path, "depth": depth}
        body = await self._transport.open(
            "GET", target("images", "tree", query=query), silence_s=self._transport.timeout_s
        )
        try:
            _check_announced(body)
            async for line in read_lines(body, silence_s=self._transport.timeout_s):
                yield decode_answer(line, TreeEntry, body.request_id)
        finally:
            await body.aclose()

    async def diff(self, before: str, after: str, *, times: bool = True) -> AsyncGenerator[Difference, None]:
        """Every path at which two images differ: bytes, kinds, modes, owners, attributes, times. `times=False`: other
        times alone are no difference.

        An answer that is cut raises TransportError.
        """
        check_image_name(before, field="before")
        check_image_name(after, field="after")
        query: Query = {"before": before, "after": after, "times": times}
        body = await self._transport.open(
            "GET", target("images", "diff", query=query), silence_s=self._transport.timeout_s
        )
        try:
            _check_announced(body)
            async for line in read_lines(body, silence_s=self._transport.timeout_s):
                yield decode_answer(line, Difference, body.request_id)
        finally:
            await body.aclose()

    async def tag(
        self, name: str, image: str, *, config: ImageConfig | None = None, replace: bool = False
    ) -> ImageSummary:
        """Let `name` mean what the reference `image` means now; with `config`, the same files with these defaults of
        commands. `scratch` is an image without a single file, which is always there. Raises ConflictError when `name`
        means another image, unless `replace`."""
        check_image_name(name, field="name")
        request = TagRequest(name=name, image=check_image_name(image), config=config, replace=replace)
        return await self._transport.call("POST", target("images", "tag"), ImageSummary, value=request)

    async def compose(
        self,
        name: str,
        base: str,
        *,
        workspace: str | None = None,
        toolkits: Sequence[str] | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> ImageSummary:
        """Make an image that refers to others; nothing is copied. When a toolkit it names is replaced, the next sandbox
        has the new one; with `pin` it never changes. `toolkits`: None are those the base asks for.

        Raises as `tag`, and what starting such a sandbox would.
        """
        if isinstance(toolkits, str):
            raise InvalidSpecError("toolkits: is a string, not a list of references", detail={"field": "toolkits"})
        request = ComposeRequest(
            name=check_image_name(name, field="name"),
            base=check_image_name(base, field="base"),
            workspace=None if workspace is None else check_image_name(workspace, field="workspace"),
            toolkits=None if toolkits is None else tuple(check_image_name(one, field="toolkits") for one in toolkits),
            pin=pin,
            replace=replace,
        )
        return await self._transport.call("POST", target("images", "compose"), ImageSummary, value=request)

    async def remove(self, name: str, *, force: bool = False) -> ImageSummary:
        """Forget a name; returns what it meant. Sandboxes that run keep their layers, and `name@sha256:…` works until
        the content is collected. Raises ConflictError when other images refer to the name, unless `force`."""
        query: Query = {"image": check_image_name(name), "force": force or None}
        return await self._transport.call("DELETE", target("images", query=query), ImageSummary, idempotent=False)


def _check_announced(body: Body) -> None:
    if not body.announces_end:
        raise ProtocolError("the server sends lines without saying where they end", request_id=body.request_id)
