"""FnCalls: which edge carries out a call, and what happens when it goes away meanwhile.

A call leaves nothing behind, so one whose edge went away before it answered is carried out again elsewhere: a program
may have run twice, an index is never answered twice. Bodies and answers pass as bytes; all that is read of a call is
whether it names an artifact (which lies on one edge) or wants a GPU.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from opendsec import errors
from opendsec.apiserver.call_queue import MAX_LOST, CallQueue
from opendsec.apiserver.connection import ConnectionLostError, EdgeConnection
from opendsec.apiserver.creating import Caller
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.link import EdgeLink
from opendsec.apiserver.placement import call_may_go_elsewhere, order_for_calls, refusal
from opendsec.model.fncall_check import edge_of_artifact
from opendsec.wire import codec
from opendsec.wire.calls import join_batch, split_batch
from opendsec.wire.contracts import FNCALL_SILENCE_S, FNCALL_TELL_EVERY_S, HEADER_TIMEOUT, FnCallItem

Deliver = Callable[[bytes], Awaitable[None]]
"""Hands NDJSON lines to the client."""

LANES = 8
"""Requests under way to one edge for one batch, each for up to MAX_CHUNK calls."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_INDEX = b'{"index":'
_NO_RESULT = b',"result":null'


class _Glance(msgspec.Struct):
    """What placement needs to know of a call."""

    artifact: str = ""
    gpu: msgspec.Raw = msgspec.Raw(b"null")


def read_batch(body: bytes) -> Sequence[bytes]:
    """The calls, not decoded. Raises InvalidSpecError naming the field."""
    calls, indexes = split_batch(body)
    if indexes:
        raise errors.InvalidSpecError("indexes: chosen by the apiserver", detail={"field": "indexes"})
    return calls


def glance(body: bytes) -> tuple[str, bool]:
    """(the edge its artifact lies on or "", whether it wants a GPU). What is wrong with a call its edge says."""
    if b'"artifact"' not in body and b'"gpu"' not in body:
        return "", False
    try:
        seen = msgspec.json.decode(body, type=_Glance)
        edge = edge_of_artifact(seen.artifact) if seen.artifact else ""
    except (msgspec.DecodeError, errors.InvalidSpecError):
        return "", False
    return edge, bytes(seen.gpu) != b"null"


@dataclass(slots=True)
class _Run:
    """One batch in progress."""

    calls: Sequence[bytes]
    caller: Caller
    queue: CallQueue
    deliver: Deliver
    changed: asyncio.Event
    give_up: float | None
    """Loop time; None when the client named no time."""

    async def fail(self, index: int, error: errors.OpenDSecError) -> None:
        """The answer of one index is an error."""
        if not self.queue.answered(index):
            return
        error.request_id = error.request_id or self.caller.request_id
        item = FnCallItem(index=index, error=codec.error_fields(error))
        await self.deliver(codec.encode(item) + b"\n")

    def left_s(self) -> float | None:
        """Seconds the edge may take now."""
        if self.give_up is None:
            return None
        return max(0.001, self.give_up - asyncio.get_running_loop().time())


