"""One run of one program in a container: from the command to what became of it.

Output beyond the limit, or time beyond it, ends everything the run has started, at once and from outside: the kernel
does it by control group. The order in which statuses are looked at: output, memory, time, then the program's own end.
Nothing here decides by what the program says of itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from opendsec.errors import NodeError
from opendsec.fncall.inside_frames import UNPREPARED
from opendsec.fncall.member import USER, WORK, Member
from opendsec.fncall.watch import Watch
from opendsec.fncall.zygote import Ended
from opendsec.guest.base import CommandEvent, Exit, GuestError, GuestLostError, Output, StartCommand
from opendsec.model.fncall import CallStatus, FnCallSpec, RunOutcome

KIB = 1024
KILL_PATIENCE_S = 5.0
"""So long the end of what was killed may take to be told."""
DRAIN_AFTER_S = 0.01
"""A function call's pipes hold 64 KiB; one that lasts longer is listened to."""
_PIPE_READ = 64 * KIB


@dataclass(slots=True)
class Streams:
    """What was printed, each stream up to the limit; `over`: one of them had more."""

    limit: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    over: bool = False

    def add(self, stream: int, data: bytes) -> None:
        """`stream`: 1 or 2."""
        kept = self.stdout if stream == 1 else self.stderr
        room = self.limit - len(kept)
        if len(data) > room:
            self.over = True
        kept += data[:room]


def _outcome(
    member: Member, streams: Streams, watch: Watch, *, exit_code: int | None, signal_number: int
) -> RunOutcome:
    status = CallStatus.OK
    if streams.over:
        status = CallStatus.OUTPUT_LIMIT
    elif member.was_out_of_memory():
        status = CallStatus.MEMORY_LIMIT
    elif watch.is_over or signal_number == signal.SIGXCPU:
        status = CallStatus.TIME_LIMIT
    elif exit_code != 0:
        status = CallStatus.RUNTIME_ERROR
    limited = status not in (CallStatus.OK, CallStatus.RUNTIME_ERROR)
    return RunOutcome(
        status=status,
        exit_code=None if limited else exit_code,
        signal=0 if limited else signal_number,
        stdout=bytes(streams.stdout),
        stderr=bytes(streams.stderr),
        truncated=streams.over,
        cpu_s=watch.cpu_s,
        wall_s=watch.wall_s,
        memory_bytes=member.most_memory(),
    )


# ── a program ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to execute, and how long it may."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdin: bytes
    cpu_s: float
    wall_s: float


async def run_program(member: Member, spec: FnCallSpec, program: Program) -> RunOutcome:
    """Execute it in the container's directory of this run, which is prepared. Nothing of it runs afterwards.

    Raises NodeError when the container is lost; a program that cannot be executed is a runtime error (127), as in a
    shell.
    """
    member.ready_for(spec)
    streams = Streams(spec.output_kb * KIB)
    command_id = member.command_id()
    watch = Watch(cpu_s=member.files.cpu_s, cpu_limit_s=program.cpu_s, wall_limit_s=program.wall_s)
    name = f"cmd-{command_id}"
    try:
        with watch(lambda: member.files.kill_below(name)):
            ended = await _executed(member, command_id, program, streams)
    except GuestLostError as error:
        member.doubt = str(error)
        if member.was_out_of_memory():  # the kernel found nothing smaller to kill than the container
            return _outcome(member, streams, watch, exit_code=None, signal_number=signal.SIGKILL)
        raise NodeError(f"the container was lost under the call: {error}", retryable=True) from error
    except BaseException:
        member.doubt = member.doubt or "its call was given up"
        raise
    outcome = _outcome(member, streams, watch, exit_code=ended.exit_code, signal_number=ended.signal)
    await member.end_command(command_id)
    return outcome


