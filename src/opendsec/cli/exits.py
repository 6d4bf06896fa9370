"""Exit statuses, in one place.

The command's own status comes first. What the platform adds, as shells and timeout(1) have it: 124 the command ran into
its timeout, 125 the platform failed or refused (nothing is known of the command, or it was not started: so also for a
sandbox or snapshot that does not exist), 126 it could not be executed, 127 it was not found, 130 interrupted, 141
nobody reads the output any more, 143 terminated. A file that does not exist is 1, usage errors are 2.
"""

from __future__ import annotations

from opendsec import ShellResult
from opendsec.errors import ExecError, FileError, NoShellError, OpenDSecError
from opendsec.model.command import CommandResult, EndReason
from opendsec.model.fncall import CallStatus, FnCallResult

TIMEOUT = 124
PLATFORM = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143


def of_result(result: CommandResult | ShellResult) -> int:
    """The status for a command that has ended."""
    if result.end_reason is EndReason.TIMEOUT:
        return TIMEOUT
    if result.exit_code is None:
        return PLATFORM
    return result.exit_code


def of_call(result: FnCallResult) -> int:
    """The status for a call: its program's own, 128 and the signal that ended it, 124 for its time limit."""
    run = result.compile if result.run is None else result.run
    if result.status is CallStatus.OK:
        return 0
    if run is not None and run.status is CallStatus.TIME_LIMIT:
        return TIMEOUT
    if run is None or (run.exit_code is None and not run.signal):
        return 1
    return run.exit_code if run.exit_code is not None else 128 + run.signal


def sentence_of_call(result: FnCallResult) -> str:
    """What a user should know beyond the status; "" when it says everything."""
    return {
        CallStatus.COMPILE_ERROR: "the program does not compile",
        CallStatus.TIME_LIMIT: "the program ran into its time limit",
        CallStatus.MEMORY_LIMIT: "the program was killed: its memory limit is reached",
        CallStatus.OUTPUT_LIMIT: "the program was ended: it wrote more than its output limit",
    }.get(result.status, "")


def of_error(error: OpenDSecError) -> int:
    """The status for an error of ours."""
    if isinstance(error, FileError):
        return 1
    if isinstance(error, NoShellError):
        return NOT_FOUND
    if isinstance(error, ExecError):
        missing = error.detail.get("errno") == "ENOENT" and error.detail.get("guest_code") == "exec"
        return NOT_FOUND if missing else NOT_EXECUTABLE
    return PLATFORM


def sentence(result: CommandResult | ShellResult) -> str:
    """What a user should know beyond the status; "" when it says everything."""
    extra = {
        EndReason.TIMEOUT: f"ended after its timeout ({result.duration_s:.1f} s)",
        EndReason.CANCELLED: "was ended by request",
        EndReason.OOM: "was killed: the sandbox's memory limit is reached",
        EndReason.PIDS_LIMIT: "failed: the sandbox's process limit is reached",
        EndReason.DISK_FULL: "failed: the sandbox's disk is full",
        EndReason.SESSION_ENDED: "ended its session's shell",
        EndReason.SANDBOX_ENDED: "was ended with its sandbox",
        EndReason.LOST: "was lost: how it ended is not known",
    }.get(result.end_reason, "")
    kept = "its output is longer than what was kept" if result.truncated else ""
    return "; ".join(part for part in (extra and f"the command {extra}", kept) if part)
