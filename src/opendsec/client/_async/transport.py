"""Requests and answers: addresses, keys, deadlines, repeats, and errors rebuilt by their wire code.

`open` sends one request once and hands out the answer's body; `call` is for JSON in, JSON out and repeats where
that is
provably harmless. All foreign exceptions become ours here and nowhere else.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpcore

from opendsec.client._async.connection import Connection, Lane, Pool
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import KNOWN_PATIENCE_S, STRANGER_PATIENCE_S, delay_s, may_repeat
from opendsec.client.settings import Endpoint
from opendsec.errors import DeadlineError, OpenDSecError, ProtocolError, TransportError
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_REQUEST_ID

T = TypeVar("T")

SILENCE_S = 30.0
"""Nothing, not even a keepalive, for so long: the connection is taken for dead."""
UPLOAD_REPEATS = 3
"""A body that does not get through in so many more attempts will not."""
MAX_ERROR_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
OCTETS = "application/octet-stream"
_GATEWAY = frozenset({502, 503, 504})

Query = Mapping[str, str | int | bool | None]
Content = bytes | AsyncIterator[bytes]


class Body:
    """An answer's body. Read it to the end or close it; it gives the connection back by itself in both cases."""

    def __init__(self, pool: Pool, connection: Connection, response: httpcore.Response, request_id: str) -> None:
        self._pool = pool
        self._connection = connection
        self._response = response
        self._chunks: Any = response.stream.__aiter__()  # type: ignore[union-attr]
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers}
        self.request_id = request_id
        self.open = True

    @property
    def announces_end(self) -> bool:
        """Whether a cut can be told from the end: a length or chunks were announced."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    async def read(self, *, deadline: float | None = None, silence_s: float = SILENCE_S) -> bytes:
        """The next bytes; b"" at the end. Raises TransportError when the connection is cut, DeadlineError."""
        if not self.open:
            return b""
        stream = self._connection.stream
        stream.deadline, stream.silence_s = deadline, silence_s
        try:
            return bytes(await self._chunks.__anext__())
        except StopAsyncIteration:
            await self.aclose()
            return b""
        except _NETWORK_ERRORS as exc:
            await self.aclose()
            raise _network_error(exc, deadline, self.request_id) from exc
        except BaseException:
            await self.aclose()
            raise

    async def read_all(self, limit: int, *, deadline: float | None = None, silence_s: float = SILENCE_S) -> bytes:
        """The whole body. Raises ProtocolError when it is larger than `limit`."""
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.read(deadline=deadline, silence_s=silence_s):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                await self.aclose()
                raise ProtocolError(f"an answer is larger than {limit} bytes", request_id=self.request_id)
        return b"".join(chunks)

    async def finish(self) -> None:
        """After the last frame: take the end of the body so that the connection can be used again, but do not wait
        long."""
        try:
            while await self.read(silence_s=1.0):
                pass
        except TransportError:
            await self.aclose()

    async def aclose(self) -> None:
        """Give the connection back; a body that was not read to its end costs the connection."""
        if not self.open:
            return
        self.open = False
        try:
            await self._chunks.aclose()
            await self._response.aclose()
        finally:
            await self._pool.give_back(self._connection)


class Transport:
    """One endpoint, one key, one pool."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float, max_connections: int | None = None) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.pool = Pool(endpoint, max_connections=max_connections)
        self._rng = random.Random()  # noqa: S311 - jitter, not a secret
        self._headers = [(b"Host", endpoint.authority), (b"User-Agent", b"opendsec")]
        if endpoint.api_key:
            self._headers.append((b"Authorization", b"Bearer " + endpoint.api_key.encode("ascii")))

    def deadline(self, timeout_s: float | None) -> float:
        """time.monotonic() at which a call that begins now has to be over; None means the client's default."""
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def patience_s(self) -> float:
        """How long failures in a row are put up with."""
        return KNOWN_PATIENCE_S if self.pool.connected_once else STRANGER_PATIENCE_S

    def delay_s(self, attempt: int) -> float:
        """Seconds before repeat number `attempt`, with jitter."""
        return delay_s(attempt, self._rng)

    async def pause_before_repeat(self, attempt: int) -> None:
        """Wait as long as repeat number `attempt` (from 0) calls for."""
        await async_pause(self.delay_s(attempt))

    async def open(
        self,
        method: str,
        target: str,
        *,
        content: Content = b"",
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        silence_s: float = SILENCE_S,
        fresh: bool = False,
        lane: Lane = Lane.LONG,
    ) -> Body:
        """Send once; the answer's body when its status is 2xx. Raises the server's error, or TransportError and its
        kinds."""
        connection = await self.pool.take(lane, deadline=deadline, fresh=fresh)
        return await self.send(
            connection, method, target, content=content, headers=headers, deadline=deadline, silence_s=silence_s
        )

    async def send(
        self,
        connection: Connection,
        method: str,
        target: str,
        *,
        content: Content = b"",
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> Body:
        """As `open`, over a connection that was taken before: from here on the server may know of the request."""
        request_id = secrets.token_hex(8)
        connection.stream.deadline, connection.stream.silence_s = deadline, silence_s
        connection.stream.body_follows_at_once = isinstance(content, bytes) and bool(content)
        try:
            request = self.pool.request(method, target, self._request_headers(request_id, content, headers), content)
            response = await connection.http.handle_async_request(request)
        except _NETWORK_ERRORS as exc:
            await self.pool.give_back(connection)
            raise _network_error(exc, deadline, request_id) from exc
        except BaseException:
            await self.pool.give_back(connection)
            raise
        body = Body(self.pool, connection, response, request_id)
        if 200 <= body.status < 300:
            return body
        raise await _server_error(body, deadline)

    async def call(
        self,
        method: str,
        target: str,
        kind: type[T],
        *,
        value: object = None,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        idempotent: bool = True,
        lane: Lane = Lane.SHORT,
    ) -> T:
        """One call with a JSON answer within one overall time-out; the body is `value` as JSON, or `raw` as it is.

        `idempotent=False`: repeated only when nothing was sent.
        """
        content = raw if raw is not None else b"" if value is None else codec.encode(value)
        if raw is not None:
            headers = {"Content-Type": OCTETS, **(headers or {})}
        deadline = self.deadline(timeout_s)
        first_failure: float | None = None
        attempt = 0
        while True:
            try:
                return await self._call_once(
                    method, target, kind, content, headers, deadline, fresh=not idempotent, lane=lane
                )
            except OpenDSecError as error:
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                delay = self.delay_s(attempt)
                limit = min(deadline, first_failure + self.patience_s())
                if not may_repeat(error, idempotent=idempotent) or now + delay > limit:
                    raise
            attempt += 1
            await async_pause(delay)

    async def upload(
        self,
        target: str,
        kind: type[T],
        make_body: Callable[[], Content],
        *,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> T:
        """PUT a body of any size. `make_body` is asked for a fresh one for each attempt; the time-out is for
        silence."""
        first_failure: float | None = None
        attempt = 0
        while True:
            try:
                body = await self.open(
                    "PUT",
                    target,
                    content=make_body(),
                    headers={"Content-Type": OCTETS, **(headers or {})},
                    silence_s=self.timeout_s,
                    fresh=not repeatable,
                )
                data = await body.read_all(MAX_ANSWER_BYTES, silence_s=self.timeout_s)
                return decode_answer(data, kind, body.request_id)
            except OpenDSecError as error:
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                delay = self.delay_s(attempt)
                if not (repeatable and may_repeat(error, idempotent=True)) or attempt >= UPLOAD_REPEATS:
                    raise
                if now + delay > first_failure + self.patience_s():
                    raise
            attempt += 1
            await async_pause(delay)

    async def _call_once(
        self,
        method: str,
        target: str,
        kind: type[T],
        content: bytes,
        headers: Mapping[str, str] | None,
        deadline: float,
        *,
        fresh: bool,
        lane: Lane,
    ) -> T:
        silence_s = max(0.001, deadline - time.monotonic())
        body = await self.open(
            method,
            target,
            content=content,
            headers=headers,
            deadline=deadline,
            silence_s=silence_s,
            fresh=fresh,
            lane=lane,
        )
        data = await body.read_all(MAX_ANSWER_BYTES, deadline=deadline, silence_s=silence_s)
        return decode_answer(data, kind, body.request_id)

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Of every request."""
        return [*self._headers, (HEADER_REQUEST_ID.encode("ascii"), request_id.encode("ascii"))]

    def _request_headers(
        self, request_id: str, content: Content, headers: Mapping[str, str] | None
    ) -> list[tuple[bytes, bytes]]:
        lines = self.headers(request_id)
        given = {name.lower() for name in headers or ()}
        if isinstance(content, bytes):
            if content:
                lines.append((b"Content-Length", b"%d" % len(content)))
                if "content-type" not in given:
                    lines.append((b"Content-Type", b"application/json"))
            else:
                lines.append((b"Content-Length", b"0"))
        elif "content-length" not in given:
            lines.append((b"Transfer-Encoding", b"chunked"))
        lines.extend((name.encode("ascii"), text.encode("ascii")) for name, text in (headers or {}).items())
        return lines

    async def aclose(self) -> None:
        """Close every connection."""
        await self.pool.aclose()


_NETWORK_ERRORS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.ConnectionNotAvailable,
)


def target(*parts: str, query: Query | None = None) -> str:
    """A request target below /v1, each part percent-encoded; queries that are None are left out."""
    path = "/v1/" + "/".join(quote(part, safe="", errors="surrogateescape") for part in parts)
    if not query:
        return path
    pairs = [f"{name}={_query_text(value)}" for name, value in query.items() if value is not None]
    return f"{path}?{'&'.join(pairs)}" if pairs else path


def _query_text(value: str | int | bool | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(str(value), safe="", errors="surrogateescape")


def octal(mode: int | None) -> str | None:
    """Permission bits as a query has them: `644`."""
    return None if mode is None else f"{mode:o}"


def decode_answer(data: bytes, kind: type[T], request_id: str) -> T:
    """JSON of a good answer → value. Raises ProtocolError when it is not what the contract says."""
    try:
        return codec.decode_answer(data, kind)
    except OpenDSecError as exc:
        raise ProtocolError(f"the server's answer is no {kind.__name__}: {exc.message}", request_id=request_id) from exc


def _network_error(exc: Exception, deadline: float | None, request_id: str) -> OpenDSecError:
    why = str(exc) or type(exc).__name__
    if isinstance(exc, httpcore.TimeoutException):
        if deadline is not None and time.monotonic() >= deadline - 0.005:
            return DeadlineError("the deadline passed before the answer was complete", request_id=request_id)
        return TransportError("the server went silent", request_id=request_id)
    if isinstance(exc, httpcore.LocalProtocolError):
        return ProtocolError(f"the request does not fit HTTP: {why}", request_id=request_id)
    return TransportError(f"the connection was cut: {why}", request_id=request_id)


async def _server_error(body: Body, deadline: float | None) -> OpenDSecError:
    data = await body.read_all(MAX_ERROR_BYTES, deadline=deadline)
    error = codec.decode_error(data, fallback=f"HTTP {body.status}")
    if isinstance(error, ProtocolError) and body.status in _GATEWAY and not data.startswith(b'{"error"'):
        error = TransportError(f"something on the way to the server answered HTTP {body.status}")
    error.request_id = error.request_id or body.request_id
    return error
