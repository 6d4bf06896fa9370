"""A running command as an object, like a subprocess: streams to read, stdin to write, wait, kill.

Output is pulled, not pushed: nothing is read from the platform until you read or wait. The platform keeps the
output, so a
Process holds at most `BUFFER_BYTES` of the stream you are not reading; what is over is fetched again when you ask
for it.
"""

from __future__ import annotations

import codecs
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opendsec.client._async.connection import Lane
from opendsec.client._async.follow import STDERR, STDOUT, Chunk, Follower
from opendsec.client._async.transport import Transport, target
from opendsec.client.concurrency import AsyncGate, AsyncLock, async_pause
from opendsec.errors import CommandError, ConflictError, DeadlineError
from opendsec.model.command import CommandResult, CommandStatus, PtySize
from opendsec.wire.contracts import SignalRequest, StdinStatus

BUFFER_BYTES = 8 * 1024 * 1024
STDIN_CHUNK_BYTES = 1024 * 1024
STDIN_POLL_S = 0.05
"""Pause before asking again when the platform took nothing."""
STDIN_TIMEOUT_S = 3600.0


class ProcessOutput:
    """One output stream of a Process: iterate it for bytes as they come, or read it to its end."""

    def __init__(self, process: Process, stream: int) -> None:
        self._process = process
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while data := await self._process.read_output(self._stream):
            yield data

    async def read(self) -> bytes:
        """All bytes from here to the end of the command."""
        return b"".join([data async for data in self])

    async def text(self) -> AsyncIterator[str]:
        """The same as text: UTF-8 decoded across chunk borders; bytes that are none become U+FFFD."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for data in self:
            if piece := decoder.decode(data):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest


class ProcessInput:
    """Stdin of a Process. Each write returns when the platform has taken the bytes; repeats never send a byte
    twice."""

    def __init__(self, transport: Transport, sandbox_id: str, command_id: str, *, is_open: bool) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._command_id = command_id
        self._open = is_open
        self._offset = 0
        self._lock = AsyncLock()

    async def write(self, data: bytes | str) -> None:
        """Send bytes (text as UTF-8).

        Raises ConflictError when nobody reads any more: stdin was closed, the command has ended, or it was started
        without `stdin=True`.
        """
        raw = data.encode("utf-8") if isinstance(data, str) else data
        async with self._lock:
            for start in range(0, len(raw), STDIN_CHUNK_BYTES):
                await self._send(raw[start : start + STDIN_CHUNK_BYTES])

    async def close(self) -> None:
        """End of file. Does nothing when nobody reads any more."""
        async with self._lock:
            if not self._open:
                return
            self._open = False
            try:
                await self._post(b"", eof=True)
            except ConflictError:
                return

    async def _send(self, data: bytes) -> None:
        end = self._offset + len(data)
        while self._offset < end:
            if not self._open:
                raise ConflictError(
                    "nobody reads the stdin of this command: it is closed",
                    remedy="start the command with stdin=True, and write before close() and before it ends",
                )
            left = data[self._offset - end :]
            status = await self._post(left, eof=False)
            taken = max(0, min(status.accepted, end) - self._offset)
            self._offset += taken
            self._open = not status.closed
            if not taken and not status.closed:
                await async_pause(STDIN_POLL_S)

    async def _post(self, data: bytes, *, eof: bool) -> StdinStatus:
        query = {"offset": self._offset, "eof": eof}
        where = target("sandboxes", self._sandbox_id, "commands", self._command_id, "stdin", query=query)
        try:
            return await self._transport.call(
                "POST", where, StdinStatus, raw=data, timeout_s=STDIN_TIMEOUT_S, lane=Lane.LONG
            )
        except CommandError as error:
            if error.detail.get("errno") == "EPIPE":
                raise ConflictError("the program has closed its stdin", detail=error.detail) from error
            raise


class Process:
    """One command that was started with `commands.start` or found with `commands.attach`."""

    def __init__(
        self,
        transport: Transport,
        sandbox_id: str,
        follower: Follower,
        *,
        stdin: bool,
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._follower = follower
        self._gate = AsyncGate(1)
        self._buffers: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self._buffered = [0, 0]
        self._wanted = list(follower.offsets)
        self._dropped = [False, False]
        self._result: CommandResult | None = None
        self._at_end = False
        """Everything before the result has been taken from the follower."""
        self.id: str = follower.command_id
        """Id of the command; `sandbox.commands.attach(id)` finds it again, from any process."""
        self.stdin = ProcessInput(transport, sandbox_id, self.id, is_open=stdin)
        """Write to it when the command was started with `stdin=True` or a pty."""
        self.stdout = ProcessOutput(self, STDOUT)
        """Standard output, or the terminal's output."""
        self.stderr = ProcessOutput(self, STDERR)
        """Standard error; empty with a pty."""

    @property
    def result(self) -> CommandResult | None:
        """How it ended, once that has been seen; `wait` sees it."""
        return self._result

    @property
    def offsets(self) -> tuple[int, int]:
        """Bytes of stdout and stderr you have read: what `attach` needs to go on from here."""
        return self._wanted[STDOUT], self._wanted[STDERR]

    async def read_output(self, stream: int) -> bytes:
        """The next bytes of one stream (0 stdout, 1 stderr); b"" at the end of the command."""
        while True:
            async with self._turn(None):
                if self._buffers[stream]:
                    data = self._buffers[stream].popleft()
                    self._buffered[stream] -= len(data)
                    self._wanted[stream] += len(data)
                    return data
                if self._dropped[stream]:
                    await self._rewind()
                elif self._at_end:
                    return b""
                await self._pull(deadline=None, reading=stream)

    async def wait(self, *, timeout: float | None = None) -> CommandResult:
        """Wait for the end; output stays readable. `timeout` in seconds, None = for ever.

        Raises DeadlineError when it is not over in time; the command goes on and you may wait again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._result is None:
            async with self._turn(deadline):
                if self._result is None:
                    await self._pull(deadline=deadline, reading=None)
        return self._result

    @asynccontextmanager
    async def _turn(self, deadline: float | None) -> AsyncIterator[None]:
        """One at a time takes the next event; readers and waiters of one Process alternate."""
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not await self._gate.enter(left):
            raise DeadlineError("the command was not over in time")
        try:
            yield
        finally:
            self._gate.leave()

    async def status(self) -> CommandStatus:
        """What the platform knows of it now."""
        return await self._transport.call("GET", self._target(), CommandStatus)

    async def kill(self, *, grace: float = 2.0) -> CommandStatus:
        """End the whole process tree: TERM, `grace` seconds, KILL. The result then says `cancelled`. May be
        repeated."""
        return await self._transport.call("DELETE", self._target(grace=grace), CommandStatus)

    async def send_signal(self, signal: int) -> CommandStatus:
        """Send a signal (1-64) to the command's process group, with a pty to its foreground group."""
        return await self._transport.call(
            "POST", self._target("signal"), CommandStatus, value=SignalRequest(signal=int(signal)), idempotent=False
        )

    async def resize(self, *, rows: int, cols: int) -> CommandStatus:
        """Set the size of the command's terminal."""
        size = PtySize(rows=rows, cols=cols)
        return await self._transport.call("POST", self._target("resize"), CommandStatus, value=size)

    async def aclose(self) -> None:
        """Drop the connection; the command goes on."""
        await self._follower.aclose()

    async def _pull(self, *, deadline: float | None, reading: int | None) -> None:
        event = await self._follower.next_event(deadline=deadline)
        if isinstance(event, CommandResult):
            self._result, self._at_end = event, True
        if not isinstance(event, Chunk):
            return
        stream = event.stream
        if self._dropped[stream]:
            return
        self._buffers[stream].append(event.data)
        self._buffered[stream] += len(event.data)
        if stream != reading and self._buffered[stream] > BUFFER_BYTES:
            self._buffers[stream].clear()
            self._buffered[stream] = 0
            self._dropped[stream] = True

    async def _rewind(self) -> None:
        """Ask again from what has been read, for both streams: nothing is buffered, nothing is lost."""
        await self._follower.aclose()
        for stream in (STDOUT, STDERR):
            self._buffers[stream].clear()
            self._buffered[stream] = 0
            self._dropped[stream] = False
        self._at_end = False
        self._follower.restart_from(self._wanted[STDOUT], self._wanted[STDERR])

    def _target(self, *parts: str, grace: float | None = None) -> str:
        query = None if grace is None else {"grace": str(grace)}
        return target("sandboxes", self._sandbox_id, "commands", self.id, *parts, query=query)
