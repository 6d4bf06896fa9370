"""A result as a prompt or a log shows it."""

from __future__ import annotations

from opendsec.client.results import ShellResult, shell_result
from opendsec.model.command import CommandResult, EndReason
from opendsec.model.ids import CommandId


def result(stdout: bytes, stderr: bytes = b"") -> ShellResult:
    ended = CommandResult(
        command_id=CommandId("cmd-1"),
        exit_code=3,
        end_reason=EndReason.EXITED,
        duration_s=0.5,
        stdout_bytes_total=len(stdout),
        stderr_bytes_total=len(stderr),
        truncated=False,
    )
    return shell_result(ended, stdout, stderr)


def test_the_repr_shows_what_was_written() -> None:
    shown = repr(result(b"hi\n", b"oh \xff"))
    assert shown.startswith("ShellResult(exit_code=3, end_reason='exited', stdout='hi\\n', stderr='oh \ufffd',")
    assert "command_id='cmd-1'" in shown


def test_the_repr_of_much_is_short_and_says_how_much_is_left_out() -> None:
    shown = repr(result(b"x" * 1_000_000))
    assert "stdout='" + "x" * 120 + "' and 999880 bytes more" in shown
    assert len(shown) < 500
    assert "' and 880 bytes more" in repr(result(("\u00e4" * 560).encode()))