async def _executed(member: Member, command_id: int, program: Program, streams: Streams) -> Exit:
    guest = member.guest
    command = StartCommand(
        argv=program.argv, env=program.env, cwd=WORK, user=USER, stdin=bool(program.stdin), grace_ms=0
    )
    try:
        await guest.start(command_id, command)
    except GuestError as error:
        if error.code != "exec":
            raise NodeError(f"the program could not be started: {error}", retryable=True) from error
        streams.add(2, f"{error}\n".encode())
        return Exit(exit_code=127)
    try:
        if len(program.stdin) <= _PIPE_READ:
            if program.stdin:
                await _feed(member, command_id, program.stdin)
            return await _listen(member, command_id, streams)
        async with asyncio.TaskGroup() as group:
            feeding = group.create_task(_feed(member, command_id, program.stdin))
            ended = await _listen(member, command_id, streams)
            feeding.cancel()
        return ended
    finally:
        guest.release(command_id)


async def _feed(member: Member, command_id: int, data: bytes) -> None:
    try:
        await member.guest.write_stdin(command_id, 0, data, eof=True)
    except (GuestError, GuestLostError):
        return  # it does not read all of it; a lost container is for the listener to notice


async def _listen(member: Member, command_id: int, streams: Streams) -> Exit:
    events: AsyncIterator[CommandEvent] = member.guest.events(command_id)
    seen = [0, 0]
    async for event in events:
        if isinstance(event, Exit):
            return event
        if isinstance(event, Output):
            streams.add(event.stream, event.data)
            seen[event.stream - 1] = event.offset + len(event.data)
            member.guest.ack(command_id, seen[0], seen[1])
            if streams.over:
                member.files.kill_below(f"cmd-{command_id}")
    raise GuestLostError("the command's events ended without its end")


# ── a function ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Pipes:
    """A call's two pipes, and what came out of them."""

    def __init__(self, user: int, streams: Streams) -> None:
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._read: list[int] = []
        self.write: list[int] = []
        self._listening = False
        try:
            for _ in range(2):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self._read.append(ours)
                self.write.append(theirs)
                os.set_blocking(ours, False)
                os.fchown(theirs, user, user)
        except OSError:
            self.close()
            raise

    def given(self) -> None:
        """The other side has its ends."""
        for fd in self.write:
            os.close(fd)
        self.write.clear()

    def listen(self) -> None:
        """From now on take what comes at once."""
        self._listening = True
        for index, fd in enumerate(self._read):
            self._loop.add_reader(fd, self._drain, index)

    def _drain(self, index: int) -> None:
        while True:
            try:
                data = os.read(self._read[index], _PIPE_READ)
            except BlockingIOError:
                return
            if not data:
                if self._listening:
                    self._loop.remove_reader(self._read[index])
                return
            self._streams.add(index + 1, data)
            if self._streams.over:
                self.on_over()
                return

    def on_over(self) -> None:
        """Replaced by whoever can end the call."""

    def close(self) -> None:
        """Take what is left. Nobody writes any more."""
        self.given()
        self.on_over = lambda: None  # type: ignore[method-assign]
        for index, fd in enumerate(self._read):
            self._drain(index)
            if self._listening:
                self._loop.remove_reader(fd)
            os.close(fd)
        self._read.clear()


