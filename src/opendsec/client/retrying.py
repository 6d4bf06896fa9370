"""When to ask again, and after how long: pure decisions, no clock and no I/O.

A request is repeated only when that is provably harmless: nothing was sent, or the request is idempotent (by its
verb, its
offset, or a key that makes the server run it once). The server's own refusals are never repeated: they are answers.
"""

from __future__ import annotations

import random

from opendsec.errors import (
    BackendUnavailableError,
    ConnectError,
    DeadlineError,
    OpenDSecError,
    SandboxLostError,
    TransportError,
)

FIRST_DELAY_S = 0.05
LARGEST_DELAY_S = 2.0
STRANGER_PATIENCE_S = 1.0
"""How long to knock at a door that has never opened: a wrong address should fail at once."""
KNOWN_PATIENCE_S = 60.0
"""How long to wait for a server that has answered before: longer than a restart takes."""


def delay_s(attempt: int, rng: random.Random) -> float:
    """Seconds before repeat number `attempt` (from 0): exponential with full jitter, never less than a tenth of the
    step."""
    step = min(LARGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt, 10))
    return step * (0.1 + 0.9 * rng.random())


def may_repeat(error: OpenDSecError, *, idempotent: bool) -> bool:
    """Whether the same request may be sent again after this error."""
    if isinstance(error, DeadlineError) or not error.retryable:
        return False
    if isinstance(error, ConnectError):
        return True
    return idempotent and isinstance(error, TransportError | BackendUnavailableError | SandboxLostError)
