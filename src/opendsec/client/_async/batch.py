"""The answer to a batch: one line for each sandbox, in any order. A cut answer is asked for again with the same key."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transport import Transport, decode_answer, target
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import may_repeat
from opendsec.errors import DeadlineError, OpenDSecError, ProtocolError, TransportError
from opendsec.model.node import SandboxStatus
from opendsec.wire import codec
from opendsec.wire.contracts import BatchItem, BatchRequest

Outcome = tuple[int, SandboxStatus | OpenDSecError]


async def batch_items(
    transport: Transport, request: BatchRequest, headers: Mapping[str, str], deadline: float
) -> AsyncGenerator[Outcome, None]:
    """Each index once, with its sandbox or its error. Raises when the whole batch fails or its deadline passes."""
    seen: set[int] = set()
    failures = 0
    heard_at = time.monotonic()
    while len(seen) < request.count:
        try:
            async with aclosing(_ask(transport, request, headers, deadline)) as outcomes:
                async for outcome in outcomes:
                    if outcome[0] not in seen:
                        failures, heard_at = 0, time.monotonic()
                        seen.add(outcome[0])
                        yield outcome
            return
        except OpenDSecError as error:
            now = time.monotonic()
            delay = transport.delay_s(failures)
            if not may_repeat(error, idempotent=True) or now + delay > heard_at + transport.patience_s():
                raise
            if now + delay > deadline:
                raise DeadlineError(f"{len(seen)} of {request.count} sandboxes were ready at the deadline") from error
        failures += 1
        await async_pause(delay)


async def _ask(
    transport: Transport, request: BatchRequest, headers: Mapping[str, str], deadline: float
) -> AsyncGenerator[Outcome, None]:
    left_s = max(0.001, deadline - time.monotonic())
    body = await transport.open(
        "POST",
        target("sandbox-batches"),
        content=codec.encode(request),
        headers=headers,
        deadline=deadline,
        silence_s=left_s,
    )
    told = 0
    try:
        async for line in read_lines(body, deadline=deadline, silence_s=left_s):
            item = decode_answer(line, BatchItem, body.request_id)
            if item.done:
                if told < request.count:
                    raise ProtocolError(f"the batch answer ended after {told} of {request.count} sandboxes")
                await body.finish()
                return
            told += 1
            yield _outcome(item, request.count)
        raise TransportError("the batch answer was cut")
    finally:
        await body.aclose()


def _outcome(item: BatchItem, count: int) -> Outcome:
    if not 0 <= item.index < count or (item.status is None) == (item.error is None):
        raise ProtocolError(f"a line of the batch answer makes no sense: index {item.index} of {count}")
    if item.status is not None:
        return item.index, item.status
    return item.index, codec.received_error(item.error or {})
