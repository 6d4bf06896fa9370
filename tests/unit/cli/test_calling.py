"""Cases from a directory, and the exit status of a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from opendsec.cli import calling, exits
from opendsec.model.fncall import CallStatus, FnCallResult, RunOutcome


def test_cases_are_pairs_of_files(tmp_path: Path) -> None:
    for name in ("b.in", "a.in", "a.out", "b.ans", "other"):
        (tmp_path / name).write_text(name)
    found = calling.read_cases(tmp_path)
    assert [(case.name, case.stdin, case.expected) for case in found] == [
        ("a", b"a.in", b"a.out"),
        ("b", b"b.in", b"b.ans"),
    ]
    (tmp_path / "c.in").write_text("")
    with pytest.raises(typer.BadParameter, match=r"c\.out or c\.ans"):
        calling.read_cases(tmp_path)


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(typer.BadParameter):
            calling.read_cases(wrong)
    (tmp_path / "binary.py").write_bytes(b"\xff")
    for program in (tmp_path / "missing.py", tmp_path / "binary.py"):
        with pytest.raises(typer.BadParameter):
            calling.code_of(program)
    with pytest.raises(typer.BadParameter):
        calling.files_of([tmp_path / "nothing"])
    with pytest.raises(typer.BadParameter):
        calling.language_of(tmp_path / "no-ending")


@pytest.mark.parametrize(
    ("status", "exit_code", "signal", "left"),
    [
        (CallStatus.OK, 0, 0, 0),
        (CallStatus.RUNTIME_ERROR, 7, 0, 7),
        (CallStatus.RUNTIME_ERROR, None, 11, 139),
        (CallStatus.TIME_LIMIT, None, 9, 124),
        (CallStatus.MEMORY_LIMIT, None, 9, 137),
        (CallStatus.OUTPUT_LIMIT, None, 0, 1),
    ],
)
def test_the_exit_status_of_a_call(status: CallStatus, exit_code: int | None, signal: int, left: int) -> None:
    run = RunOutcome(status=status, exit_code=exit_code, signal=signal)
    assert exits.of_call(FnCallResult(status=status, run=run)) == left


def test_a_compiler_that_runs_out_of_time_is_told_as_such() -> None:
    compiled = RunOutcome(status=CallStatus.TIME_LIMIT, signal=9)
    result = FnCallResult(status=CallStatus.COMPILE_ERROR, compile=compiled)
    assert exits.of_call(result) == 124
    assert "compile" in exits.sentence_of_call(result)
