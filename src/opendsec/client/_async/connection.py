"""One HTTP/1.1 connection that knows when to give up, and the pool that lends connections out.

httpcore speaks the protocol on each connection; the pool is ours because lending must cost the same with 3000
connections as
with one. A read or write waits for `silence_s` at most, and never beyond `deadline`.
"""

from __future__ import annotations

import resource
import ssl
import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import httpcore

from opendsec.client.concurrency import AsyncGate
from opendsec.client.settings import Endpoint
from opendsec.errors import ConnectError, DeadlineError
from opendsec.wire.keepalive import socket_options

READ_BYTES = 256 * 1024
MAX_CONNECTIONS = 4096
RESERVED_FILES = 64
"""Descriptors left to the rest of the program when its limit is below MAX_CONNECTIONS."""
CONNECT_TIMEOUT_S = 10.0


class Lane(Enum):
    """How long a connection is needed. Each lane has a share of its own: running commands cannot keep a stop out."""

    SHORT = 1
    """A quarter of all connections: calls that are answered at once."""
    LONG = 3
    """Three quarters: output, input, files, batches."""


class PacedStream(httpcore.AsyncNetworkStream):
    """A network stream whose patience is set by its user before each step, whatever time-out httpcore passes in."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.deadline: float | None = None
        """time.monotonic() after which nothing is waited for."""
        self.silence_s: float = 30.0
        """Longest wait for one read or write."""
        self.body_follows_at_once = False
        """The next write is a request's head and its body is at hand: both leave in one piece, which saves a system
        call."""
        self._held = b""

    @property
    def raw(self) -> httpcore.AsyncNetworkStream:
        """What lies below, for who speaks both ways at once and waits differently for each."""
        return self._stream

    def _patience(self) -> float:
        if self.deadline is None:
            return self.silence_s
        return min(self.silence_s, max(0.001, self.deadline - time.monotonic()))

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(READ_BYTES, timeout=self._patience())

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self.body_follows_at_once:
            self.body_follows_at_once = False
            self._held = buffer
            return
        if self._held:
            buffer, self._held = self._held + buffer, b""
        await self._stream.write(buffer, timeout=self._patience())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class Connection:
    """A connection, the stream below it, and the lane it is lent in."""

    __slots__ = ("http", "lane", "stream")

    def __init__(self, http: httpcore.AsyncHTTP11Connection, stream: PacedStream) -> None:
        self.http = http
        self.stream = stream
        self.lane = Lane.SHORT


class Pool:
    """Connections to one endpoint: the most recently used idle one first, a new one when there is none."""

    def __init__(self, endpoint: Endpoint, *, max_connections: int | None = None) -> None:
        limit = max_connections or _connection_limit()
        self._endpoint = endpoint
        self._origin = httpcore.Origin(
            b"https" if endpoint.tls else b"http", endpoint.host.encode("ascii") or b"localhost", endpoint.port or 80
        )
        self._network = httpcore.AnyIOBackend()
        self._tls: ssl.SSLContext | None = None
        self._idle: deque[Connection] = deque()
        self._lent: set[Connection] = set()
        self._gates = {lane: AsyncGate(max(1, limit * lane.value // 4)) for lane in Lane}
        self.connected_once = False
        self.closed = False

    async def take(self, lane: Lane, *, deadline: float | None, fresh: bool = False) -> Connection:
        """A connection of your own until `give_back`. `fresh`: never one that was used before.

        Raises ConnectError (nothing was sent) and DeadlineError.
        """
        if self.closed:
            raise ConnectError("this client is closed", retryable=False, remedy="make a new DSecClient")
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not await self._gates[lane].enter(left):
            raise DeadlineError("all connections were in use until the deadline", remedy="raise max_connections")
        try:
            if fresh and self._idle:
                await self._idle.popleft().http.aclose()  # or each such call would leave one more behind
            connection = None if fresh else await self._take_idle()
            if connection is None:
                connection = await self._connect(left)
        except BaseException:
            self._gates[lane].leave()
            raise
        connection.lane = lane
        self._lent.add(connection)
        return connection

    async def give_back(self, connection: Connection) -> None:
        """End of use; connections that can be used again are kept, others are closed."""
        self._lent.discard(connection)
        self._gates[connection.lane].leave()
        if connection.http.is_idle() and not self.closed:
            self._idle.append(connection)
        else:
            await connection.http.aclose()

    async def aclose(self) -> None:
        """Close all connections; calls that are under way fail with TransportError."""
        self.closed = True
        while self._idle:
            await self._idle.pop().http.aclose()
        for connection in tuple(self._lent):
            await connection.http.aclose()

    async def _take_idle(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if not connection.http.has_expired():
                return connection
            await connection.http.aclose()
        return None

    async def _connect(self, left_s: float | None) -> Connection:
        timeout = CONNECT_TIMEOUT_S if left_s is None else min(CONNECT_TIMEOUT_S, left_s)
        endpoint = self._endpoint
        try:
            if endpoint.unix_path:
                raw = await self._network.connect_unix_socket(endpoint.unix_path, timeout=timeout)
            else:
                raw = await self._network.connect_tcp(
                    endpoint.host, endpoint.port, timeout=timeout, socket_options=socket_options()
                )
            if endpoint.tls:
                raw = await raw.start_tls(self._tls_context(), server_hostname=endpoint.host, timeout=timeout)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
            raise ConnectError(
                f"cannot connect to {endpoint.url}: {str(exc) or type(exc).__name__}",
                remedy="is the platform running? `opendsec up -d` starts one on this machine",
            ) from exc
        self.connected_once = True
        stream = PacedStream(raw)
        return Connection(httpcore.AsyncHTTP11Connection(self._origin, stream), stream)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls

    def request(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], content: bytes | Iterable[bytes] | Any
    ) -> httpcore.Request:
        """An httpcore request to this endpoint; `target` begins with a slash and is percent-encoded."""
        url = httpcore.URL(
            scheme=self._origin.scheme,
            host=self._origin.host,
            port=self._origin.port,
            target=(self._endpoint.prefix + target).encode("ascii"),
        )
        return httpcore.Request(method, url, headers=headers, content=content)


def _connection_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - RESERVED_FILES))
