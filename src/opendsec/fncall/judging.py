"""From what a program did to a verdict. Pure.

An answer is right when it equals the expected one after trailing blanks of every line and trailing empty lines are
taken off both, as most judges do; everything else counts, also case, blanks within a line, and the number of lines.
A limit that was reached or an end with an error is the verdict whatever was printed.
"""

from __future__ import annotations

from opendsec.model.fncall import CallStatus, RunOutcome, Verdict

_BLANKS = b" \t\r\f\v"
_OF_STATUS = {
    CallStatus.COMPILE_ERROR: Verdict.CE,
    CallStatus.RUNTIME_ERROR: Verdict.RE,
    CallStatus.TIME_LIMIT: Verdict.TLE,
    CallStatus.MEMORY_LIMIT: Verdict.MLE,
    CallStatus.OUTPUT_LIMIT: Verdict.OLE,
}


def verdict_of(run: RunOutcome, expected: bytes) -> Verdict:
    """Of one case."""
    if run.status is not CallStatus.OK:
        return _OF_STATUS[run.status]
    return Verdict.AC if is_same_answer(run.stdout, expected) else Verdict.WA


def is_same_answer(found: bytes, expected: bytes) -> bool:
    """Whether they differ in nothing but trailing blanks and trailing empty lines."""
    return found == expected or _lines(found) == _lines(expected)


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip(_BLANKS) for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
