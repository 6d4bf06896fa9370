"""The commands of one sandbox as they are remembered: found by id and by operation id, read back from the journal,
their output read again, and forgotten when there are too many.

What a sandbox may keep is bounded: the output files of commands that have ended make room for newer output, which says
so (`truncated`), and of ended commands the oldest are forgotten. It talks to no guest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from opendsec import errors
from opendsec.edge import journal
from opendsec.edge.command import Command
from opendsec.edge.outcome import Counters
from opendsec.edge.recorder import Budget, OutputStream, RecentOutputs
from opendsec.edge.writer import WriterThread
from opendsec.model.command import ExecRequest
from opendsec.wire import codec

MAX_REMEMBERED = 16_384
"""Ended commands (and operation ids) of one sandbox; older ones are forgotten."""


class KeptCommands:
    """See the module. `commands.CommandBook` carries them out."""

    def __init__(
        self,
        *,
        file: journal.Journal,
        output_writer: WriterThread,
        recent: RecentOutputs,
        output_cap_bytes: int,
        first: int,
        sessions: Iterable[str],
    ) -> None:
        self._journal = file
        self._writer = output_writer
        self._recent = recent
        self._budget = Budget(output_cap_bytes, self._make_room)
        self._filed: deque[Command] = deque()
        """Ended ones with output in files, oldest first."""
        self._commands: dict[int, Command] = {}
        self._operations: dict[str, Command] = {}
        self._ended: list[int] = []
        self._sessions: set[str] = set(sessions)
        """Names given so far; their shells may be there."""
        self._next = first
        self._counters = Counters()
        self._journal_bytes = 0
        """About: where the last line of a command begins."""

    def get(self, command_id: str) -> Command:
        """Raises NotFoundError."""
        number = command_id.removeprefix("cmd-")
        command = (
            self._commands.get(int(number)) if number.isascii() and number.isdigit() and len(number) < 19 else None
        )
        if command is None or command.command_id != command_id:
            raise errors.NotFoundError(
                f"no command {command_id[:80]!r} in this sandbox", detail={"command_id": command_id[:80]}
            )
        return command

    def all(self) -> list[Command]:
        """Oldest first."""
        return list(self._commands.values())

    async def read(self, command: Command, stream: OutputStream, offset: int) -> bytes | memoryview:
        """Kept bytes from `offset`, up to 256 KiB; b"" when there are none now. Raises NotFoundError when it was
        removed.
        """
        if stream.removed:
            raise errors.NotFoundError(
                f"the output of {command.command_id} made room for newer output of this sandbox",
                detail={"command_id": command.command_id},
                remedy="read output before the sandbox has written its cap of newer one, or ask for less of it",
            )
        if stream.forgotten and offset < stream.kept and command.position is not None:
            record = await asyncio.to_thread(self._journal.read_at, command.position)
            assert isinstance(record, journal.Result)
            stream.remember((record.stdout if stream is command.stdout else record.stderr) or b"")
            self._recent.add(stream)
        found = stream.read_now(offset)
        return found if found is not None else await asyncio.to_thread(stream.read_file, offset)

    def unfinished(self) -> list[Command]:
        """Commands the journal has no end of."""
        return [command for command in self._commands.values() if not command.done]

    @property
    def next_number(self) -> int:
        """No command so far has it or a higher one."""
        return self._next

    @property
    def session_names(self) -> tuple[str, ...]:
        """Given so far, sorted."""
        return tuple(sorted(self._sessions))

    @property
    def oom_kills(self) -> int:
        """As counted when a command was last blamed for one."""
        return self._counters.oom_kills

    def restore(self, position: int, record: journal.OfCommand) -> None:
        """Replay one line of the journal, in order; `position` is where it begins."""
        self._journal_bytes = position
        if isinstance(record, journal.Intent):
            self._add(record.number, record.request, record.digest, record.started_at)
            if record.request.session is not None:
                self._sessions.add(record.request.session)
            return
        command = self._commands.get(record.number)
        if command is None or command.done:
            return
        if isinstance(record, journal.Refused):
            command.error = codec.error_from_fields(dict(record.error))
            if command.error.retryable:
                self._free_operation(command)
        else:
            command.result = record.result
            self._counters = Counters(
                max(self._counters.oom_kills, record.oom_kills), max(self._counters.pids_denied, record.pids_denied)
            )
            result = record.result
            command.position = position
            if record.never_ran:
                self._free_operation(command)
            command.stdout.restore(
                total=result.stdout_bytes_total, kept=record.stdout_kept, in_file=record.stdout is None
            )
            command.stderr.restore(
                total=result.stderr_bytes_total, kept=record.stderr_kept, in_file=record.stderr is None
            )
            if command.stdout.removed or command.stderr.removed:
                command.result = replace(result, truncated=True)
        self._remember(command)

    def forget_all(self) -> None:
        """The sandbox is forgotten, and its directory goes as a whole."""
        self._filed.clear()
        for command in list(self._commands.values()):
            self._forget(command)

    def _add(self, number: int, request: ExecRequest, digest: str, started_at: float) -> Command:
        out, limit = f"{self._journal.directory}/out/{number}", request.max_output_bytes
        streams = (
            OutputStream(f"{out}.1", limit=limit, budget=self._budget, writer=self._writer),
            OutputStream(f"{out}.2", limit=limit, budget=self._budget, writer=self._writer),
        )
        command = Command(number, request, digest, started_at, streams)
        self._commands[number] = command
        self._next = max(self._next, number + 1)
        if request.operation_id is not None:
            self._operations[request.operation_id] = command
        return command

    def _remember(self, command: Command) -> None:
        command.trim()
        self._ended.append(command.number)
        if command.stdout.in_file or command.stderr.in_file:
            self._filed.append(command)
        if len(self._ended) > MAX_REMEMBERED:
            oldest = self._commands.get(self._ended.pop(0))
            if oldest is not None:
                self._forget(oldest)

    def _make_room(self, wanted: int) -> None:
        while self._budget.left < wanted and self._filed:
            self._remove_output(self._filed.popleft())

    def _remove_output(self, command: Command) -> None:
        for stream in (command.stdout, command.stderr):
            stream.remove()
        if command.result is not None:
            command.result = replace(command.result, truncated=True)

    def _forget(self, command: Command) -> None:
        self._commands.pop(command.number, None)
        if command in self._filed:
            self._filed.remove(command)
            self._remove_output(command)
        self._free_operation(command)
        self._recent.discard(command.stdout)
        self._recent.discard(command.stderr)

    def _free_operation(self, command: Command) -> None:
        """Its operation id names nothing any more: a repeat is a new command."""
        name = command.request.operation_id
        if name is not None and self._operations.get(name) is command:
            del self._operations[name]
