"""Answers that take long: lines that say where it stands, and a last one that says how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transport import Transport, decode_answer
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import may_repeat
from opendsec.errors import DeadlineError, OpenDSecError, TransportError
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_IDEMPOTENCY


class Told(Protocol):
    """One line; the last one has a result or an error."""

    @property
    def result(self) -> object | None: ...

    @property
    def error(self) -> Mapping[str, object] | None: ...


T = TypeVar("T", bound=Told)


async def last_line(
    transport: Transport,
    where: str,
    request: object,
    kind: type[T],
    *,
    what: str,
    key: str,
    deadline: float | None,
    on_progress: Callable[[T], None] | None,
) -> T:
    """The line with the result of `what`. Raises its error. A cut answer is asked for again with the same key, which
    finds the same one."""
    content = codec.encode(request)
    failures = 0
    first_failure: float | None = None
    while True:
        try:
            return await _ask(transport, where, content, kind, what, key, deadline, on_progress)
        except OpenDSecError as error:
            now = time.monotonic()
            delay = transport.delay_s(failures)
            first_failure = now if first_failure is None else first_failure
            if not may_repeat(error, idempotent=True) or now + delay > first_failure + transport.patience_s():
                raise
            if deadline is not None and now + delay > deadline:
                raise DeadlineError(f"the {what} was not ready at the deadline; it may still end well") from error
        failures += 1
        await async_pause(delay)


async def _ask(
    transport: Transport,
    where: str,
    content: bytes,
    kind: type[T],
    what: str,
    key: str,
    deadline: float | None,
    on_progress: Callable[[T], None] | None,
) -> T:
    body = await transport.open("POST", where, content=content, headers={HEADER_IDEMPOTENCY: key}, deadline=deadline)
    try:
        async for line in read_lines(body, deadline=deadline):
            event = decode_answer(line, kind, body.request_id)
            if event.error is not None:
                raise codec.received_error(event.error)
            if event.result is not None:
                await body.finish()
                return event
            if on_progress is not None:
                on_progress(event)
        raise TransportError(f"the {what}'s answer was cut", request_id=body.request_id)
    finally:
        await body.aclose()
