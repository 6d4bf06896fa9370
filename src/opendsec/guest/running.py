"""The host's side of one command on one connection: what has arrived, what may still come, who waits.

A guest that lies about offsets, or sends more than its window, raises FieldError. Memory per command is bounded by the
two windows whatever the sizes of the frames: many small events are joined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from opendsec.guest import protocol
from opendsec.guest.base import CommandEvent, Exit, GuestError, GuestLostError, Output, StdinTaken

MAX_EVENTS: Final = 1024
_OFFSET = 8


class Running:
    """State of one command. All methods are synchronous but `events` and `wait_for_room`."""

    def __init__(self) -> None:
        self.next_offset: list[int | None] = [0, 0]
        self.acked = [0, 0]
        self.stdin_taken = 0
        self.stdin_closed = False
        self.exit: Exit | None = None
        self.answer: asyncio.Future[int] | None = None
        self._events: deque[CommandEvent] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._error: GuestError | GuestLostError | None = None
        self._stdin_error: GuestError | None = None

    def attach_at(self, stdout: int, stderr: int) -> None:
        """Output continues from here; what was queued before is dropped."""
        self.next_offset = [stdout, stderr]
        self.acked = [stdout, stderr]
        self._events.clear()

    def on_started(self, pid: int, *, known: bool) -> None:
        if self.answer is None:
            raise protocol.FieldError("STARTED that nobody asked for")
        if not self.answer.done():
            self.answer.set_result(pid)
        if known and self.next_offset == [0, 0]:
            self.next_offset = [None, None]  # it begins with what the agent still holds

    def on_output(self, stream: int, payload: memoryview) -> None:
        index = stream - 1
        length = len(payload) - _OFFSET
        if index not in (0, 1) or length <= 0 or self.exit is not None:
            raise protocol.FieldError("OUT of an impossible stream, without bytes, or after EXIT")
        offset = int.from_bytes(payload[:_OFFSET], "little")
        expected = self.next_offset[index]
        if expected is None:
            self.acked[index] = offset
        elif offset != expected:
            raise protocol.FieldError(f"OUT at offset {offset}, {expected} is next")
        if offset + length - self.acked[index] > protocol.WINDOW_BYTES:
            raise protocol.FieldError("OUT beyond the window")
        self.next_offset[index] = offset + length
        self._put(Output(stream, offset, bytes(payload[_OFFSET:])))

    def on_ack(self, stdout: int, stderr: int) -> None:
        """The host acknowledges: that much more may come."""
        for index, value in enumerate((stdout, stderr)):
            self.acked[index] = max(self.acked[index], value)

    def on_stdin_taken(self, taken: int, *, closed: bool) -> None:
        if taken < self.stdin_taken:
            raise protocol.FieldError("stdin was taken back")
        self.stdin_taken, self.stdin_closed = taken, closed
        if self.exit is None:
            if self._events and isinstance(self._events[-1], StdinTaken):
                self._events.pop()
            self._put(StdinTaken(taken, closed))
        self._wake_room()

    def on_exit(self, event: Exit) -> None:
        totals = [event.stdout_total, event.stderr_total]
        for index, expected in enumerate(self.next_offset):
            if expected is None:
                self.next_offset[index] = totals[index]
        if self.exit is not None or self.next_offset != totals:
            raise protocol.FieldError(f"EXIT with output totals {totals}, {self.next_offset} have arrived")
        self.exit = event
        self.stdin_closed = True
        self._put(event)
        self._wake_room()

    def on_error(self, error: GuestError) -> None:
        """The agent refused something about this command."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)
            return
        self._stdin_error = error
        self._wake_room()

    def on_lost(self, error: GuestLostError) -> None:
        self._error = error
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)
        self._wake_reader()
        self._wake_room()

    def _put(self, event: CommandEvent) -> None:
        self._events.append(event)
        if len(self._events) > MAX_EVENTS:
            self._join()
        self._wake_reader()

    def _join(self) -> None:
        """Many small pieces become one per stream; the order between streams was never promised."""
        pieces: dict[int, list[Output]] = {}
        others: list[CommandEvent] = []
        for event in self._events:
            if isinstance(event, Output):
                pieces.setdefault(event.stream, []).append(event)
            else:
                others = [event] if isinstance(event, StdinTaken) else [*others, event]
        self._events.clear()
        for stream, outputs in pieces.items():
            self._events.append(Output(stream, outputs[0].offset, b"".join(output.data for output in outputs)))
        self._events.extend(others)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def events(self) -> AsyncIterator[CommandEvent]:
        """Until Exit. Raises GuestLostError when the connection ends before."""
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, Exit):
                    return
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def stdin_room(self, offset: int) -> int:
        """How many bytes may be sent from `offset`, at least one. Raises GuestError, GuestLostError."""
        while True:
            if self._error is not None:
                raise self._error
            if self._stdin_error is not None:
                raise self._stdin_error
            if self.stdin_closed:
                raise GuestError("file", "the program has closed its stdin", 32)
            room = self.stdin_taken + protocol.WINDOW_BYTES - offset
            if room > 0:
                return room
            if self._room is None or self._room.done():
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)
