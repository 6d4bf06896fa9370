"""One sandbox: commands, files, terminal, and its life. Dropping the object does nothing to the sandbox.

A sandbox ends when you stop it, when a `stopping()` block is left, or when one of its TTLs passes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum

from opendsec.client._async.commands import Commands
from opendsec.client._async.files import Files
from opendsec.client._async.process import Process
from opendsec.client._async.transport import Transport, target
from opendsec.client.concurrency import async_last_words
from opendsec.client.results import ShellResult
from opendsec.model.command import DEFAULT_OUTPUT_BYTES, PtySize
from opendsec.model.node import SandboxStatus
from opendsec.model.spec import Lifetime
from opendsec.wire.contracts import UpdateRequest

STOP_TIMEOUT_S = 30.0


class Unset(Enum):
    """The default of parameters where None has a meaning of its own."""

    UNSET = "unset"


UNSET = Unset.UNSET


class Sandbox:
    """A running sandbox. Made by `DSecClient.run_container`, `run_many` and `connect`, not by hand."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self.id: str = sandbox_id
        """Give it to `DSecClient.connect` to find the sandbox again, from any process."""
        self.commands = Commands(transport, sandbox_id)
        """Start, list and find commands."""
        self.files = Files(transport, sandbox_id)
        """Read, write and copy files."""

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r})"

    async def run_shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        session: str | None = None,
        operation_id: str | None = None,
        check: bool = False,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ShellResult:
        """Run a command line in the image's shell and return how it ended. A non-zero exit code is a result, not an
        error.

        `cwd`, `env`, `user`: for this command; defaults are the image's and the sandbox's.
        `timeout`: seconds the command may take, enforced by the platform, which ends its whole process tree; the
        result then
        says `end_reason == "timeout"`. None: no limit. The client never gives up before the command does.
        `stdin`: bytes, or text sent as UTF-8; None: stdin is at end of file.
        `session`: name of a shell that lives on, so that `cd` and variables stay.
        `operation_id`: a repeat with the same id, also from another process, returns the recorded outcome instead
        of running again.
        `check=True`: raise CommandFailedError, CommandTimeoutError or CommandLostError unless the exit code is 0.
        `max_output_bytes`: kept per stream; what is over is counted and `truncated` is set.

        Raises InvalidSpecError for a bad argument, SandboxExitedError, NoShellError, ExecError, and TransportError
        when the
        platform cannot be reached for a minute; its `detail` has the `command_id` to attach to later. When the calling
        task is cancelled, the command is ended too.
        """
        return await self.commands.run(
            str(command),
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            session=session,
            operation_id=operation_id,
            check=check,
            max_output_bytes=max_output_bytes,
        )

    async def pty(
        self,
        command: str | Sequence[str] = ("/bin/sh",),
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """Start a command on a terminal of its own. Type with `stdin.write`, read `stdout`, `resize` when the
        window changes."""
        return await self.commands.start(
            command,
            cwd=cwd,
            env={"TERM": "xterm-256color", **(env or {})},
            user=user,
            pty=PtySize(rows=rows, cols=cols),
        )

    async def status(self) -> SandboxStatus:
        """State, spec, times and, when it has ended, why. Works for a while after the end."""
        return await self._transport.call("GET", self._target(), SandboxStatus)

    async def pause(self) -> SandboxStatus:
        """Stop its processes without ending them. May be repeated."""
        return await self._transport.call("POST", self._target("pause"), SandboxStatus)

    async def resume(self) -> SandboxStatus:
        """Let its processes go on. May be repeated."""
        return await self._transport.call("POST", self._target("resume"), SandboxStatus)

    async def renew(self) -> SandboxStatus:
        """Start the idle time anew, as every operation does, without changing anything."""
        return await self._transport.call("PATCH", self._target(), SandboxStatus, value=UpdateRequest())

    async def update(
        self,
        *,
        ttl_running_stop: float | Unset | None = UNSET,
        ttl_max_stop: float | Unset | None = UNSET,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxStatus:
        """Change TTLs (seconds; None = never) or replace all labels; what is not given stays."""
        lifetime = None
        if not (isinstance(ttl_running_stop, Unset) and isinstance(ttl_max_stop, Unset)):
            old = (await self.status()).spec.lifetime
            lifetime = Lifetime(
                ttl_running_stop=old.ttl_running_stop if isinstance(ttl_running_stop, Unset) else ttl_running_stop,
                ttl_max_stop=old.ttl_max_stop if isinstance(ttl_max_stop, Unset) else ttl_max_stop,
            )
        new_labels = None if labels is None else dict(labels)
        change = UpdateRequest(lifetime=lifetime, labels=new_labels)
        return await self._transport.call("PATCH", self._target(), SandboxStatus, value=change)

    async def stop(self, *, timeout: float | None = None) -> SandboxStatus:
        """End the sandbox and everything in it; all its files are gone. May be repeated, in every state."""
        return await self._transport.call("DELETE", self._target(), SandboxStatus, timeout_s=timeout)

    @asynccontextmanager
    async def stopping(self) -> AsyncIterator[Sandbox]:
        """A block at whose end the sandbox is stopped, whatever happened in it.

        Example: `async with sandbox.stopping(): ...`
        """
        try:
            yield self
        finally:
            async with async_last_words(STOP_TIMEOUT_S):
                await self.stop(timeout=STOP_TIMEOUT_S)

    def _target(self, *parts: str) -> str:
        return target("sandboxes", self.id, *parts)
