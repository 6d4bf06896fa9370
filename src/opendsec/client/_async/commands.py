"""Starting, listing and finding commands of one sandbox.

Every command gets an operation id, generated when the caller gave none: whatever is repeated on the way, it runs once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from opendsec.client._async.follow import STDERR, STDOUT, Chunk, Follower
from opendsec.client._async.process import Process, ProcessInput
from opendsec.client._async.transport import Transport, target
from opendsec.client.concurrency import async_interruption, async_last_words
from opendsec.client.results import ShellResult, shell_result
from opendsec.errors import ConflictError, OpenDSecError, ProtocolError
from opendsec.model.command import (
    DEFAULT_OUTPUT_BYTES,
    CommandResult,
    CommandStatus,
    ExecRequest,
    PtySize,
    check_exec,
)
from opendsec.wire.contracts import CommandList

_CANCEL_TIMEOUT_S = 5.0


class Commands:
    """`sandbox.commands`."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def run(
        self,
        command: str | Sequence[str],
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
        """Run a command to its end. A string goes to the image's shell, a sequence is executed as it is.

        Parameters are those of `Sandbox.run_shell`.
        """
        request = _request(
            command,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            timeout_s=timeout,
            stdin=stdin is not None,
            session=session,
            operation_id=operation_id or f"op-{secrets.token_hex(12)}",
            max_output_bytes=max_output_bytes,
        )
        raw = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        follower = Follower(self._transport, self._sandbox_id, request=request)
        try:
            result = await self._collect(follower, raw, request.max_output_bytes)
        except async_interruption():
            await self._cancel(follower)
            raise
        except BaseException:
            await follower.aclose()
            raise
        return result.check() if check else result

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        grace: float = 2.0,
        stdin: bool = False,
        pty: PtySize | None = None,
        session: str | None = None,
        operation_id: str | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> Process:
        """Start a command and return at once with its Process. `stdin=True`: you will write to it; a pty implies it.

        `timeout` and `grace` in seconds: the command's own limit, and the time between TERM and KILL when it is
        reached.
        """
        request = _request(
            command,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            timeout_s=timeout,
            grace_s=grace,
            stdin=stdin or pty is not None,
            pty=pty,
            session=session,
            operation_id=operation_id or f"op-{secrets.token_hex(12)}",
            max_output_bytes=max_output_bytes,
        )
        where = target("sandboxes", self._sandbox_id, "commands", query={"detach": True})
        status = await self._transport.call("POST", where, CommandStatus, value=request)
        follower = Follower(self._transport, self._sandbox_id, command_id=status.command_id)
        return Process(self._transport, self._sandbox_id, follower, stdin=request.stdin)

    async def attach(self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> Process:
        """The Process of a command started earlier, by anybody; its output from these byte offsets on.

        Raises NotFoundError when the sandbox has no such command.
        """
        status = await self.get(command_id)
        follower = Follower(
            self._transport, self._sandbox_id, command_id=command_id, offsets=(stdout_offset, stderr_offset)
        )
        return Process(self._transport, self._sandbox_id, follower, stdin=status.running)

    async def get(self, command_id: str) -> CommandStatus:
        """What the platform knows of one command. Raises NotFoundError."""
        where = target("sandboxes", self._sandbox_id, "commands", command_id)
        return await self._transport.call("GET", where, CommandStatus)

    async def list(self) -> tuple[CommandStatus, ...]:
        """All commands of the sandbox the platform remembers, oldest first."""
        return (await self._transport.call("GET", target("sandboxes", self._sandbox_id, "commands"), CommandList)).items

    async def _collect(self, follower: Follower, stdin: bytes | None, most: int) -> ShellResult:
        """`most`: bytes of each stream the platform was asked to keep. Raises ProtocolError when it sends more: this
        process holds no more than that."""
        output = (bytearray(), bytearray())
        unsent = stdin
        while True:
            event = await follower.next_event()
            if isinstance(event, Chunk):
                output[event.stream].extend(event.data)
                if len(output[event.stream]) > most:
                    raise ProtocolError(
                        f"the platform sent more than the {most} bytes of output it was to keep",
                        detail={"command_id": follower.command_id},
                        sandbox_id=self._sandbox_id,
                    )
            elif isinstance(event, CommandResult):
                return shell_result(event, bytes(output[STDOUT]), bytes(output[STDERR]))
            elif unsent is not None:
                await self._feed(follower.command_id, unsent)
                unsent = None

    async def _feed(self, command_id: str, data: bytes) -> None:
        """All of stdin, or as much as the program wants. Its output is recorded meanwhile, so it cannot block this."""
        writer = ProcessInput(self._transport, self._sandbox_id, command_id, is_open=True)
        try:
            await writer.write(data)
            await writer.close()
        except ConflictError as error:
            if error.detail.get("field") == "offset":
                raise

    async def _cancel(self, follower: Follower) -> None:
        """The caller gave up: end the command too. When it may have been started under way, find it by its
        operation id."""
        async with async_last_words(_CANCEL_TIMEOUT_S):
            await follower.aclose()
            try:
                while follower.asked and not follower.command_id:
                    await follower.next_event()
                if follower.command_id:
                    where = target("sandboxes", self._sandbox_id, "commands", follower.command_id)
                    await self._transport.call("DELETE", where, CommandStatus, timeout_s=_CANCEL_TIMEOUT_S)
            except OpenDSecError:
                return
            finally:
                await follower.aclose()


def _request(command: str | Sequence[str], **fields: object) -> ExecRequest:
    if isinstance(command, str):
        return check_exec(ExecRequest(script=command, **fields))  # type: ignore[arg-type]
    return check_exec(ExecRequest(argv=tuple(command), **fields))  # type: ignore[arg-type]
