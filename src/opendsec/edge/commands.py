"""The commands of one sandbox: intent → guest → output → result, each step journalled before it shows.

    submit ─▶ Intent in the journal ─▶ guest.start ─▶ events ─▶ recorder ─▶ Exit ─▶ Result in the journal ─▶
    followers ─▶ guest.release

A command runs once. Its operation id, if it has one, finds it again (also while it runs, also after a restart of the
edge); the same id with another request is refused. It goes on whether or not anybody follows it. A lost connection
is taken up again where it was; when the sandbox has ended the command has too (`sandbox_ended`), and when the guest
knows nothing of a command that had begun, it is `lost`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from opendsec import errors
from opendsec.backends.base import Usage
from opendsec.edge import journal, outcome
from opendsec.edge.command import Command, check_session, continue_session, request_digest, start_plan
from opendsec.edge.kept_commands import KeptCommands
from opendsec.edge.recorder import RecentOutputs
from opendsec.edge.stdin import write_stdin
from opendsec.edge.writer import WriterThread
from opendsec.guest.base import (
    Exit,
    Guest,
    GuestError,
    GuestLostError,
    KnownCommand,
    Output,
    StartCommand,
)
from opendsec.model.command import CommandResult, EndReason, ExecRequest
from opendsec.model.image import ImageConfig
from opendsec.model.spec import SandboxSpec
from opendsec.wire import codec
from opendsec.wire.contracts import StdinStatus

log = logging.getLogger(__name__)

MAX_RUNNING = 1024
"""The guest agent's own limit."""
MAX_JOURNAL_BYTES = 256 * 1024 * 1024
"""Of one sandbox: what was asked and short outputs are kept there until it is forgotten, and read by the next edge."""


class Surroundings(Protocol):
    """What a sandbox offers its commands."""

    async def connected(self) -> Guest | None:
        """The present connection, or the first one after a restart; None when the sandbox is ending."""

    async def reconnected(self, lost: Guest | None) -> Guest | None:
        """A connection that is not `lost`, once it is not parked; None when the sandbox has ended or is ending."""

    def usage(self) -> Usage: ...

    def work_ended(self) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None: ...


