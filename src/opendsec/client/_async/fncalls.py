"""The answer to many calls: one line for each, in any order. What a cut answer has not told is asked for again."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from opendsec.client._async.lines import read_lines
from opendsec.client._async.transport import MAX_ANSWER_BYTES, Transport, decode_answer, target
from opendsec.client.concurrency import async_pause
from opendsec.client.fncall_args import DSecFnCallArgs
from opendsec.client.retrying import may_repeat
from opendsec.errors import DeadlineError, OpenDSecError, ProtocolError, TransportError
from opendsec.model.fncall import MAX_CALLS, FnCallResult
from opendsec.wire import codec
from opendsec.wire.calls import join_batch
from opendsec.wire.contracts import FNCALL_SILENCE_S, HEADER_TIMEOUT, FnCallItem

REQUEST_BYTES = 32 * 1024 * 1024
"""Calls go out in requests of about this size, half of what the platform takes."""

Outcome = tuple[int, FnCallResult | OpenDSecError]


@dataclass(slots=True)
class _Chunk:
    """Calls of one request, and what was wrong with others before anything was sent."""

    calls: list[tuple[int, bytes]] = field(default_factory=list)
    wrong: list[tuple[int, OpenDSecError]] = field(default_factory=list)


def _chunks(calls: Iterable[DSecFnCallArgs]) -> Iterator[_Chunk]:
    chunk, size = _Chunk(), 0
    for index, args in enumerate(calls):
        try:
            encoded = codec.encode(args.to_spec())
        except OpenDSecError as error:
            chunk.wrong.append((index, error))
            continue
        if chunk.calls and (size + len(encoded) > REQUEST_BYTES or len(chunk.calls) == MAX_CALLS):
            yield chunk
            chunk, size = _Chunk(), 0
        chunk.calls.append((index, encoded))
        size += len(encoded)
    yield chunk


async def call_outcomes(
    transport: Transport, calls: Iterable[DSecFnCallArgs], deadline: float
) -> AsyncGenerator[Outcome, None]:
    """Each index once, with its result or its error. Raises when a whole request fails or the deadline passes."""
    for chunk in _chunks(calls):
        for wrong in chunk.wrong:
            yield wrong
        if chunk.calls:
            async with aclosing(_told(transport, chunk.calls, deadline)) as outcomes:
                async for outcome in outcomes:
                    yield outcome


async def _told(
    transport: Transport, calls: Sequence[tuple[int, bytes]], deadline: float
) -> AsyncGenerator[Outcome, None]:
    left = dict(calls)
    failures = 0
    heard_at = time.monotonic()
    while left:
        try:
            async with aclosing(_ask(transport, list(left.items()), deadline)) as outcomes:
                async for outcome in outcomes:
                    if left.pop(outcome[0], None) is not None:
                        failures, heard_at = 0, time.monotonic()
                        yield outcome
            return
        except OpenDSecError as error:
            now = time.monotonic()
            delay = transport.delay_s(failures)
            if not may_repeat(error, idempotent=True) or now + delay > heard_at + transport.patience_s():
                raise
            if now + delay > deadline:
                raise DeadlineError(f"{len(left)} calls had not ended at the deadline") from error
        failures += 1
        await async_pause(delay)


async def _ask(
    transport: Transport, calls: Sequence[tuple[int, bytes]], deadline: float
) -> AsyncGenerator[Outcome, None]:
    left_s = max(0.001, deadline - time.monotonic())
    silence_s = min(left_s, FNCALL_SILENCE_S)
    body = await transport.open(
        "POST",
        target("fncall-batches"),
        content=join_batch([encoded for _, encoded in calls], ()),
        headers={HEADER_TIMEOUT: f"{left_s:.3f}"},
        deadline=deadline,
        silence_s=silence_s,
    )
    told = 0
    try:
        async for line in read_lines(body, deadline=deadline, silence_s=silence_s, most=MAX_ANSWER_BYTES):
            item = decode_answer(line, FnCallItem, body.request_id)
            if item.done:
                if told < len(calls):
                    raise ProtocolError(f"the answer ended after {told} of {len(calls)} calls")
                await body.finish()
                return
            if item.index == -1 and item.result is None and item.error is None:  # somebody is there
                continue
            told += 1
            yield _outcome(item, calls)
        raise TransportError("the answer to the calls was cut")
    finally:
        await body.aclose()


def _outcome(item: FnCallItem, calls: Sequence[tuple[int, bytes]]) -> Outcome:
    if not 0 <= item.index < len(calls) or (item.result is None) == (item.error is None):
        raise ProtocolError(f"a line of the answer makes no sense: index {item.index} of {len(calls)}")
    index = calls[item.index][0]
    if item.result is not None:
        return index, item.result
    return index, codec.received_error(item.error or {})
