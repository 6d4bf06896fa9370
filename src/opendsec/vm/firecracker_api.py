"""Firecracker's API: one connection for a few calls, each with an end.

It knows the calls' form, not their order; that is `vm.firecracker`'s. Faults keep Firecracker's own words. The HTTP is
as small as the server's: one request after the other, answers of known length. An HTTP library would cost a
millisecond of processor time for each start, an eighth of all of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

CALL_TIMEOUT_S: Final = 60.0
"""Of one call. Loading maps memory and reads devices: milliseconds, more on a busy host."""
_MOST_BYTES: Final = 1024 * 1024
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,7})\r\n", re.IGNORECASE)

Body = Mapping[str, object]


class ApiError(Exception):
    """Firecracker refused: `fault` is what it said."""

    def __init__(self, status: int, fault: str) -> None:
        super().__init__(fault)
        self.status = status
        self.fault = fault


class ApiGoneError(Exception):
    """Nobody answers there, not in time, or not in HTTP."""


class Api:
    """`async with Api(path) as api: await api.put("actions", {...})`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket is not None:
            self._socket.close()

    def connects(self) -> bool:
        """Whether somebody listens there by now; if so, calls use this connection. Does not block."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(os.fspath(self._path))
        except OSError:
            sock.close()
            return False
        self._socket = sock
        return True

    async def put(self, path: str, body: Body, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """PUT /path. Raises ApiError, ApiGoneError."""
        await self._call("PUT", path, body, timeout_s)

    async def patch(self, path: str, body: Body, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """PATCH /path. Raises ApiError, ApiGoneError."""
        await self._call("PATCH", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: Body, timeout_s: float) -> None:
        if self._socket is None and not self.connects():
            raise ApiGoneError(f"nobody listens for {method} /{path}")
        content = json.dumps(body).encode()
        head = f"{method} /{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._exchange(head.encode("ascii") + content)
        except TimeoutError:
            raise ApiGoneError(f"no answer to {method} /{path} within {timeout_s:g} seconds") from None
        except OSError as error:
            raise ApiGoneError(f"the API ended during {method} /{path}: {error!r}") from error
        if status >= 300:
            raise ApiError(status, _fault(answer))

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, request)
        answer, end = b"", -1
        while end < 0 or len(answer) < end:
            part = await loop.sock_recv(self._socket, 65_536)
            answer += part
            if not part or len(answer) > _MOST_BYTES:
                raise ConnectionResetError(f"the answer is cut after {len(answer)} bytes")
            if end < 0 and (stop := answer.find(b"\r\n\r\n")) >= 0:
                length = _LENGTH.search(answer, 0, stop + 2)
                end = stop + 4 + (int(length[1]) if length else 0)
        status = _STATUS.match(answer)
        if status is None:
            raise ConnectionResetError("the answer is no HTTP")
        return int(status[1]), answer[answer.find(b"\r\n\r\n") + 4 :]


def _fault(content: bytes) -> str:
    try:
        return str(json.loads(content)["fault_message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode("utf-8", "replace")
