"""The few ASGI moves every server of ours makes: read a bounded body, stream an unbounded one, answer, answer with an
error.

Nothing here knows Litestar. A body that ends before it was whole raises ClientGoneError: a cut upload is never taken
for a short one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from opendsec import errors
from opendsec.wire import codec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

JSON_MEDIA_TYPE = b"application/json"


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


class BodyTooLargeError(errors.InvalidSpecError):
    """A JSON body above the limit; answered with 413. It crosses the wire as its parent."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"body: larger than {limit} bytes", detail={"field": "body", "limit": limit})


def header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The first header of that lower-case name, latin-1 decoded."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return None


def query(scope: Mapping[str, Any]) -> dict[str, str]:
    """Query parameters; other bytes than UTF-8 survive as surrogates (surrogateescape). A repeated name is refused."""
    found: dict[str, str] = {}
    raw = scope.get("query_string", b"").decode("latin-1")
    for key, value in parse_qsl(raw, keep_blank_values=True, errors="surrogateescape"):
        if key in found:
            raise errors.InvalidSpecError(f"{key}: given twice", detail={"field": key})
        found[key] = value
    return found


def request_id(scope: Mapping[str, Any]) -> str:
    """The request id the front gave this request; "" outside of a request."""
    return str(scope.get("state", {}).get("request_id", ""))


def principal(scope: Mapping[str, Any]) -> Any:
    """What `verify` returned for this request's token; None on open paths."""
    return scope.get("state", {}).get("principal")


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """The request body as it arrives, without a limit. Raises ClientGoneError when it is cut."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client left before its request body was whole")
        more = bool(message.get("more_body", False))
        if chunk := message.get("body", b""):
            yield chunk


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole request body. Raises BodyTooLargeError as soon as `limit` bytes are passed or announced."""
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise BodyTooLargeError(limit)
    parts: list[bytes] = []
    size = 0
    async for chunk in body_chunks(receive):
        size += len(chunk)
        if size > limit:
            raise BodyTooLargeError(limit)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, media_type: bytes = JSON_MEDIA_TYPE, headers: Headers = ()
) -> None:
    """One whole answer."""
    head = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, *, status: int = 200, headers: Headers = ()) -> None:
    """A model value as the whole answer."""
    await send_bytes(send, codec.encode(value), status=status, headers=headers)


async def send_error(scope: Scope, send: Send, error: errors.OpenDSecError, *, status: int | None = None) -> None:
    """An error as the whole answer, with the status of its class unless `status` says otherwise."""
    error.request_id = error.request_id or request_id(scope)
    # A request whose body was not read to its end can not be followed by another on the same connection.
    close = ((b"connection", b"close"),) if isinstance(error, BodyTooLargeError) else ()
    await send_bytes(send, codec.encode_error(error), status=status or error.http_status, headers=close)
