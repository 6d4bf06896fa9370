"""The outermost ASGI layer of every server: request id, key, raw routes, and the one place where exceptions become
answers.

It holds no business logic. An exception after the answer has begun can not become an error any more: the connection
is then closed without a proper end (a chunked or Content-Length body stays visibly incomplete) and the reason is
logged.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from litestar.exceptions import (
    ClientException,
    HTTPException,
    LitestarException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from opendsec import errors
from opendsec.server import sockets
from opendsec.server.asgi import (
    ASGIApp,
    BodyTooLargeError,
    ClientGoneError,
    Message,
    Receive,
    Scope,
    Send,
    request_id,
    send_error,
)
from opendsec.server.auth import Verify, bearer_token
from opendsec.wire.contracts import MAX_JSON_BODY, VIEW_ROOT

log = logging.getLogger(__name__)

RawRoutes = Callable[[Scope], ASGIApp | None]
"""Given a request, the ASGI app that answers it before Litestar sees it, or None. May raise an OpenDSecError."""

_BEGINNINGS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")


def no_raw_routes(_scope: Scope) -> ASGIApp | None:
    """Everything goes to Litestar."""
    return None


class Front:
    """`verify` runs for every path outside `open_paths` (exact matches, or beginnings that end with a slash). None:
    whoever reaches the socket may ask."""

    def __init__(
        self, app: ASGIApp, *, verify: Verify | None, open_paths: frozenset[str], raw: RawRoutes = no_raw_routes
    ) -> None:
        self._open_roots = tuple(path for path in open_paths if path.endswith("/"))
        self._app = app
        self._verify = verify
        self._open_paths = open_paths
        self._raw = raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            raise ValueError(f"this server speaks HTTP only, not {scope['type']}")
        is_socket = scope["type"] == "websocket"
        if is_socket:
            scope["method"] = sockets.METHOD
        state = scope.setdefault("state", {})
        identity = _accepted_request_id(scope)
        state["request_id"] = identity.decode("ascii")
        started = False

        async def marked(message: Message) -> None:
            nonlocal started
            if message["type"] in _BEGINNINGS:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity)]
            await send(message)

        try:
            await self._answer(scope, receive, marked)
        except ClientGoneError:
            log.debug("client_gone", extra={"fields": _request_fields(scope)})
        except Exception as exc:  # noqa: BLE001 - the one boundary where everything becomes an answer
            if started and isinstance(_cause(exc), ClientGoneError):
                log.debug("client_gone", extra={"fields": _request_fields(scope)})
            elif started:
                log.warning("stream_cut", extra={"fields": {**_request_fields(scope), "reason": _reason(exc)}})
            elif is_socket:
                await sockets.refuse(scope, marked, as_error(exc, scope))
            else:
                await send_error(scope, marked, as_error(exc, scope), status=_status(exc))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._verify is not None and not self._is_open(scope["path"]):
            scope["state"]["principal"] = await self._verify(bearer_token(scope))
        app = self._raw(scope)
        if app is None and scope["type"] == "websocket":
            raise errors.NotFoundError(
                f"no such WebSocket: {scope['path'][:200]}", remedy="see docs/reference/http-api.md"
            )
        await (app or self._app)(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_roots)


def _accepted_request_id(scope: Scope) -> bytes:
    """The caller's X-Request-Id if it is 1 to 128 visible ASCII characters, else a fresh one."""
    for key, value in scope["headers"]:
        if key == b"x-request-id" and _REQUEST_ID.match(value):
            return bytes(value)
    return secrets.token_hex(8).encode("ascii")


def _request_fields(scope: Scope) -> dict[str, object]:
    return {"request_id": request_id(scope), "method": scope["method"], "path": shown_path(scope["path"])}


def shown_path(path: str) -> str:
    """For logs: what comes after a view's sandbox opens it, and is nobody else's."""
    if not path.startswith(VIEW_ROOT):
        return path
    return f"{VIEW_ROOT}{path.removeprefix(VIEW_ROOT).partition('/')[0]}/…"


def _cause(exc: BaseException) -> BaseException:
    """What Litestar wraps when an exception comes after the answer has begun."""
    while isinstance(exc, LitestarException) and exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _reason(exc: BaseException) -> str:
    cause = _cause(exc)
    return f"{type(cause).__name__}: {cause}"


def _status(exc: Exception) -> int | None:
    return exc.status_code if isinstance(exc, HTTPException) and not isinstance(exc, ValidationException) else None


def as_error(exc: Exception, scope: Scope) -> errors.OpenDSecError:
    """Any exception as one of ours.

    What nobody foresaw becomes `internal`, logged with its traceback and told without it.
    """
    if isinstance(exc, errors.OpenDSecError):
        return exc
    if isinstance(exc, RequestEntityTooLarge):
        return BodyTooLargeError(MAX_JSON_BODY)
    if isinstance(exc, NotFoundException):
        return errors.NotFoundError(
            f"no such endpoint: {scope['method']} {scope['path'][:200]}", remedy="see /openapi.json"
        )
    if isinstance(exc, MethodNotAllowedException):
        return errors.RequestError(f"{scope['path'][:200]} does not take {scope['method']}", remedy="see /openapi.json")
    if isinstance(exc, ValidationException):
        return _bad_parameter(exc)
    if isinstance(exc, ClientException):
        return errors.RequestError(exc.detail)
    log.error("request_failed", exc_info=exc, extra={"fields": _request_fields(scope)})
    return errors.OpenDSecError(
        "something went wrong inside the server", remedy="its log has the details under this request id"
    )


def _bad_parameter(exc: ValidationException) -> errors.InvalidSpecError:
    entries: Any = exc.extra if isinstance(exc.extra, list) else []
    first = entries[0] if entries else {}
    field = str(first.get("key") or "body")
    if field == "data":
        return errors.InvalidSpecError("body: a JSON body is required", detail={"field": "body"})
    return errors.InvalidSpecError(f"{field}: {first.get('message') or exc.detail}", detail={"field": field})
