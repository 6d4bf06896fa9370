"""One sandbox: commands, files, terminal, and its life. Dropping the object does nothing to the sandbox.

A sandbox ends when you stop it, when a `stopping()` block is left, or when one of its TTLs passes.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum

from opendsec.client._async.commands import Commands
from opendsec.client._async.files import Files
from opendsec.client._async.keyboard import Keyboard
from opendsec.client._async.mouse import Mouse
from opendsec.client._async.packing import OnPack, packed
from opendsec.client._async.ports import Ports
from opendsec.client._async.process import Process
from opendsec.client._async.screen import Clipboard, Screen, Serial
from opendsec.client._async.snapshots import OnSnapshot, forked, snapshot_saved
from opendsec.client._async.transport import Transport, target
from opendsec.client.concurrency import async_interruption, async_last_words
from opendsec.client.kinds import is_named, is_number, must
from opendsec.client.packed import PackedImage
from opendsec.client.results import ShellResult
from opendsec.errors import DeadlineError, InvalidSpecError, OpenDSecError, TransportError
from opendsec.model.command import DEFAULT_OUTPUT_BYTES, PtySize
from opendsec.model.image import FileRole, LayerRole
from opendsec.model.node import SandboxStatus
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import Lifetime, check_seconds, check_snapshot_name
from opendsec.wire.contracts import (
    MAX_FORKS,
    OWN_KEY_PREFIX,
    ForkRequest,
    PackRequest,
    SnapshotRequest,
    UpdateRequest,
)

STOP_TIMEOUT_S = 30.0
FORK_TIMEOUT_S = 600.0


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
        self.screen = Screen(transport, sandbox_id)
        """Of a full VM: what its display shows."""
        self.mouse = Mouse(transport, sandbox_id)
        """Of a full VM: point and click."""
        self.keyboard = Keyboard(transport, sandbox_id)
        """Of a full VM: type and press keys."""
        self.serial = Serial(transport, sandbox_id)
        """Of a full VM: its serial console."""
        self.clipboard = Clipboard(self.commands)
        """Of a full VM with a desktop and our agent: what was copied."""
        self.ports = Ports(transport, sandbox_id)
        """Connections to ports inside."""

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

    async def pack_diff(
        self,
        name: str,
        *,
        role: LayerRole | str = LayerRole.WORKSPACE,
        alone: bool = False,
        scrub: Sequence[str] = (),
        keep: Sequence[str] = (),
        defaults: bool = True,
        replace: bool = False,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        on_progress: OnPack | None = None,
    ) -> PackedImage:
        """Make an image of what the sandbox has written, on top of what it was started from, and return its reference.

        The sandbox, running or paused, stands still while its files are read and goes on afterwards. The reference
        names exact content (`name@sha256:…`) and starts any number of sandboxes on any node of the platform; its
        `details` say what was packed. When nothing has changed, no image is made: it is the source image's reference.

        `role`: of the new layer: `base`, `workspace`, `toolkit`.
        `alone`: the image holds the new layer only, to be laid over others as a workspace or toolkit.
        `scrub`, `keep`: patterns of paths to leave out beyond the defaults, and of paths that stay whatever they match.
        `defaults=False`: nothing is left out but what `scrub` says and the platform's own files.
        `replace`: let the name mean the new image when it means another.
        `timeout`: seconds; None: as long as it takes. The pack itself goes on after that, and when the calling task is
        cancelled; the same call with the same `idempotency_key` finds it again.
        `on_progress`: called about once a second with phase, bytes done and bytes in all.

        Raises ForbiddenError (the key may not build), InvalidSpecError naming the field, ConflictError (the name is
        taken), SandboxExitedError (it ended meanwhile; nothing was published), DiskFullError, ImageInvalidError naming
        the entry that cannot be packed, UnsupportedError, TransportError.
        """
        check_seconds(timeout, "timeout")
        request = PackRequest(
            name=name,
            role=_role(role),
            alone=alone,
            scrub=tuple(scrub),
            keep=tuple(keep),
            defaults=defaults,
            replace=replace,
        )
        result = await packed(
            self._transport,
            self._target("pack"),
            request,
            key=_own_key() if idempotency_key is None else idempotency_key,
            deadline=None if timeout is None else self._transport.deadline(timeout),
            on_progress=on_progress,
        )
        return PackedImage(result)

    async def snapshot(
        self,
        name: str,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        on_progress: OnSnapshot | None = None,
    ) -> SnapshotSummary:
        """Save the sandbox whole, memory and disk, under a name of your project; it goes on afterwards.

        Any number of sandboxes start from it (`snapshot=` of the run arguments) and go on where this one was, programs
        included: on nodes with the same VMM, version, accelerator and processor model.

        `timeout`: seconds; None: as long as it takes. The snapshot itself goes on after that, and when the calling task
        is cancelled; the same call with the same `idempotency_key` finds it again.
        `on_progress`: called about once a second with phase, bytes done and bytes in all.

        Raises ForbiddenError (the key may not build), InvalidSpecError, ConflictError (the name is taken),
        UnsupportedError (the backend has no snapshots), SandboxExitedError, DiskFullError, TransportError.
        """
        check_seconds(timeout, "timeout")
        result = await snapshot_saved(
            self._transport,
            self._target("snapshot"),
            SnapshotRequest(name=check_snapshot_name(name)),
            key=_own_key() if idempotency_key is None else idempotency_key,
            deadline=None if timeout is None else self._transport.deadline(timeout),
            on_progress=on_progress,
        )
        return result.snapshot

    async def fork(
        self,
        count: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        lifetime: Lifetime | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> list[Sandbox]:
        """Start `count` sandboxes on the same node that go on from the present state of this one, programs included;
        this one goes on, too. All of them or none: when one fails, the others are stopped.

        `labels`, `lifetime`: of the new ones; None: this one's.
        `timeout`: seconds for all of it; None: 10 minutes. Calls with one `idempotency_key` name the same sandboxes.
        When the calling task is cancelled, or it does not get there in time, those that were started are stopped,
        unless the key is yours.

        Raises UnsupportedError (the backend has no snapshots), InvalidSpecError, SandboxExitedError, CapacityError,
        DiskFullError, DeadlineError, TransportError.
        """
        check_seconds(timeout, "timeout")
        must(is_number(count, int), "count", "a whole number")
        must(labels is None or is_named(labels, str), "labels", "a dict of strings")
        must(lifetime is None or isinstance(lifetime, Lifetime), "lifetime", "a Lifetime")
        if not 1 <= count <= MAX_FORKS:
            raise InvalidSpecError(f"count: {count} is not between 1 and {MAX_FORKS}", detail={"field": "count"})
        request = ForkRequest(count=count, labels=None if labels is None else dict(labels), lifetime=lifetime)
        key = _own_key() if idempotency_key is None else idempotency_key
        deadline = self._transport.deadline(FORK_TIMEOUT_S if timeout is None else timeout)
        try:
            found = await forked(self._transport, self._target("fork"), request, key=key, deadline=deadline)
        except (async_interruption(), DeadlineError, TransportError):  # some may have been started
            if idempotency_key is None:
                await self._take_back(request, key)
            raise
        made = [
            Sandbox(self._transport, one.sandbox_id)
            for _, one in sorted(found.items())
            if not isinstance(one, OpenDSecError)
        ]
        for error in found.values():
            if isinstance(error, OpenDSecError):
                for sandbox in made if idempotency_key is None else ():
                    await sandbox.stop()
                raise error
        return made

    async def _take_back(self, request: ForkRequest, key: str) -> None:
        """Whoever asked has gone: the platform ends what it started under this key, and starts nothing more."""
        async with async_last_words(STOP_TIMEOUT_S):
            try:
                deadline = self._transport.deadline(STOP_TIMEOUT_S)
                abandon = replace(request, abandon=True)
                await forked(self._transport, self._target("fork"), abandon, key=key, deadline=deadline)
            except OpenDSecError:  # the platform is away: their idle time ends them
                return

    async def stop(self, *, timeout: float | None = None) -> SandboxStatus:
        """End the sandbox and everything in it; all its files are gone. May be repeated, in every state."""
        check_seconds(timeout, "timeout")
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


def _own_key() -> str:
    return f"{OWN_KEY_PREFIX}{secrets.token_hex(16)}"


def _role(text: LayerRole | str) -> LayerRole:
    try:
        return LayerRole(FileRole(text))
    except ValueError:
        known = ", ".join(FileRole)
        raise InvalidSpecError(f"role: {text[:40]!r} is not of {known}", detail={"field": "role"}) from None
