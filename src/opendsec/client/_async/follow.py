"""One command's exec stream, as if the connection could not be cut.

The stream is asked for again from the byte offsets reached whenever it ends without a result; only a result or an
error from
the server ends it. Bytes are delivered once and in order: what arrives twice is dropped, a hole is a ProtocolError.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from opendsec.client._async.connection import Lane
from opendsec.client._async.transport import SILENCE_S, Body, Transport, target
from opendsec.client.concurrency import async_pause
from opendsec.client.retrying import may_repeat
from opendsec.errors import CommandLostError, DeadlineError, NotFoundError, OpenDSecError, ProtocolError, TransportError
from opendsec.model.command import CommandResult, CommandStatus, ExecRequest
from opendsec.wire import codec, contracts
from opendsec.wire.frames import Frame, FrameError, FrameParser

T = TypeVar("T")

_OFFSET = struct.Struct("<Q")
STDOUT = 0
STDERR = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one stream (STDOUT or STDERR), the next ones in it."""

    stream: int
    data: bytes


Event = CommandStatus | Chunk | CommandResult


class Follower:
    """Follows one command. Give `request` to start it (once, whatever happens on the way) or `command_id` to
    attach."""

    def __init__(
        self,
        transport: Transport,
        sandbox_id: str,
        *,
        request: ExecRequest | None = None,
        command_id: str = "",
        offsets: tuple[int, int] = (0, 0),
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._request = request
        self.command_id = command_id
        self.offsets = list(offsets)
        """Next byte of stdout and stderr."""
        self.asked = False
        """Whether the server may know of the command."""
        self.result: CommandResult | None = None
        self._body: Body | None = None
        self._parser = FrameParser()
        self._ready: deque[Event] = deque()
        self._failures = 0
        self._heard_at = time.monotonic()

    async def next_event(self, *, deadline: float | None = None) -> Event:
        """The next event; CommandResult is the last one and is returned again and again.

        Raises DeadlineError when `deadline` (time.monotonic()) passes, after which the call may be repeated; the
        server's
        error for this command; TransportError when the server could not be reached for a minute.
        """
        while not self._ready:
            if self.result is not None:
                return self.result
            try:
                await self._advance(deadline)
            except DeadlineError:
                await self.aclose()
                raise
            except (OpenDSecError, FrameError) as error:
                await self.aclose()
                await self._recover(_named(error), deadline)
        return self._ready.popleft()

    @property
    def finished(self) -> bool:
        """The result has been delivered, and so has everything before it."""
        return self.result is not None and not self._ready

    def restart_from(self, stdout: int, stderr: int) -> None:
        """Forget what has not been delivered and go on from these offsets; close first."""
        self.offsets = [stdout, stderr]
        self.result = None
        self._ready.clear()

    async def aclose(self) -> None:
        """Drop the connection, not the command; the next `next_event` asks again from the offsets reached."""
        body, self._body = self._body, None
        if body is not None:
            await body.aclose()

    async def _advance(self, deadline: float | None) -> None:
        if self._body is None:
            self._parser = FrameParser()
            self._body = await self._ask(deadline)
        data = await self._body.read(deadline=deadline, silence_s=SILENCE_S)
        if not data:
            raise TransportError("the command's output stream was cut before its result")
        for frame in self._parser.feed(data):
            self._take(frame)
        if self.result is not None:
            body, self._body = self._body, None
            await body.finish()

    async def _ask(self, deadline: float | None) -> Body:
        if self.command_id:
            query = {"stdout": self.offsets[STDOUT], "stderr": self.offsets[STDERR]}
            output = target("sandboxes", self._sandbox_id, "commands", self.command_id, "output", query=query)
            return await self._transport.open("GET", output, deadline=deadline, silence_s=SILENCE_S)
        connection = await self._transport.pool.take(Lane.LONG, deadline=deadline)
        self.asked = True
        return await self._transport.send(
            connection,
            "POST",
            target("sandboxes", self._sandbox_id, "commands"),
            content=codec.encode(self._request),
            deadline=deadline,
            silence_s=SILENCE_S,
        )

    async def _recover(self, error: OpenDSecError, deadline: float | None) -> None:
        if isinstance(error, NotFoundError) and self.command_id:
            raise CommandLostError(
                "the platform no longer knows this command; how it ended cannot be known", detail=self._facts()
            ) from error
        now = time.monotonic()
        delay = self._transport.delay_s(self._failures)
        if not may_repeat(error, idempotent=True) or now + delay > self._heard_at + self._transport.patience_s():
            error.sandbox_id = error.sandbox_id or self._sandbox_id
            error.detail = self._facts() | error.detail
            raise error
        if deadline is not None and now + delay > deadline:
            raise DeadlineError("the deadline passed while the connection was being restored") from error
        self._failures += 1
        await async_pause(delay)

    def _facts(self) -> dict[str, object]:
        operation = self._request.operation_id if self._request else None
        had = {"stdout": self.offsets[STDOUT], "stderr": self.offsets[STDERR]}
        return {"command_id": self.command_id, "operation_id": operation, **had}

    def _take(self, frame: Frame) -> None:
        match frame.type:
            case contracts.EXEC_STDOUT:
                self._take_output(STDOUT, frame.payload)
            case contracts.EXEC_STDERR:
                self._take_output(STDERR, frame.payload)
            case contracts.EXEC_STARTED:
                status = _decode(frame, CommandStatus)
                if not self.command_id:
                    self.command_id = status.command_id
                    self._heard()
                self._ready.append(status)
            case contracts.EXEC_RESULT:
                self._take_result(_decode(frame, CommandResult))
            case contracts.EXEC_ERROR:
                raise codec.decode_error(bytes(frame.payload))
            case contracts.EXEC_KEEPALIVE:
                self._heard()
            case _:
                raise ProtocolError(f"frame of unknown type {frame.type} in an exec stream")

    def _take_output(self, stream: int, payload: bytes | memoryview) -> None:
        if len(payload) < _OFFSET.size:
            raise ProtocolError("an output frame is shorter than its offset")
        (offset,) = _OFFSET.unpack_from(payload)
        expected = self.offsets[stream]
        if offset > expected:
            raise ProtocolError(f"output jumps from byte {expected} to byte {offset}")
        data = bytes(payload[_OFFSET.size + expected - offset :])
        if data:
            self.offsets[stream] = expected + len(data)
            self._ready.append(Chunk(stream, data))
            self._heard()

    def _take_result(self, result: CommandResult) -> None:
        totals = [result.stdout_bytes_total, result.stderr_bytes_total]
        if not result.truncated and any(had < total for had, total in zip(self.offsets, totals, strict=True)):
            raise ProtocolError(f"the result came before the end of the output: had {self.offsets} of {totals} bytes")
        self.result = result
        self._ready.append(result)

    def _heard(self) -> None:
        self._failures = 0
        self._heard_at = time.monotonic()


def _decode(frame: Frame, kind: type[T]) -> T:
    try:
        return codec.decode_answer(frame.payload, kind)
    except OpenDSecError as exc:
        raise ProtocolError(f"a frame of type {frame.type} is no {kind.__name__}: {exc.message}") from exc


def _named(error: OpenDSecError | FrameError) -> OpenDSecError:
    if isinstance(error, FrameError):
        return ProtocolError(f"the exec stream is malformed: {error}")
    return error
