"""The data path: a sandbox id names its edge, bytes go there and back. No content is looked at, nothing is kept.

Method, path, query, headers and bodies pass byte for byte, except what belongs to one hop (connection headers, the
key, the project, the caller's rights).
Bodies flow at the pace of the slower side with bounded memory. A client that leaves ends the request at the edge at
once. An edge that dies before it answered gives a typed error; one that dies later cuts the connection to the client,
so half is never taken for whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from opendsec import errors
from opendsec.apiserver.connection import ConnectionLostError, EdgeConnection
from opendsec.apiserver.link import EdgeLink
from opendsec.apiserver.socket_forward import forward_socket
from opendsec.model.ids import edge_of
from opendsec.server.asgi import ASGIApp, ClientGoneError, Message, Receive, Scope, Send, request_id
from opendsec.server.streams import first_failure
from opendsec.wire.contracts import HEADER_RIGHTS, VIEW_ROOT

PREFIX = "/v1/sandboxes/"
NOBODY = "-"
"""No project has this name."""
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
_REPEATABLE = frozenset({"GET", "DELETE", "PATCH"})

_OWN_REQUEST_HEADERS = frozenset(
    {
        b"authorization", b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"x-opendsec-project",
        b"x-opendsec-rights", b"x-request-id",
    }
)  # fmt: skip
_OWN_ANSWER_HEADERS = frozenset(
    {b"connection", b"date", b"keep-alive", b"server", b"trailer", b"transfer-encoding", b"upgrade", b"x-request-id"}
)

_NOTHING_YET: Message = {"type": "http.request", "body": b"", "more_body": True}

ProjectOf = Callable[[Scope], str]
RightsOf = Callable[[Scope], Sequence[str]]
_RIGHTS = HEADER_RIGHTS.lower().encode("ascii")


class Forward:
    """`project_of` says for which project the authenticated caller acts, `rights_of` what more its key may do there."""

    def __init__(
        self, links: Mapping[str, EdgeLink], *, project_of: ProjectOf, rights_of: RightsOf = lambda _scope: ()
    ) -> None:
        self._links = links
        self._project_of = project_of
        self._rights_of = rights_of

    def route(self, scope: Scope) -> ASGIApp | None:
        """This object for everything below /v1/sandboxes/ and /view/, else None."""
        return self if scope["path"].startswith((PREFIX, VIEW_ROOT)) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_view = scope["path"].startswith(VIEW_ROOT)
        sandbox_id = scope["path"][len(VIEW_ROOT if is_view else PREFIX) :].partition("/")[0]
        link = self._link(sandbox_id)
        # A view's token is the edge's business; without a project of anybody's it opens nothing else there.
        project = NOBODY if is_view else self._project_of(scope)
        if scope["type"] == "websocket":
            await forward_socket(
                link,
                _target(scope),
                scope,
                receive,
                send,
                project=project,
                request_id=request_id(scope),
                sandbox_id=sandbox_id,
            )
            return
        if scope["method"] not in _METHODS:
            raise errors.RequestError(f"{scope['method'][:20]} is not a method of this API", remedy="see /openapi.json")
        head = link.request_head(
            scope["method"],
            _target(scope),
            project=project,
            request_id=request_id(scope),
            headers=[
                (_RIGHTS, b"" if is_view else ",".join(self._rights_of(scope)).encode("ascii")),
                *(pair for pair in scope["headers"] if pair[0] not in _OWN_REQUEST_HEADERS),
            ],
        )
        # Who connects to a port may wait for what its other end says first.
        first = _NOTHING_YET if _goes_both_ways(scope["path"]) else await receive()
        if first["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request was whole")
        framing, streamed = _framing(scope, first)
        transfer = _Transfer(link, sandbox_id, receive, send)
        if streamed:
            await transfer.run_streamed(head + framing, first, chunked=framing.startswith(b"transfer-encoding"))
        else:
            whole = b"".join((head, framing, first.get("body", b"")))
            await transfer.run_whole(whole, repeatable=scope["method"] in _REPEATABLE)

    def _link(self, sandbox_id: str) -> EdgeLink:
        link = self._links.get(edge_of(sandbox_id))
        if link is None:
            raise errors.NotFoundError(
                f"no sandbox {sandbox_id}", detail={"field": "sandbox_id"}, sandbox_id=sandbox_id
            )
        return link


def _goes_both_ways(path: str) -> bool:
    return path[len(PREFIX) :].split("/")[1:2] == ["ports"]


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
    query: bytes = scope["query_string"]
    return b"?".join((path, query)) if query else path


def _framing(scope: Scope, first: Message) -> tuple[bytes, bool]:
    """How the body is framed towards the edge (headers and the empty line), and whether more of it is to come."""
    if not first.get("more_body", False):
        return b"content-length: %d\r\n\r\n" % len(first.get("body", b"")), False
    for name, value in scope["headers"]:
        if name == b"content-length":
            return b"content-length: " + value + b"\r\n\r\n", True
    return b"transfer-encoding: chunked\r\n\r\n", True


class _Transfer:
    """One request on its way to one edge, and the answer back."""

    def __init__(self, link: EdgeLink, sandbox_id: str, receive: Receive, send: Send) -> None:
        self._link = link
        self._sandbox_id = sandbox_id
        self._receive = receive
        self._send = send
        self._answer_begun = False

    async def run_whole(self, request: bytes, *, repeatable: bool) -> None:
        """The request is at hand as a whole, so it can be sent again when nothing of an answer has come."""
        give_up = asyncio.get_running_loop().time() + self._link.patience_s
        while True:
            connection = await self._link.connection(sandbox_id=self._sandbox_id)
            try:
                connection.begin(request, whole=True)
                await self._answer(connection, self._watch_client())
                return
            except ConnectionLostError as exc:
                if self._answer_begun:
                    raise
                if not repeatable or asyncio.get_running_loop().time() > give_up:
                    raise self._link.unknown_outcome(str(exc), sandbox_id=self._sandbox_id) from exc
            finally:
                self._link.release(connection)
            await asyncio.sleep(0.02)

    async def run_streamed(self, head: bytes, first: Message, *, chunked: bool) -> None:
        """The request body is still arriving: it goes up while the answer comes down."""
        connection = await self._link.connection(sandbox_id=self._sandbox_id)
        try:
            connection.begin(head, whole=False)
            await self._answer(connection, self._uplink(connection, first, chunked=chunked))
        except ConnectionLostError as exc:
            if self._answer_begun:
                raise
            raise self._link.unknown_outcome(str(exc), sandbox_id=self._sandbox_id) from exc
        finally:
            self._link.release(connection)

    async def _answer(self, connection: EdgeConnection, beside: Coroutine[Any, Any, None]) -> None:
        """Hand the answer down while `beside` runs; its failure ends the answer, the answer's end ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                side = group.create_task(beside)
                await self._downlink(connection)
                side.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _downlink(self, connection: EdgeConnection) -> None:
        status = await connection.head()
        headers = [pair for pair in connection.headers if pair[0] not in _OWN_ANSWER_HEADERS]
        self._answer_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        ended = False
        async for chunk in connection.chunks():
            ended = connection.drained
            await self._send({"type": "http.response.body", "body": chunk, "more_body": not ended})
        if not ended:
            await self._send({"type": "http.response.body", "body": b""})

    async def _uplink(self, connection: EdgeConnection, first: Message, *, chunked: bool) -> None:
        message = first
        try:
            while True:
                if chunk := message.get("body", b""):
                    await connection.send_body(*((b"%x\r\n" % len(chunk), chunk, b"\r\n") if chunked else (chunk,)))
                if not message.get("more_body", False):
                    break
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("the client left before its request body was whole")
            if chunked:
                await connection.send_body(b"0\r\n\r\n")
        except ConnectionLostError:
            return  # the other direction hands down what the edge still said, or reports the loss
        connection.request_sent = True
        await self._watch_client()

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGoneError("the client left before the answer was whole")