class Calls:
    """Carries out calls."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    # --- one call ---

    async def call(self, body: bytes, caller: Caller) -> bytes:
        """The edge's FnCallResult as JSON.

        Raises the edge's error, UnschedulableError, NotFoundError (an artifact's edge is not known) or TransportError.
        """
        artifact_edge, gpu = glance(body)
        names = (self._edge_of(artifact_edge),) if artifact_edge else await self._ordered(gpu)
        patience_s = max(self._edges.links[name].patience_s for name in names)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        pause = _FIRST_PAUSE_S
        reasons: dict[str, errors.OpenDSecError] = {}
        lost = 0
        while True:
            for name in names:
                try:
                    return await self._ask(self._edges.links[name], body, caller)
                except ConnectionLostError as exc:
                    lost += 1
                    reasons[name] = _lost(self._edges.links[name], exc)
                except errors.OpenDSecError as exc:
                    if not call_may_go_elsewhere(exc):
                        raise
                    reasons[name] = exc
            names = tuple(name for name in names if isinstance(reasons[name], errors.TransportError))
            if not names or lost >= MAX_LOST or loop.time() + pause > give_up:
                raise next(iter(reasons.values())) if len(reasons) == 1 else refusal(reasons)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _ordered(self, gpu: bool) -> tuple[str, ...]:
        if len(self._edges.links) == 1:
            return tuple(self._edges.links)
        views = await self._edges.views()
        if not views:
            raise refusal({})
        return order_for_calls(views, seed=secrets.randbits(32), gpu=gpu)

    def _edge_of(self, name: str) -> str:
        if name not in self._edges.links:
            raise errors.NotFoundError(f"artifact: no edge {name} is known here", detail={"field": "artifact"})
        return name

    async def _ask(self, link: EdgeLink, body: bytes, caller: Caller) -> bytes:
        head = self._head(link, b"/v1/fncalls", caller, caller.timeout)
        connection = await link.connection(patience_s=0)
        self._edges.called(link.name, 1)
        try:
            connection.begin(b"".join((head, b"content-length: %d\r\n\r\n" % len(body), body)), whole=True)
            return await _good_answer(link, connection)
        finally:
            link.release(connection)

    def _head(self, link: EdgeLink, target: bytes, caller: Caller, timeout: str | None) -> bytes:
        headers = [(b"content-type", b"application/json")]
        if timeout is not None:
            headers.append((HEADER_TIMEOUT.encode("ascii"), timeout.encode("ascii")))
        return link.request_head("POST", target, project=caller.project, request_id=caller.request_id, headers=headers)

    # --- many ---

    async def batch(self, calls: Sequence[bytes], caller: Caller, deliver: Deliver) -> None:
        """Carry out all of them; deliver a line for each as it ends, then `done`."""
        names = await self._ordered(gpu=False)
        pinned = {index: edge for index, body in enumerate(calls) if (edge := glance(body)[0])}
        known = {index: edge for index, edge in pinned.items() if edge in self._edges.links}
        queue = CallQueue([len(body) for body in calls], names, lanes=LANES * len(names), pinned=known)
        now = asyncio.get_running_loop().time
        give_up = now() + caller.timeout_s if caller.timeout_s else None
        run = _Run(calls, caller, queue, deliver, asyncio.Event(), give_up)
        for index in pinned.keys() - known.keys():
            try:
                self._edge_of(pinned[index])
            except errors.NotFoundError as exc:
                await run.fail(index, exc)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as telling:
            telling.create_task(_tell(deliver, over))
            async with asyncio.TaskGroup() as group:
                for _ in range(LANES):
                    for name in names:
                        group.create_task(self._lane(run, self._edges.links[name]))
            over.set()
        await deliver(codec.encode(FnCallItem(done=True)) + b"\n")

    async def _lane(self, run: _Run, link: EdgeLink) -> None:
        """Give one edge calls until every call of the batch has ended, or the edge stays away."""
        now = asyncio.get_running_loop().time
        away_since: float | None = None
        pause = _FIRST_PAUSE_S
        while run.queue.open:
            indexes = run.queue.take(link.name)
            if not indexes:
                run.changed.clear()
                await run.changed.wait()
                continue
            error = await self._try_chunk(run, link, indexes)
            run.changed.set()
            if error is None:
                away_since, pause = None, _FIRST_PAUSE_S
                continue
            away_since = now() if away_since is None else away_since
            if now() + pause > away_since + link.patience_s:
                for index, why in run.queue.edge_gone(link.name, error):
                    await run.fail(index, why)
                break
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        run.changed.set()

    async def _try_chunk(self, run: _Run, link: EdgeLink, indexes: Sequence[int]) -> errors.OpenDSecError | None:
        """Have these carried out; what the edge did not answer is queued again. The error when it is away."""
        try:
            await self._ask_chunk(run, link, indexes)
            left = [index for index in indexes if index in run.queue.open]
            for index in left:
                await self._told_error(run, link, index, errors.ProtocolError(f"edge {link.name} left a call out"))
        except ConnectionLostError as exc:
            lost = _lost(link, exc)
            for index in run.queue.give_back(indexes, sent=True):
                await run.fail(index, lost)
            return lost
        except errors.ConnectError as exc:
            run.queue.give_back(indexes, sent=False)
            return exc
        except errors.OpenDSecError as exc:
            for index in indexes:
                await self._told_error(run, link, index, exc)
        return None

    async def _told_error(self, run: _Run, link: EdgeLink, index: int, error: errors.OpenDSecError) -> None:
        """An edge's error for one call: another edge's chance, or the answer."""
        if index not in run.queue.open:
            return
        told: errors.OpenDSecError | None = error
        if call_may_go_elsewhere(error):
            told = run.queue.refused(index, link.name, error)
            run.changed.set()
        if told is not None:
            await run.fail(index, told)

    async def _ask_chunk(self, run: _Run, link: EdgeLink, indexes: Sequence[int]) -> None:
        left_s = run.left_s()
        head = self._head(link, b"/v1/fncall-batches", run.caller, None if left_s is None else f"{left_s:.3f}")
        body = join_batch([run.calls[index] for index in indexes], indexes)
        connection = await link.connection(patience_s=0)
        self._edges.called(link.name, len(indexes))
        try:
            connection.begin(b"".join((head, b"content-length: %d\r\n\r\n" % len(body), body)), whole=True)
            async with _silence(FNCALL_SILENCE_S):
                await _check_good(link, connection)
            asked = frozenset(indexes)
            rest: list[bytes] = []  # of a line that is not whole; it may be some MiB
            async for chunk in _not_silent(connection):
                rest += (chunk, connection.at_hand())
                if b"\n" in rest[-2] or b"\n" in rest[-1]:
                    lines = b"".join(rest).split(b"\n")
                    rest = [lines.pop()]
                    await self._take_lines(run, link, lines, asked)
        finally:
            link.release(connection)

    async def _take_lines(self, run: _Run, link: EdgeLink, lines: Sequence[bytes], asked: frozenset[int]) -> None:
        told: list[bytes] = []
        for line in lines:
            index = _index_of(line)
            if index == -1:
                continue
            if index not in asked:
                raise errors.ProtocolError(f"edge {link.name} answered a call it was not asked for")
            if line.startswith(_NO_RESULT, line.find(b",")):
                fields = msgspec.json.decode(line, type=dict)["error"]
                await self._told_error(run, link, index, codec.error_from_fields(fields))
            elif run.queue.answered(index):
                told += (line, b"\n")
        if told:
            await run.deliver(b"".join(told))


async def _tell(deliver: Deliver, over: asyncio.Event) -> None:
    """Whoever waits for the batch hears that it goes on."""
    while not over.is_set():
        try:
            async with asyncio.timeout(FNCALL_TELL_EVERY_S):
                await over.wait()
        except TimeoutError:
            await deliver(codec.encode(FnCallItem()) + b"\n")


@asynccontextmanager
async def _silence(seconds: float) -> AsyncIterator[None]:
    """An edge that says nothing for so long is lost. Raises ConnectionLostError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ConnectionLostError(f"it said nothing for {seconds:g} s", started=True) from None


