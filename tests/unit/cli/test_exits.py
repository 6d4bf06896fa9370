"""One table of exit statuses."""

from __future__ import annotations

import pytest

from opendsec import errors
from opendsec.cli import exits
from opendsec.model.command import CommandResult, EndReason
from opendsec.model.ids import CommandId


def result(exit_code: int | None, reason: EndReason = EndReason.EXITED, *, truncated: bool = False) -> CommandResult:
    return CommandResult(
        command_id=CommandId("cmd-1"),
        exit_code=exit_code,
        end_reason=reason,
        duration_s=1.5,
        stdout_bytes_total=0,
        stderr_bytes_total=0,
        truncated=truncated,
    )


@pytest.mark.parametrize(
    ("exit_code", "reason", "status"),
    [
        (0, EndReason.EXITED, 0),
        (7, EndReason.EXITED, 7),
        (137, EndReason.SIGNALED, 137),
        (137, EndReason.OOM, 137),
        (143, EndReason.TIMEOUT, 124),
        (None, EndReason.LOST, 125),
        (None, EndReason.SANDBOX_ENDED, 125),
    ],
)
def test_status_of_a_result(exit_code: int | None, reason: EndReason, status: int) -> None:
    assert exits.of_result(result(exit_code, reason)) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ExecError("x", detail={"errno": "ENOENT", "guest_code": "exec"}), 127),
        (errors.ExecError("x", detail={"errno": "EACCES", "guest_code": "exec"}), 126),
        (errors.ExecError("x", detail={"errno": "ENOENT", "guest_code": "bad_cwd"}), 126),
        (errors.NoShellError("x"), 127),
        (errors.FileError("x"), 1),
        (errors.NotFoundError("x"), 125),
        (errors.ImageNotFoundError("x"), 125),
        (errors.ConnectError("x"), 125),
    ],
)
def test_status_of_an_error(error: errors.OpenDSecError, status: int) -> None:
    assert exits.of_error(error) == status


def test_a_plain_end_needs_no_words() -> None:
    assert exits.sentence(result(3)) == ""


def test_every_special_end_is_put_into_words() -> None:
    plain = {EndReason.EXITED, EndReason.SIGNALED}
    assert all(exits.sentence(result(1, reason)) for reason in EndReason if reason not in plain)


def test_truncated_output_is_said() -> None:
    assert "longer" in exits.sentence(result(0, truncated=True))