class CommandBook(KeptCommands):
    """All commands of one sandbox."""

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        spec: SandboxSpec,
        image: ImageConfig,
        file: journal.Journal,
        output_writer: WriterThread,
        recent: RecentOutputs,
        output_cap_bytes: int,
        first: int = 1,
        sessions: Iterable[str] = (),
    ) -> None:
        """`first`, `sessions`: of one that goes on from another's state, whose agent knows that one's commands."""
        super().__init__(
            file=file,
            output_writer=output_writer,
            recent=recent,
            output_cap_bytes=output_cap_bytes,
            first=first,
            sessions=sessions,
        )
        self._around = surroundings
        self._first = first
        self._spec = spec
        self._image = image
        self._one_ended = asyncio.Event()
        self.running = 0

    # What the API asks

    def submit(self, request: ExecRequest, begin: Callable[[], None]) -> Command:
        """A new command on its way, or the one this operation id already named. `begin` is called for a new one and
        may refuse.
        """
        known = self._operations.get(request.operation_id) if request.operation_id is not None else None
        digest = request_digest(request) if request.operation_id is not None else ""
        if known is not None:
            if known.digest != digest:
                raise errors.ConflictError(
                    f"operation_id {request.operation_id!r} was used for another command",
                    detail={"field": "operation_id", "command_id": known.command_id},
                    remedy="use a new operation_id for a new command",
                )
            return known
        check_session(request)
        if self.running >= MAX_RUNNING:
            raise errors.CapacityError(f"{self.running} commands are running in this sandbox, at most {MAX_RUNNING}")
        if self._journal_bytes > MAX_JOURNAL_BYTES:
            raise errors.CapacityError(
                f"what this sandbox was asked and has answered fills {MAX_JOURNAL_BYTES} bytes, which is all it may",
                remedy="start another sandbox; send large scripts and take large outputs as files",
                retryable=False,
            )
        begin()
        command = self._add(self._next, request, digest, time.time())
        self.running += 1
        self._around.spawn(self._guarded(command, partial(self._run, command)), f"command-{command.number}")
        return command

    async def write_stdin(
        self, command: Command, offset: int | None, chunks: AsyncIterator[bytes], *, eof: bool
    ) -> StdinStatus:
        """See `opendsec.edge.stdin.write_stdin`."""
        return await write_stdin(command, offset, chunks, eof=eof)

    # A command's life

    async def _guarded(self, command: Command, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Whatever goes wrong with one command ends that command, never hangs it and never touches another."""
        try:
            await work()
        except Exception as exc:
            log.exception("command_failed_inside", extra={"fields": {"command": command.number}})
            if not command.done:
                self._finish(
                    command, error=errors.CommandLostError(f"the edge failed over this command: {type(exc).__name__}")
                )

    async def _run(self, command: Command) -> None:
        try:
            self._journal_bytes = await self._journal.append(
                journal.Intent(
                    number=command.number, request=command.request, digest=command.digest, started_at=command.started_at
                )
            )
        except errors.NodeError as exc:
            # Nothing was started and nothing recorded: the same operation id may be tried again.
            self._forget(command)
            self._finish(command, error=exc)
            return
        await self._carry(command, await self._around.connected(), None)

    async def _carry(
        self, command: Command, guest: Guest | None, known: KnownCommand | None, *, fresh: bool | None = None
    ) -> None:
        """Bring it to its end over as many connections as it takes. `known`: what a guest met again says of it;
        `fresh` False: it is asked.
        """
        fresh = known is None if fresh is None else fresh
        while guest is not None:
            try:
                exit_ = await self._converse(command, guest, known, fresh=fresh)
            except GuestError as exc:
                await self._guest_refused(command, exc)
                return
            except GuestLostError:
                lost, guest = guest, await self._around.reconnected(guest)
                log.info(
                    "command_reconnects", extra={"fields": {"command": command.number, "again": guest is not lost}}
                )
                fresh, known = False, None
                continue
            await self._conclude(command, exit_, guest)
            return
        await self._conclude_unseen(command, EndReason.SANDBOX_ENDED)

    async def _converse(self, command: Command, guest: Guest, known: KnownCommand | None, *, fresh: bool) -> Exit:
        if not fresh:
            found = known or next((one for one in await guest.list_commands() if one.id == command.number), None)
            if found is None and command.given:
                raise GuestError("gone", "the guest knows nothing of this command")
            if found is not None:
                command.stdout.skip_to(found.stdout_base)
                command.stderr.skip_to(found.stderr_base)
                command.carried_by(guest)
                await guest.attach(command.number, command.stdout.total, command.stderr.total)
                command.given = True
            fresh = found is None
        if fresh:
            command.carried_by(guest)
            await guest.start(command.number, self._plan(command))
            command.given = True
        command.wake()
        return await self._pump(command, guest)

    def _plan(self, command: Command) -> StartCommand:
        request = command.request
        plan = start_plan(request, self._spec, self._image)
        if request.session in self._sessions:
            return continue_session(plan, request)
        if request.session is not None:
            self._sessions.add(request.session)
        return plan

    async def _pump(self, command: Command, guest: Guest) -> Exit:
        acked = (0, 0)

        def on_safe() -> None:
            nonlocal acked
            safe = (command.stdout.safe(), command.stderr.safe())
            if safe != acked and not command.done and not guest.closed:
                acked = safe
                guest.ack(command.number, *safe)

        async for event in guest.events(command.number):
            if isinstance(event, Output):
                stream = command.stdout if event.stream == 1 else command.stderr
                stream.record(event.offset, event.data, on_safe=on_safe)
                command.wake()
            elif isinstance(event, Exit):
                return event
            else:
                command.stdin.taken(event)
        raise GuestLostError("the events of a command ended without its exit")

    async def _guest_refused(self, command: Command, exc: GuestError) -> None:
        if command.given:
            log.warning("command_lost", extra={"fields": {"command": command.number, "reason": f"{exc.code}: {exc}"}})
            await self._conclude_unseen(command, EndReason.LOST)
            return
        reason = outcome.end_at_start(exc)
        if reason is not None:
            await self._conclude_unseen(command, reason, never_ran=True)
            return
        error = outcome.refusal(exc)
        await self._record(command, journal.Refused(number=command.number, error=codec.error_fields(error)))
        self._finish(command, error=error)
        if error.retryable:
            self._free_operation(command)

    async def _conclude(self, command: Command, exit_: Exit, guest: Guest) -> None:
        usage = self._around.usage() if outcome.has_failed(exit_) else None
        before = self._counters
        if usage is not None:
            self._counters = before.advanced(usage)
        await command.stdout.settle()
        await command.stderr.settle()
        result = outcome.conclude(
            command.command_id, exit_, command.recorded(), outcome.end_reason(exit_, before, usage)
        )
        if await self._record_result(command, result):
            guest.release(command.number)
        self._finish(command, result=result)

    async def _conclude_unseen(self, command: Command, reason: EndReason, *, never_ran: bool = False) -> None:
        await command.stdout.settle()
        await command.stderr.settle()
        duration = max(0.0, time.time() - command.started_at)
        result = outcome.conclude_unseen(command.command_id, command.recorded(), reason, duration)
        await self._record_result(command, result, never_ran=never_ran)
        self._finish(command, result=result)
        if never_ran:
            self._free_operation(command)

    async def _record_result(self, command: Command, result: CommandResult, *, never_ran: bool = False) -> bool:
        stdout, stderr = command.stdout, command.stderr
        return await self._record(
            command,
            journal.Result(
                number=command.number,
                result=result,
                stdout=stdout.inline(),
                stderr=stderr.inline(),
                stdout_kept=stdout.kept,
                stderr_kept=stderr.kept,
                oom_kills=self._counters.oom_kills,
                pids_denied=self._counters.pids_denied,
                never_ran=never_ran,
            ),
        )

    async def _record(self, command: Command, record: journal.Result | journal.Refused) -> bool:
        """Whether the journal has it. If not, the guest keeps the command, and a new edge asks it again: the answer
        is the same.
        """
        try:
            position = await self._journal.append(record)
        except errors.NodeError:
            log.exception("result_not_journalled", extra={"fields": {"command": command.number}})
            return False
        if isinstance(record, journal.Result):
            command.position = position
        return True

    def _finish(
        self, command: Command, *, result: CommandResult | None = None, error: errors.OpenDSecError | None = None
    ) -> None:
        command.result, command.error = result, error
        for stream in (command.stdout, command.stderr):
            stream.end()
            if command.position is not None:
                self._recent.add(stream)
        self.running -= 1
        self._around.work_ended()
        command.wake()
        self._one_ended.set()
        self._remember(command)

    async def wait_idle(self) -> None:
        """Until no command is running."""
        while self.running:
            self._one_ended.clear()
            await self._one_ended.wait()

    # After a restart of the edge

    def resume(self, known: Mapping[int, KnownCommand], guest: Guest) -> None:
        """Go on with the unfinished ones, and let the guest forget what is finished. Call after all lines were
        restored.
        """
        self._tidy(known.values(), guest)
        for command in self.unfinished():
            self._take_up(command)
            work = partial(self._carry, command, guest, known.get(command.number))
            self._around.spawn(self._guarded(command, work), f"command-{command.number}")

    def resume_when_awake(self) -> None:
        """As `resume`, for a sandbox that was found parked: everything waits until somebody resumes it."""
        for command in self.unfinished():
            self._take_up(command)
            work = partial(self._carry_when_awake, command)
            self._around.spawn(self._guarded(command, work), f"command-{command.number}")
        self._around.spawn(self._tidy_when_awake(), "tidy")

    def _take_up(self, command: Command) -> None:
        self.running += 1
        command.stdin.known = False
        command.stdout.resume_from_file()
        command.stderr.resume_from_file()

    async def _carry_when_awake(self, command: Command) -> None:
        await self._carry(command, await self._around.reconnected(None), None, fresh=False)

    async def _tidy_when_awake(self) -> None:
        guest = await self._around.reconnected(None)
        while guest is not None:
            try:
                self._tidy(await guest.list_commands(), guest)
            except GuestLostError:
                guest = await self._around.reconnected(guest)
            else:
                return

    def take_over_inherited(self) -> None:
        """It has just been started from another's state: what the source was running goes on, followed by nobody."""
        self._around.spawn(self._tidy_when_awake(), "inherited")

    def _tidy(self, known: Iterable[KnownCommand], guest: Guest) -> None:
        """Let the guest forget what is finished; the output of what the source was running is taken and dropped, so
        that nothing waits for a reader.
        """
        for entry in known:
            command = self._commands.get(entry.id)
            if entry.ended and (command is None or command.done):
                guest.release(entry.id)
            elif command is None and entry.id < self._first:
                self._around.spawn(self._drain(entry.id, guest), f"inherited-{entry.id}")

    async def _drain(self, number: int, guest: Guest | None) -> None:
        while guest is not None:
            try:
                await _drop_output(number, guest)
            except GuestLostError:
                guest = await self._around.reconnected(guest)
            except GuestError as exc:
                log.info("inherited_command_gone", extra={"fields": {"command": number, "reason": str(exc)}})
                return
            else:
                return

    async def close_unfinished(self) -> None:
        """The sandbox did not outlive its edge: what had begun has ended with it."""
        for command in self.unfinished():
            self.running += 1
            command.stdout.resume_from_file()
            command.stderr.resume_from_file()
            await self._conclude_unseen(command, EndReason.SANDBOX_ENDED)


async def _drop_output(number: int, guest: Guest) -> None:
    """Until that command has ended. Raises GuestLostError, GuestError."""
    found = next((one for one in await guest.list_commands() if one.id == number), None)
    if found is None:
        return
    taken = {1: found.stdout_base, 2: found.stderr_base}
    await guest.attach(number, taken[1], taken[2])
    async for event in guest.events(number):
        if isinstance(event, Output):
            taken[event.stream] = event.offset + len(event.data)
            guest.ack(number, taken[1], taken[2])
        elif isinstance(event, Exit):
            guest.release(number)
