"""The way to one edge: a pool of connections, and how long to wait for an edge that is restarting.

An edge that is killed and started again is away for about a second. Requests of which nothing was sent wait for it up
to `patience_s`; requests that may have been carried out are repeated only when the caller says a repeat is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from opendsec import errors
from opendsec.apiserver.connection import ConnectionLostError, EdgeConnection
from opendsec.server.runner import Address
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_IDEMPOTENCY, HEADER_PROJECT, HEADER_REQUEST_ID
from opendsec.wire.keepalive import socket_options

PATIENCE_S = 10.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
MAX_IDLE = 512
"""Connections kept open while nobody uses them."""

RequestHeaders = Sequence[tuple[bytes, bytes]]


class EdgeLink:
    """Connections to one edge. Not for use by several event loops."""

    def __init__(self, name: str, address: Address, *, token: str = "", patience_s: float = PATIENCE_S) -> None:
        self.name = name
        self.address = address
        self.patience_s = patience_s
        self.authorization: tuple[tuple[str, str], ...] = (("Authorization", f"Bearer {token}"),) if token else ()
        """The header by which the edge knows us, if it wants one."""
        self._idle: list[EdgeConnection] = []
        self._fixed = b"host: edge\r\n" + (f"authorization: Bearer {token}\r\n".encode("ascii") if token else b"")

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    # --- connections ---

    async def connection(self, *, sandbox_id: str = "", patience_s: float | None = None) -> EdgeConnection:
        """An open connection; waits up to `patience_s` (None: the link's; 0: not) for an edge that is away, then raises
        SandboxLostError or ConnectError."""
        while self._idle:
            kept = self._idle.pop()
            if not kept.lost:
                return kept
        loop = asyncio.get_running_loop()
        give_up = loop.time() + (self.patience_s if patience_s is None else patience_s)
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await self._connect()
            except OSError as exc:
                if loop.time() + pause > give_up:
                    raise self.unreachable(str(exc), sandbox_id=sandbox_id) from exc
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _connect(self) -> EdgeConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5.0):
            if self.address.path is not None:
                _, made = await loop.create_unix_connection(EdgeConnection, str(self.address.path))
            else:
                transport, made = await loop.create_connection(EdgeConnection, self.address.host, self.address.port)
                for option in socket_options():
                    transport.get_extra_info("socket").setsockopt(*option)
        return made

    def release(self, connection: EdgeConnection) -> None:
        """Keep it for the next request, or close it when its last exchange is not properly over."""
        if connection.reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()

    # --- whole exchanges ---

    async def call(
        self,
        method: str,
        target: str,
        *,
        project: str = "",
        body: bytes = b"",
        request_id: str = "",
        headers: RequestHeaders = (),
        repeatable: bool = False,
        sandbox_id: str = "",
    ) -> tuple[int, bytes]:
        """One small exchange: status and body. Raises the edge's own error for a status of 400 or more.

        `repeatable`: doing it twice is harmless, so a connection lost on the way is tried again for `patience_s`.
        """
        head = self.request_head(
            method, target.encode("ascii"), project=project, request_id=request_id, headers=headers
        )
        whole = b"".join((head, b"content-length: %d\r\n\r\n" % len(body), body))
        give_up = asyncio.get_running_loop().time() + self.patience_s
        while True:
            try:
                return self._accepted(*await self._exchange(whole, sandbox_id))
            except ConnectionLostError as exc:
                if not repeatable or asyncio.get_running_loop().time() > give_up:
                    raise self.unknown_outcome(str(exc), sandbox_id=sandbox_id) from exc
            await asyncio.sleep(_FIRST_PAUSE_S)

    def _accepted(self, status: int, answer: bytes) -> tuple[int, bytes]:
        if status >= 400:
            raise codec.decode_error(answer, fallback=f"edge {self.name} answered with status {status}")
        return status, answer

    async def _exchange(self, whole: bytes, sandbox_id: str) -> tuple[int, bytes]:
        connection = await self.connection(sandbox_id=sandbox_id)
        try:
            connection.begin(whole, whole=True)
            status = await connection.head()
            parts = [chunk async for chunk in connection.chunks()]
        finally:
            self.release(connection)
        return status, b"".join(parts)

    def request_head(
        self, method: str, target: bytes, *, project: str, request_id: str, headers: RequestHeaders = ()
    ) -> bytes:
        """Request line and headers, without the ones that frame the body and without the empty line."""
        lines = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\n", self._fixed]
        if project:
            lines += [HEADER_PROJECT.encode("ascii"), b": ", project.encode("ascii"), b"\r\n"]
        if request_id:
            lines += [HEADER_REQUEST_ID.encode("ascii"), b": ", request_id.encode("ascii"), b"\r\n"]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        return b"".join(lines)

    # --- errors ---

    def unreachable(self, reason: str, *, sandbox_id: str = "") -> errors.OpenDSecError:
        """Nothing was sent. With a sandbox: it may come back with its edge, so the error may be retried."""
        detail: dict[str, Any] = {"edge": self.name, "reason": reason, "sent": False}
        if sandbox_id:
            return errors.SandboxLostError(
                f"edge {self.name} of sandbox {sandbox_id} does not answer",
                detail=detail,
                remedy="try again when the edge is back",
                retryable=True,
                sandbox_id=sandbox_id,
            )
        return errors.ConnectError(f"edge {self.name} does not answer", detail=detail)

    def unknown_outcome(self, reason: str, *, sandbox_id: str = "") -> errors.TransportError:
        """The request was sent and the edge went away before it answered."""
        return errors.TransportError(
            f"edge {self.name} went away before it answered; whether it carried the request out is not known",
            detail={"edge": self.name, "reason": reason, "sent": True},
            remedy=f"ask again; with an operation id or an {HEADER_IDEMPOTENCY} header nothing runs twice",
            sandbox_id=sandbox_id,
        )
