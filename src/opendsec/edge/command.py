"""One command as the edge knows it, and what the guest is told of it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
from dataclasses import replace

from opendsec import errors
from opendsec.edge.outcome import Recorded
from opendsec.edge.recorder import OutputStream
from opendsec.guest.base import Guest, StartCommand, StdinTaken
from opendsec.model.command import CommandResult, CommandStatus, ExecRequest
from opendsec.model.ids import CommandId
from opendsec.model.image import ImageConfig
from opendsec.model.spec import SandboxSpec
from opendsec.wire import codec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUMMARY_CHARS = 200
CARRIED_S = 60.0
"""How long what is sent to a command waits until its guest knows it."""
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Command:
    """One command: what was asked, what came out, how it ended."""

    def __init__(
        self,
        number: int,
        request: ExecRequest,
        digest: str,
        started_at: float,
        streams: tuple[OutputStream, OutputStream],
    ) -> None:
        self.number = number
        self.command_id = CommandId(f"cmd-{number}")
        self.request = request
        self.digest = digest
        self.started_at = started_at
        self.stdout, self.stderr = streams
        self.given = False
        """The guest has answered START."""
        self.carrier: Guest | None = None
        """The connection that START or ATTACH went over last."""
        self.result: CommandResult | None = None
        self.error: errors.OpenDSecError | None = None
        self.position: int | None = None
        """Where the journal has the result."""
        self.stdin = StdinProgress()
        self._watchers: set[asyncio.Event] = set()

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def status(self) -> CommandStatus:
        """As the API lists it."""
        request = self.request
        text = request.script if request.script is not None else " ".join(request.argv)
        return CommandStatus(
            command_id=self.command_id,
            summary=text[:SUMMARY_CHARS],
            started_at=self.started_at,
            running=not self.done,
            stdout_bytes=self.stdout.total,
            stderr_bytes=self.stderr.total,
            session=request.session,
            operation_id=request.operation_id,
            pty=request.pty is not None,
            result=self.result,
        )

    def trim(self) -> None:
        """It has ended: of what was asked only what a listing shows is kept in memory; the journal has it all."""
        self.carrier = None
        request = self.request
        if request.script is not None:
            self.request = replace(request, script=request.script[:SUMMARY_CHARS], env={})
        else:
            self.request = replace(request, argv=(" ".join(request.argv)[:SUMMARY_CHARS],), env={})

    def watch(self) -> asyncio.Event:
        """An event set at every change from now on; give it back with `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    def carried_by(self, guest: Guest) -> None:
        """START or ATTACH is about to go over this connection: what is sent on it from now on comes after that. The
        answer may take as long as a session is busy, and nobody has to wait for it."""
        self.carrier = guest
        self.wake()

    async def carried(self, *, wait_s: float = CARRIED_S) -> Guest | None:
        """The connection on which its guest knows it; None: it has ended. What is sent to it on another, or before
        START, would be lost. Raises SandboxLostError, which may be tried again, after `wait_s`.
        """
        event = self.watch()
        try:
            async with asyncio.timeout(wait_s):
                while not self.done:
                    if self.carrier is not None and not self.carrier.closed:
                        return self.carrier
                    await event.wait()
                    event.clear()
        except TimeoutError:
            raise errors.SandboxLostError(
                f"{self.command_id} has not been given to the guest agent yet",
                detail={"command_id": self.command_id},
                retryable=True,
                remedy="try again: it is given as soon as the agent answers",
            ) from None
        finally:
            self.unwatch(event)
        return None

    def wake(self) -> None:
        for event in self._watchers:
            event.set()

    def recorded(self) -> Recorded:
        return Recorded(self.stdout.total, self.stderr.total, self.stdout.kept, self.stderr.kept)


class StdinProgress:
    """How far a command's stdin has come."""

    def __init__(self) -> None:
        self.accepted = 0
        self.closed = False
        self.known = True
        """False after a restart, until the first write: the guest may have more than it has said."""
        self.turn = asyncio.Lock()

    def taken(self, event: StdinTaken) -> None:
        self.accepted = max(self.accepted, event.taken)
        self.closed = self.closed or event.closed


def start_plan(request: ExecRequest, spec: SandboxSpec, image: ImageConfig) -> StartCommand:
    """The complete command for the guest: image, then sandbox, then request."""
    env = {"PATH": DEFAULT_PATH, **image.env, **spec.env, **request.env}
    return StartCommand(
        script=request.script,
        argv=request.argv,
        env=env,
        cwd=request.cwd or spec.workdir or image.workdir or "/",
        user=request.user or spec.init_user or image.user,
        stdin=request.stdin,
        pty=None if request.pty is None else (request.pty.rows, request.pty.cols),
        timeout_ms=0 if request.timeout_s is None else max(1, round(request.timeout_s * 1000)),
        grace_ms=round(request.grace_s * 1000),
        session=request.session or "",
    )


def request_digest(request: ExecRequest) -> str:
    """What tells two requests under one operation id apart."""
    return hashlib.sha256(codec.encode(request)).hexdigest()


def continue_session(plan: StartCommand, request: ExecRequest) -> StartCommand:
    """The plan of a command in a session that may be there already.

    A shell that lives has its own directory and environment; what this request names for itself is set in that shell,
    and stays. A directory that is not there fails the command before it begins.
    """
    if request.script is None or not (request.env or request.cwd):
        return plan
    steps = [f"export {name}={shlex.quote(value)}" for name, value in request.env.items()]
    steps += [f"cd -- {shlex.quote(request.cwd)}"] if request.cwd is not None else []
    return replace(plan, script=" && ".join([*steps, f"eval {shlex.quote(request.script)}"]))


def check_session(request: ExecRequest) -> None:
    """Raise InvalidSpecError for a variable a shell cannot hold."""
    for name in request.env if request.session is not None else ():
        if not _SHELL_NAME.match(name):
            raise errors.InvalidSpecError(
                f"env: {name[:80]!r} is no name of a shell variable, as a session needs", detail={"field": "env"}
            )
