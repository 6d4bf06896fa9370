"""Firecracker's API: one connection for a few calls, each with an end.

It knows the calls' form, not their order; that is `vm.firecracker`'s. Faults keep Firecracker's own words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import httpcore

_ORIGIN: Final = "http://localhost"
_WAIT_S: Final = 0.0005
_WAIT_MOST_S: Final = 0.02
CALL_TIMEOUT_S: Final = 60.0
"""Of one call. Loading maps memory and reads devices: milliseconds, more on a busy host."""

Body = Mapping[str, object]


class ApiError(Exception):
    """Firecracker refused: `fault` is what it said."""

    def __init__(self, status: int, fault: str) -> None:
        super().__init__(fault)
        self.status = status
        self.fault = fault


class ApiGoneError(Exception):
    """Nobody answers there, or not in time."""


class Api:
    """`async with Api(path) as api: await api.put("actions", {...})`. Short socket paths are the caller's business."""

    def __init__(self, socket: str) -> None:
        self._connection = httpcore.AsyncHTTPConnection(
            origin=httpcore.URL(_ORIGIN).origin, uds=socket, http1=True, http2=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.aclose()

    async def put(self, path: str, body: Body, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """PUT /path. Raises ApiError, ApiGoneError."""
        await self._call("PUT", path, body, timeout_s)

    async def patch(self, path: str, body: Body, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """PATCH /path. Raises ApiError, ApiGoneError."""
        await self._call("PATCH", path, body, timeout_s)

    async def get(self, path: str, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, object]:
        """GET /path. Raises ApiError, ApiGoneError."""
        return await self._call("GET", path, None, timeout_s)

    async def _call(self, method: str, path: str, body: Body | None, timeout_s: float) -> dict[str, object]:
        content = b"" if body is None else json.dumps(body).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if content:
            headers.append((b"content-length", b"%d" % len(content)))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._connection.request(method, f"{_ORIGIN}/{path}", headers=headers, content=content)
        except TimeoutError:
            raise ApiGoneError(f"no answer to {method} /{path} within {timeout_s:g} seconds") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ConnectionNotAvailable, OSError) as error:
            raise ApiGoneError(f"the API ended during {method} /{path}: {error!r}") from error
        if answer.status >= 300:
            raise ApiError(answer.status, _fault(answer.content))
        return _object(answer.content)


def _object(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _fault(content: bytes) -> str:
    return str(_object(content).get("fault_message") or content[:500].decode("utf-8", "replace"))
