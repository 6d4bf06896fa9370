"""Percentiles by nearest rank."""

from __future__ import annotations

import pytest

from opendsec.cli.figures import latency, percentile


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10), (0.01, 1)])
def test_nearest_rank(share: float, value: float) -> None:
    assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], share) == value


def test_a_row_is_in_milliseconds() -> None:
    assert latency("x", [0.002, 0.001]).cells() == ("x", "2", "1.0", "2.0", "2.0", "2.0")


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        latency("x", [])
