"""Answers that take a while: bytes, NDJSON lines or frames sent as they come, no faster than the client reads.

Promises: the first chunk is awaited before the answer starts, so an early failure is still a proper error; a client
that leaves ends the source at once (`aclose`); a source that fails later cuts the connection without a proper end, so
nobody takes half for whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from litestar import Response

from opendsec.server.asgi import ASGIApp, ClientGoneError, Headers, Receive, Scope, Send
from opendsec.wire import codec
from opendsec.wire.contracts import NDJSON_MEDIA_TYPE, STREAM_MEDIA_TYPE

T = TypeVar("T")


async def send_stream(
    receive: Receive,
    send: Send,
    chunks: AsyncGenerator[bytes],
    *,
    status: int = 200,
    media_type: str,
    headers: Headers = (),
) -> None:
    """Send every chunk.

    The request body must have been read to its end. Raises what `chunks` raises, or ClientGoneError.
    """
    try:
        async with _closing(chunks), asyncio.TaskGroup() as group:
            watch = group.create_task(raise_when_gone(receive))
            await _pump(
                send, chunks, status=status, headers=[(b"content-type", media_type.encode("latin-1")), *headers]
            )
            watch.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


@asynccontextmanager
async def _closing(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        try:
            await chunks.aclose()
        except* GeneratorExit:  # of a source that was closed inside its task group: that is no failure
            pass


async def _pump(send: Send, chunks: AsyncGenerator[bytes], *, status: int, headers: Headers) -> None:
    first = await anext(chunks, b"")
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    async for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        # A server drops what it is given after the client has left, without waiting: a source that never waits either
        # would hold the loop to its end.
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def raise_when_gone(receive: Receive) -> None:
    """Wait for the client to leave, then raise ClientGoneError. The request body must have been read to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError("the client left before the answer was whole")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (ClientGoneError)."""
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(raise_when_gone(receive))
            result = await work
            watch.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return result


async def while_uploading(receive: Receive, work: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, T]]) -> T:
    """The result of `work`, which is given the request body as it arrives.

    It is cancelled when the client leaves (ClientGoneError), also when it has the whole body and is still busy with it.
    """
    whole = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        while not whole.is_set():
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client left before its request body was whole")
            if not message.get("more_body", False):
                whole.set()
            if chunk := message.get("body", b""):
                yield chunk

    async def watch() -> None:
        await whole.wait()
        await raise_when_gone(receive)

    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            result = await work(chunks())
            watching.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return result


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure of a task group worth telling: a client that has gone outranks what its leaving broke."""
    flat: list[BaseException] = []
    todo: list[BaseException] = [failures]
    while todo:
        one = todo.pop(0)
        if isinstance(one, BaseExceptionGroup):
            todo[:0] = one.exceptions
        else:
            flat.append(one)
    return next((one for one in flat if isinstance(one, ClientGoneError)), flat[0])


async def ndjson(values: AsyncIterable[object]) -> AsyncGenerator[bytes]:
    """Each value as one JSON line."""
    async for value in values:
        yield codec.encode(value) + b"\n"


class AsgiAnswer(Response[None]):
    """What a Litestar handler returns to answer by itself, with an ASGI app that runs outside of Litestar's ways."""

    def __init__(self, app: ASGIApp, *, media_type: str, status_code: int | None = None) -> None:
        super().__init__(None, media_type=media_type, status_code=status_code)
        self.asgi = app

    def to_asgi_response(self, *_args: Any, **_given: Any) -> ASGIApp:  # type: ignore[override]
        """Called by Litestar."""
        return self.asgi


class StreamAnswer(AsgiAnswer):
    """What a Litestar handler returns to stream. The status is 200 unless given; `headers` are added."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        media_type: str = STREAM_MEDIA_TYPE,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        head = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]

        async def answer(_scope: Scope, receive: Receive, send: Send) -> None:
            await send_stream(receive, send, chunks, status=status_code, media_type=media_type, headers=head)

        super().__init__(answer, media_type=media_type, status_code=status_code)


def ndjson_answer(values: AsyncIterable[object], *, status_code: int = 200) -> StreamAnswer:
    """NDJSON of model values."""
    return StreamAnswer(ndjson(values), media_type=NDJSON_MEDIA_TYPE, status_code=status_code)
