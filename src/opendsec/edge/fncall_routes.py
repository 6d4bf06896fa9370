"""Calls over HTTP: one, or thousands in one request. Raw ASGI: a warm call takes a few milliseconds in all.

A batch's calls are begun a bounded number at once and answered line by line as they end; a client that reads slowly
slows the batch down. When the client leaves, what runs for it is ended and nothing more is begun. A call that is wrong
fails alone, with the field named as `calls[3].files`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from opendsec import errors
from opendsec.edge.requests import DEFAULT_PROJECT, project_of, timeout_of
from opendsec.fncall.base import FnCalls
from opendsec.model.fncall import FnCallResult, FnCallSpec
from opendsec.model.fncall_check import CASE_OUTPUT_BYTES, MAX_CALL_BYTES, check_call
from opendsec.server.asgi import Receive, Scope, Send, read_body, request_id, send_json
from opendsec.server.streams import send_stream, while_connected
from opendsec.wire import codec
from opendsec.wire.calls import split_batch
from opendsec.wire.contracts import (
    FNCALL_TELL_EVERY_S,
    HEADER_TIMEOUT,
    MAX_CALLS_BODY,
    MAX_JSON_BODY,
    NDJSON_MEDIA_TYPE,
    FnCallItem,
)

AT_ONCE = 64
"""Calls of one batch that are under way or wait in the engine."""
UNSENT_BYTES = 32 * 1024 * 1024
"""What calls of one batch that are under way or answered and not sent may have written, by their own limits: with the
usual ones 16 are begun at once, and a slow reader takes no more memory than that."""
ROOM_WAIT_S = 30.0
"""How long a call of a batch waits for room: its caller waits for the whole batch anyway."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """For whom a batch is carried out."""

    project: str
    request_id: str
    give_up: float | None
    """Loop time."""


class FnCallRoutes:
    """`POST /v1/fncalls` and `POST /v1/fncall-batches`. `engine` None: this edge carries out no calls."""

    def __init__(self, engine: FnCalls | None, *, room_wait_s: float = ROOM_WAIT_S) -> None:
        self._given = engine
        self._room_wait_s = room_wait_s

    @property
    def _engine(self) -> FnCalls:
        if self._given is None:
            raise errors.BackendUnavailableError(
                "this edge carries out no FnCalls",
                remedy="add `fncall` to OPENDSEC_EDGE_BACKENDS; `opendsec doctor` says what it needs",
            )
        return self._given

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST fncalls"""
        engine = self._engine
        spec = check_call(codec.decode(await read_body(scope, receive, limit=MAX_JSON_BODY), FnCallSpec))
        timeout_s = timeout_of(scope)
        work = self._within(engine, spec, project_of(scope) or DEFAULT_PROJECT, timeout_s)
        await send_json(send, await while_connected(receive, work))

    async def batch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST fncall-batches"""
        engine = self._engine
        calls, indexes = split_batch(await read_body(scope, receive, limit=MAX_CALLS_BODY))
        timeout_s = timeout_of(scope)
        asked = _Asked(
            project=project_of(scope) or DEFAULT_PROJECT,
            request_id=request_id(scope),
            give_up=None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s,
        )
        await send_stream(
            receive, send, self._lines(engine, calls, indexes or range(len(calls)), asked), media_type=NDJSON_MEDIA_TYPE
        )

    async def _within(self, engine: FnCalls, spec: FnCallSpec, project: str, timeout_s: float | None) -> FnCallResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await engine.call(spec, project=project)
        except TimeoutError:
            raise errors.DeadlineError(
                f"the call was not over within {timeout_s:g} s; it has been ended",
                remedy=f"give it more time with {HEADER_TIMEOUT}",
            ) from None

    async def _lines(
        self, engine: FnCalls, calls: Sequence[bytes], indexes: Sequence[int], asked: _Asked
    ) -> AsyncGenerator[bytes]:
        lines: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue()
        unsent = Budget(UNSENT_BYTES)
        todo = zip(indexes, calls, strict=True)
        left = len(calls)

        async def run() -> None:
            for index, call in todo:
                lines.put_nowait(await self._line(engine, index, call, asked, unsent))
                await asyncio.sleep(0)  # a call that is wrong waits for nothing

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for _ in range(min(AT_ONCE, left))]
            try:
                while left:
                    first = await _within_s(lines.get(), FNCALL_TELL_EVERY_S)
                    if first is None:
                        yield codec.encode(FnCallItem()) + b"\n"
                        continue
                    gathered = [first]
                    while not lines.empty():
                        gathered.append(lines.get_nowait())
                    left -= len(gathered)
                    yield b"".join(line for line, _ in gathered)
                    unsent.give_back(sum(taken for _, taken in gathered))
            finally:
                for task in tasks:
                    task.cancel()
        yield codec.encode(FnCallItem(done=True)) + b"\n"

    async def _line(self, engine: FnCalls, index: int, call: bytes, asked: _Asked, unsent: Budget) -> tuple[bytes, int]:
        """The answer to one call, and what of `unsent` it holds until it is sent."""
        taken = 0
        try:
            spec = _call_of(call, index)
            taken = await unsent.take(most_written(spec))
            item = FnCallItem(index=index, result=await self._with_room(engine, spec, asked))
        except errors.OpenDSecError as exc:
            exc.request_id = asked.request_id
            item = FnCallItem(index=index, error=codec.error_fields(exc))
        return codec.encode(item) + b"\n", taken

    async def _with_room(self, engine: FnCalls, spec: FnCallSpec, asked: _Asked) -> FnCallResult:
        """The result, after waiting for room if need be."""
        now = asyncio.get_running_loop().time
        started = now()
        pause = _FIRST_PAUSE_S
        while True:
            left = None if asked.give_up is None else max(0.001, asked.give_up - now())
            try:
                return await self._within(engine, spec, asked.project, left)
            except errors.CapacityError:
                if now() + pause > started + self._room_wait_s or (left is not None and pause > left):
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)


async def _within_s(waiting: Coroutine[Any, Any, tuple[bytes, int]], seconds: float) -> tuple[bytes, int] | None:
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError:
        return None


def most_written(spec: FnCallSpec) -> int:
    """Bytes of output and files that may be in the answer."""
    outputs = 2 * spec.output_kb * 1024
    cases = 2 * CASE_OUTPUT_BYTES * len(spec.cases)
    return (cases if spec.cases else outputs) + (MAX_CALL_BYTES if spec.fetch else 0)


class Budget:
    """So much may be taken at once; who asks for more than all of it gets all. First come, first served."""

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, wanted: int) -> int:
        """Waits until there is so much; returns what was taken."""
        wanted = min(wanted, self._size)
        if self._waiting or wanted > self._left:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, future))
            await future
        else:
            self._left -= wanted
        return wanted

    def give_back(self, taken: int) -> None:
        """For those who wait. Whoever was cancelled meanwhile is passed over."""
        self._left += taken
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._left):
            wanted, future = self._waiting.popleft()
            if not future.done():
                self._left -= wanted
                future.set_result(None)


def _call_of(call: bytes, index: int) -> FnCallSpec:
    """Raises InvalidSpecError whose field names the call too."""
    try:
        return check_call(codec.decode(call, FnCallSpec))
    except errors.InvalidSpecError as exc:
        field = exc.detail.get("field", "")
        exc.detail = {**exc.detail, "field": f"calls[{index}].{field}", "index": index}
        raise
