"""The answer to a pack: lines that say where it stands, and a last one that says how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transport import Transport, decode_answer
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import may_repeat
from opendsec.errors import DeadlineError, OpenDSecError, TransportError
from opendsec.wire import codec
from opendsec.wire.contracts import HEADER_IDEMPOTENCY, PackEvent, PackRequest, PackResult

OnPack = Callable[[PackEvent], None]


async def packed(
    transport: Transport,
    target: str,
    request: PackRequest,
    *,
    key: str,
    deadline: float | None,
    on_progress: OnPack | None,
) -> PackResult:
    """The result. A cut answer is asked for again with the same key, which finds the same pack."""
    failures = 0
    first_failure: float | None = None
    while True:
        try:
            return await _ask(transport, target, request, key=key, deadline=deadline, on_progress=on_progress)
        except OpenDSecError as error:
            now = time.monotonic()
            delay = transport.delay_s(failures)
            first_failure = now if first_failure is None else first_failure
            if not may_repeat(error, idempotent=True) or now + delay > first_failure + transport.patience_s():
                raise
            if deadline is not None and now + delay > deadline:
                raise DeadlineError("the pack was not ready at the deadline; it may still end well") from error
        failures += 1
        await async_pause(delay)


async def _ask(
    transport: Transport,
    target: str,
    request: PackRequest,
    *,
    key: str,
    deadline: float | None,
    on_progress: OnPack | None,
) -> PackResult:
    body = await transport.open(
        "POST", target, content=codec.encode(request), headers={HEADER_IDEMPOTENCY: key}, deadline=deadline
    )
    try:
        async for line in read_lines(body, deadline=deadline):
            event = decode_answer(line, PackEvent, body.request_id)
            if event.error is not None:
                raise codec.decode_error(codec.encode({"error": event.error}))
            if event.result is not None:
                await body.finish()
                return event.result
            if on_progress is not None:
                on_progress(event)
        raise TransportError("the pack's answer was cut", request_id=body.request_id)
    finally:
        await body.aclose()
