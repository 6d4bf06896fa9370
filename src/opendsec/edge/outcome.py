"""How a command ended, derived from what the guest said and what the sandbox's counters did meanwhile. Pure."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from types import MappingProxyType

from opendsec import errors
from opendsec.backends.base import Usage
from opendsec.guest.base import Exit, GuestError
from opendsec.model.command import CommandResult, EndReason
from opendsec.model.ids import CommandId

SIGKILL = 9
REASON_TIMEOUT, REASON_KILLED, REASON_SESSION_ENDED = 1, 2, 3

_REFUSALS = MappingProxyType(
    {
        "no_shell": errors.NoShellError,
        "exec": errors.ExecError,
        "no_user": errors.ExecError,
        "bad_cwd": errors.ExecError,
        "unsupported": errors.UnsupportedError,
        "limit": errors.CapacityError,
        "session_busy": errors.ConflictError,
        "no_command": errors.NotFoundError,
        "gap": errors.ConflictError,
    }
)
_ENDS_AT_START = MappingProxyType({"pids_limit": EndReason.PIDS_LIMIT, "no_memory": EndReason.OOM})


@dataclass(frozen=True, slots=True)
class Counters:
    """What was already known of a sandbox's counters."""

    oom_kills: int = 0
    pids_denied: int = 0

    def advanced(self, usage: Usage) -> Counters:
        """The counters after another look; unknown ones stay."""
        return Counters(
            max(self.oom_kills, usage.oom_kills or 0),
            max(self.pids_denied, usage.pids_denied or 0),
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorder has of both streams."""

    stdout_total: int
    stderr_total: int
    stdout_kept: int
    stderr_kept: int


def refusal(exc: GuestError) -> errors.OpenDSecError:
    """The guest's refusal to start (or to touch) a command as an error of ours."""
    cls = _REFUSALS.get(exc.code, errors.CommandError)
    detail = {"guest_code": exc.code}
    if exc.errno:
        detail["errno"] = errno.errorcode.get(exc.errno, str(exc.errno))
    return cls(str(exc) or exc.code, detail=detail)


def end_at_start(exc: GuestError) -> EndReason | None:
    """A start that failed for want of pids or memory is an outcome of the command, not an error of the request."""
    return _ENDS_AT_START.get(exc.code)


def has_failed(exit_: Exit) -> bool:
    """Worth a look at the counters: it ended by itself, and not well."""
    return exit_.exit_code != 0 and exit_.reason in (0, REASON_SESSION_ENDED)


def end_reason(exit_: Exit, before: Counters, usage: Usage | None) -> EndReason:
    """Why it ended. `usage`: counters after it ended, None when nobody looked."""
    if exit_.reason == REASON_TIMEOUT:
        return EndReason.TIMEOUT
    if exit_.reason == REASON_KILLED:
        return EndReason.CANCELLED
    if exit_.reason == REASON_SESSION_ENDED:
        killed = usage is not None and exit_.signal == SIGKILL and (usage.oom_kills or 0) > before.oom_kills
        return EndReason.OOM if killed else EndReason.SESSION_ENDED
    if usage is not None and has_failed(exit_):
        if (usage.oom_kills or 0) > before.oom_kills:
            return EndReason.OOM
        if (usage.pids_denied or 0) > before.pids_denied:
            return EndReason.PIDS_LIMIT
        if usage.disk_full:
            return EndReason.DISK_FULL
    return EndReason.EXITED if exit_.exit_code is not None else EndReason.SIGNALED


def conclude(command_id: CommandId, exit_: Exit, recorded: Recorded, reason: EndReason) -> CommandResult:
    """The result of a command whose end was seen."""
    stdout_total = max(exit_.stdout_total, recorded.stdout_total)
    stderr_total = max(exit_.stderr_total, recorded.stderr_total)
    code = exit_.exit_code
    if code is None and exit_.signal:
        code = 128 + exit_.signal
    return CommandResult(
        command_id=command_id,
        exit_code=code,
        end_reason=reason,
        signal=exit_.signal or None,
        duration_s=exit_.duration_ns / 1e9,
        stdout_bytes_total=stdout_total,
        stderr_bytes_total=stderr_total,
        truncated=recorded.stdout_kept < stdout_total or recorded.stderr_kept < stderr_total,
        cpu_user_s=exit_.user_us / 1e6,
        cpu_system_s=exit_.system_us / 1e6,
        max_rss_kb=exit_.max_rss_kb,
        session_started=exit_.session_started,
    )


def conclude_unseen(command_id: CommandId, recorded: Recorded, reason: EndReason, duration_s: float) -> CommandResult:
    """The result of a command whose end nobody saw: the exit code is unknown."""
    return CommandResult(
        command_id=command_id,
        exit_code=None,
        end_reason=reason,
        duration_s=duration_s,
        stdout_bytes_total=recorded.stdout_total,
        stderr_bytes_total=recorded.stderr_total,
        truncated=recorded.stdout_kept < recorded.stdout_total or recorded.stderr_kept < recorded.stderr_total,
    )