async def run_function(member: Member, spec: FnCallSpec, *, user: int) -> tuple[RunOutcome, str | None]:
    """Call it in a process forked for it. Nothing of that runs afterwards. Returns what happened, and the value.

    Raises NodeError when the container is lost.
    """
    assert member.zygote is not None
    member.ready_for(spec)
    streams = Streams(spec.output_kb * KIB)
    watch = Watch(cpu_s=member.files.cpu_s, cpu_limit_s=spec.cpu_time_s, wall_limit_s=spec.wall_time_s)
    task = os.memfd_create("task", os.MFD_CLOEXEC)
    try:
        pipes = _Pipes(user, streams)
    except OSError:
        os.close(task)
        raise
    try:
        asked = _task(spec)
        _write(task, asked)
        with watch(member.zygote.kill):
            ended = await _called(member, spec, task, len(asked), pipes)
        if member.files.processes() != member.processes:
            await member.zygote.sweep()
        pipes.close()
        exit_code = os.waitstatus_to_exitcode(ended.status)
        outcome = _outcome(
            member, streams, watch, exit_code=exit_code if exit_code >= 0 else None, signal_number=max(0, -exit_code)
        )
        if not await member.zygote.settle(ended):
            member.doubt = "an order to end a call was lost"
        _check_begun(outcome, task, asked)
        return _with_value(outcome, task, spec)
    except GuestLostError as error:
        member.doubt = str(error)
        pipes.close()
        if watch.is_over or streams.over or member.was_out_of_memory():
            return _outcome(member, streams, watch, exit_code=None, signal_number=signal.SIGKILL), None
        raise NodeError(f"the container was lost under the call: {error}", retryable=True) from error
    except BaseException:
        member.doubt = member.doubt or "its call was given up"
        raise
    finally:
        pipes.close()
        os.close(task)


def _check_begun(outcome: RunOutcome, task: int, asked: bytes) -> None:
    if outcome.exit_code == UNPREPARED and os.pread(task, len(asked) + 1, 0) == asked:
        why = outcome.stderr.decode("utf-8", "replace")
        raise NodeError(f"the call's process failed before the call began: {why}", retryable=True)


def _write(fd: int, content: bytes) -> None:
    """At the beginning; whoever writes next does so at the beginning again."""
    at = 0
    while at < len(content):
        at += os.pwrite(fd, content[at:], at)


def _task(spec: FnCallSpec) -> bytes:
    arguments = spec.arguments or "[[], {}]"
    rest = {"code": spec.code, "function": spec.function, "env": dict(spec.env)}
    return f'{json.dumps(rest)[:-1]}, "arguments": {arguments}}}'.encode()


async def _called(member: Member, spec: FnCallSpec, task: int, size: int, pipes: _Pipes) -> Ended:
    zygote = member.zygote
    assert zygote is not None
    pipes.on_over = zygote.kill  # type: ignore[method-assign]
    answer = zygote.begin(
        cpu_s=math.ceil(spec.cpu_time_s), task=task, size=size, out=pipes.write[0], err=pipes.write[1]
    )
    pipes.given()
    listening = asyncio.get_running_loop().call_later(DRAIN_AFTER_S, pipes.listen)
    try:
        async with asyncio.timeout(spec.wall_time_s + KILL_PATIENCE_S):
            return await answer
    except TimeoutError as error:
        raise GuestLostError("what was killed did not end") from error
    finally:
        listening.cancel()


def _with_value(outcome: RunOutcome, task: int, spec: FnCallSpec) -> tuple[RunOutcome, str | None]:
    if outcome.status is not CallStatus.OK:
        return outcome, None
    size = os.fstat(task).st_size
    if size > spec.output_kb * KIB:
        return _changed(outcome, CallStatus.OUTPUT_LIMIT), None
    try:
        text = os.pread(task, size, 0).decode("utf-8")
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # it ended itself before it returned anything, or wrote something of its own
        return _changed(outcome, CallStatus.RUNTIME_ERROR), None
    return outcome, text


def _no_constant(name: str) -> None:
    """NaN and Infinity, which Python would read, are in no JSON: what has them is not what the fork server writes."""
    raise ValueError(f"{name} is not JSON")


def _changed(outcome: RunOutcome, status: CallStatus) -> RunOutcome:
    return RunOutcome(
        status=status,
        exit_code=outcome.exit_code if status is CallStatus.RUNTIME_ERROR else None,
        stdout=outcome.stdout,
        stderr=outcome.stderr,
        truncated=status is CallStatus.OUTPUT_LIMIT,
        cpu_s=outcome.cpu_s,
        wall_s=outcome.wall_s,
        memory_bytes=outcome.memory_bytes,
    )


__all__ = ["Program", "run_function", "run_program"]
