"""When a request is repeated: only where that is provably harmless, and ever more slowly."""

from __future__ import annotations

import random

import pytest

from opendsec import errors
from opendsec.client.retrying import FIRST_DELAY_S, LARGEST_DELAY_S, delay_s, may_repeat


@pytest.mark.parametrize(
    ("error", "idempotent", "other"),
    [
        (errors.ConnectError("x"), True, True),
        (errors.ConnectError("x", retryable=False), False, False),
        (errors.TransportError("x"), True, False),
        (errors.BackendUnavailableError("x"), True, False),
        (errors.SandboxLostError("x"), False, False),
        (errors.SandboxLostError("its connection was cut", retryable=True), True, False),
        (errors.DeadlineError("x"), False, False),
        (errors.ProtocolError("x"), False, False),
        (errors.UnschedulableError("x"), False, False),
        (errors.StartError("x"), False, False),
        (errors.InvalidSpecError("x"), False, False),
        (errors.SandboxExitedError("x"), False, False),
    ],
)
def test_may_repeat(error: errors.OpenDSecError, *, idempotent: bool, other: bool) -> None:
    assert may_repeat(error, idempotent=True) is idempotent
    assert may_repeat(error, idempotent=False) is other


def test_delays_grow_within_bounds() -> None:
    rng = random.Random(1)
    for attempt in range(2000):
        step = min(LARGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 10))
        assert step / 10 <= delay_s(attempt, rng) <= step
    assert len({delay_s(3, rng) for _ in range(20)}) == 20