async def _not_silent(connection: EdgeConnection) -> AsyncGenerator[bytes]:
    chunks = aiter(connection.chunks())
    while True:
        async with _silence(FNCALL_SILENCE_S):
            chunk = await anext(chunks, None)
        if chunk is None:
            return
        yield chunk


def _index_of(line: bytes) -> int:
    """-1 for the last line of an answer, and for one that only says the edge is there. Raises ProtocolError."""
    number, comma, _ = line[len(_INDEX) :].partition(b",")
    if not line.startswith(_INDEX) or not comma or not (number.isdigit() or number == b"-1"):
        raise errors.ProtocolError(f"a line of an edge's answer makes no sense: {line[:80]!r}")
    return int(number)


def _lost(link: EdgeLink, exc: ConnectionLostError) -> errors.TransportError:
    return errors.TransportError(
        f"edge {link.name} went away before it answered the call",
        detail={"edge": link.name, "reason": str(exc), "sent": True},
        remedy="ask again: a call leaves nothing behind, so running it twice is harmless",
    )


async def _check_good(link: EdgeLink, connection: EdgeConnection) -> None:
    """Raises the edge's own error."""
    status = await connection.head()
    if status >= 400:
        body = b"".join([chunk async for chunk in connection.chunks()])
        raise codec.decode_error(body, fallback=f"edge {link.name} answered with status {status}")


async def _good_answer(link: EdgeLink, connection: EdgeConnection) -> bytes:
    await _check_good(link, connection)
    return b"".join([chunk async for chunk in connection.chunks()])
