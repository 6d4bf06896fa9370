"""When an answer is right, and what verdict an end is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.fncall.judging import is_same_answer, verdict_of
from opendsec.model.fncall import CallStatus, RunOutcome, Verdict


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (b"6\n", b"6", True),
        (b"6", b"6\n\n\n", True),
        (b"6 \t\r\n", b"6\n", True),
        (b"1 2\n3\n", b"1 2  \n3", True),
        (b"", b"\n \n", True),
        (b" 6", b"6", False),
        (b"1  2", b"1 2", False),
        (b"1\n\n2", b"1\n2", False),
        (b"\n6", b"6", False),
        (b"Yes", b"yes", False),
        (b"6\x00", b"6", False),
        (b"\xff\xfe\n", b"\xff\xfe", True),
        (b"6.0", b"6", False),
    ],
)
def test_what_is_the_same(found: bytes, expected: bytes, same: bool) -> None:
    assert is_same_answer(found, expected) is same
    assert is_same_answer(expected, found) is same


@given(st.binary(max_size=50))
def test_an_answer_equals_itself_with_blanks_after_it(text: bytes) -> None:
    assert is_same_answer(text, text + b" \n\t\n")


@given(st.binary(max_size=50))
def test_an_answer_with_something_more_is_another(text: bytes) -> None:
    assert not is_same_answer(text + b"x", text)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (CallStatus.OK, Verdict.AC),
        (CallStatus.RUNTIME_ERROR, Verdict.RE),
        (CallStatus.TIME_LIMIT, Verdict.TLE),
        (CallStatus.MEMORY_LIMIT, Verdict.MLE),
        (CallStatus.OUTPUT_LIMIT, Verdict.OLE),
        (CallStatus.COMPILE_ERROR, Verdict.CE),
    ],
)
def test_the_right_output_does_not_excuse_the_end(status: CallStatus, verdict: Verdict) -> None:
    assert verdict_of(RunOutcome(status=status, stdout=b"6\n"), b"6") is verdict


def test_every_status_has_a_verdict() -> None:
    for status in CallStatus:
        assert verdict_of(RunOutcome(status=status), b"x") in Verdict
