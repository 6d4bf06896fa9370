"""What a finished command gives back. A non-zero exit status is a result; `check` turns it into an error on request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from opendsec.errors import CommandFailedError, CommandLostError, CommandTimeoutError
from opendsec.model.command import CommandResult, EndReason

_TAIL = 2000
_HEAD = 120
"""So much of each stream is in a result's repr, in characters."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ShellResult:
    """How a command ended, and what it wrote."""

    command_id: str
    exit_code: int | None
    """0-255, 128+n for signal n; None when it is not known. Unknown is never 0."""
    end_reason: EndReason
    """Why it ended: `exited`, `signaled`, `timeout`, `oom`, …"""
    stdout_bytes: bytes
    """Exactly what was written, up to `max_output_bytes`."""
    stderr_bytes: bytes
    truncated: bool
    """True when the command wrote more than was kept."""
    duration_s: float
    session_started: bool = False
    """This command was the first of a new shell of its session."""
    details: CommandResult
    """Everything the platform says about the end: signal, CPU time, memory, totals."""

    @cached_property
    def stdout(self) -> str:
        """`stdout_bytes` as UTF-8; bytes that are none become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        """`stderr_bytes` as UTF-8; bytes that are none become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    def __repr__(self) -> str:
        parts = {
            "exit_code": repr(self.exit_code),
            "end_reason": repr(str(self.end_reason)),
            "stdout": _beginning(self.stdout_bytes),
            "stderr": _beginning(self.stderr_bytes),
            "truncated": repr(self.truncated),
            "duration_s": repr(self.duration_s),
            "command_id": repr(str(self.command_id)),
        }
        return f"ShellResult({', '.join(f'{name}={value}' for name, value in parts.items())})"

    @property
    def ok(self) -> bool:
        """True when the command is known to have exited with 0."""
        return self.exit_code == 0 and self.end_reason is EndReason.EXITED

    def check(self) -> ShellResult:
        """The result itself when `ok`. Raises CommandTimeoutError, CommandLostError or CommandFailedError."""
        if self.ok:
            return self
        detail = {
            "command_id": self.command_id,
            "exit_code": self.exit_code,
            "end_reason": str(self.end_reason),
            "stdout_tail": self.stdout[-_TAIL:],
            "stderr_tail": self.stderr[-_TAIL:],
        }
        if self.end_reason is EndReason.TIMEOUT:
            raise CommandTimeoutError(f"the command ran into its timeout after {self.duration_s:.1f} s", detail=detail)
        if self.exit_code is None:
            raise CommandLostError(f"how the command ended is not known: {self.end_reason}", detail=detail)
        last = self.stderr.strip().rpartition("\n")[2][:200]
        text = f"the command ended with exit code {self.exit_code} ({self.end_reason})"
        raise CommandFailedError(f"{text}: {last}" if last else text, detail=detail)


def _beginning(data: bytes) -> str:
    """Quoted, and what is left out is said."""
    text = data[: 4 * _HEAD].decode("utf-8", "replace")[:_HEAD]
    more = len(data) - len(text.encode())
    return repr(text) + (f" and {more} bytes more" if more > 0 else "")


def shell_result(result: CommandResult, stdout: bytes, stderr: bytes) -> ShellResult:
    """The platform's result and the collected bytes as one value."""
    return ShellResult(
        command_id=result.command_id,
        exit_code=result.exit_code,
        end_reason=result.end_reason,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        truncated=result.truncated,
        duration_s=result.duration_s,
        session_started=result.session_started,
        details=result,
    )
