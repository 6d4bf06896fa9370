"""The verdict: nothing but the expected picture passes."""

from __future__ import annotations

import pytest

from opendsec.demo.rounds import Attempt, Report, SuiteRun, verdict


def suite(exit_code: int | None, *, tests: int = 160, reason: str = "exited") -> SuiteRun:
    return SuiteRun(exit_code=exit_code, end_reason=reason, tests=tests, seconds=1.0, tail="")


def attempt(*, patched: bool, before: SuiteRun | None, after: SuiteRun | None, error: str = "") -> Attempt:
    return Attempt(
        index=0, sandbox_id="sbx-local-x", patched=patched, create_s=0.1, before=before, after=after, error=error
    )


def test_the_expected_picture_has_no_complaints() -> None:
    report = Report(
        attempts=[
            attempt(patched=False, before=suite(0), after=suite(0)),
            attempt(patched=True, before=suite(0), after=suite(1)),
        ]
    )
    assert verdict(report, 2) == []


@pytest.mark.parametrize(
    "wrong",
    [
        attempt(patched=True, before=suite(0), after=suite(0)),
        attempt(patched=False, before=suite(0), after=suite(1)),
        attempt(patched=True, before=suite(1), after=suite(1)),
        attempt(patched=True, before=suite(0), after=suite(1, tests=0)),
        attempt(patched=False, before=suite(0, tests=0), after=suite(0)),
        attempt(patched=True, before=suite(0), after=suite(None, reason="lost")),
        attempt(patched=True, before=suite(0), after=None),
        attempt(patched=True, before=suite(0), after=suite(1), error="lost"),
    ],
)
def test_anything_else_is_named(wrong: Attempt) -> None:
    assert len(verdict(Report(attempts=[wrong]), 1)) == 1


def test_missing_and_left_over_sandboxes_are_named() -> None:
    good = attempt(patched=False, before=suite(0), after=suite(0))
    assert len(verdict(Report(attempts=[good]), 2)) == 1
    assert len(verdict(Report(attempts=[good], left_over=["sbx-local-x"]), 1)) == 1
    assert len(verdict(Report(attempts=[good], not_started=["no room"]), 2)) == 1
