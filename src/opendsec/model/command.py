"""Commands: what is asked, what came out, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opendsec.errors import InvalidSpecError
from opendsec.model.ids import CommandId
from opendsec.model.spec import MAX_ENV_STRING, check_env, check_name, check_path, check_seconds, encode_text

MAX_COMMAND_BYTES = 3 * 1024 * 1024
"""Largest script or argument vector.

Above 120 KiB a script travels through a memfd (the kernel's limit for one argument is 128 KiB).
"""
DEFAULT_OUTPUT_BYTES = 64 * 1024 * 1024
"""Recorded bytes per command and stream kept on the host unless asked otherwise; what is over is counted, not kept."""
MAX_OUTPUT_BYTES = 1024 * 1024 * 1024


class EndReason(StrEnum):
    """Why a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    OOM = "oom"
    PIDS_LIMIT = "pids_limit"
    DISK_FULL = "disk_full"
    SESSION_ENDED = "session_ended"
    """The session's shell ended under it (`exit`, `exec`, or it was killed)."""
    SANDBOX_ENDED = "sandbox_ended"
    """The sandbox stopped, expired or failed first; exit_code is None."""
    LOST = "lost"
    """Not knowable; exit_code is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PtySize:
    """Terminal size in character cells."""

    rows: int = 24
    cols: int = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecRequest:
    """One command. Exactly one of `script` (run by the image's bash or sh) and `argv` (run as it is) is given."""

    script: str | None = None
    argv: tuple[str, ...] = ()
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    timeout_s: float | None = None
    """The command's own limit, enforced inside the sandbox; None = unlimited."""
    grace_s: float = 2.0
    """Between SIGTERM and SIGKILL at timeout and cancel."""
    stdin: bool = False
    """False: stdin is at EOF from the start."""
    pty: PtySize | None = None
    session: str | None = None
    """Name of a stateful shell; only with `script`, without `pty`, `stdin` and `user`."""
    operation_id: str | None = None
    """Repeats with the same id return the recorded outcome; the same id with another request is a ConflictError."""
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. Output travels beside it."""

    command_id: CommandId
    exit_code: int | None
    """0-255; 128+n for signal n, as a shell says it; None when unknown."""
    end_reason: EndReason
    signal: int | None = None
    duration_s: float
    stdout_bytes_total: int
    """Bytes written by the command, kept or not."""
    stderr_bytes_total: int
    truncated: bool
    """True when less was kept than was written."""
    cpu_user_s: float = 0.0
    cpu_system_s: float = 0.0
    max_rss_kb: int = 0
    session_started: bool = False
    """This command was the first of a new shell of this session name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStatus:
    """One entry of a command list."""

    command_id: CommandId
    summary: str
    """First 200 characters of the script or argv."""
    started_at: float
    """Unix time, seconds."""
    running: bool
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    session: str | None = None
    operation_id: str | None = None
    pty: bool = False
    result: CommandResult | None = None


def _bad(field_name: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"{field_name}: {why}", detail={"field": field_name})


def _check_program(request: ExecRequest) -> None:
    if (request.script is None) == (not request.argv):
        raise _bad("script", "give exactly one of script and argv")
    field_name, parts = ("script", (request.script,)) if request.script is not None else ("argv", request.argv)
    sizes = [len(encode_text(part, field_name)) for part in parts]
    if any("\x00" in part for part in parts):
        raise _bad(field_name, "holds a NUL")
    if sum(sizes) > MAX_COMMAND_BYTES:
        raise _bad(field_name, f"is larger than {MAX_COMMAND_BYTES} bytes")
    if request.argv and max(sizes) > MAX_ENV_STRING:
        raise _bad("argv", "one argument is longer than the kernel's 131071 bytes; use script or a file")


def check_exec(request: ExecRequest) -> ExecRequest:
    """The request itself if every field is good. Raises InvalidSpecError naming the field."""
    _check_program(request)
    check_env(request.env)
    check_seconds(request.timeout_s, "timeout")
    if request.cwd is not None:
        check_path(request.cwd, "cwd")
    if not 0 <= request.grace_s <= 3600:
        raise _bad("grace_s", "is not between 0 and 3600 seconds")
    if request.user is not None:
        check_name(request.user, "user", most=256)
    if request.operation_id is not None:
        check_name(request.operation_id, "operation_id", most=255)
    if not 0 <= request.max_output_bytes <= MAX_OUTPUT_BYTES:
        raise _bad("max_output_bytes", f"is not between 0 and {MAX_OUTPUT_BYTES}")
    if request.pty is not None and not (0 < request.pty.rows <= 65535 and 0 < request.pty.cols <= 65535):
        raise _bad("pty", "rows and cols are between 1 and 65535")
    if request.session is not None:
        check_name(request.session, "session", most=128)
        if request.argv or request.pty or request.stdin or request.user:
            raise _bad("session", "takes a script, and no pty, stdin or user")
    return request
