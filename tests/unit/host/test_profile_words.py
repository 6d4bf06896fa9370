"""A profile is only said to be there when one was recorded."""

from __future__ import annotations

import pytest

from opendsec.host.image_loading import NOTHING_READ, not_recorded


@pytest.mark.parametrize(
    ("status", "chunks", "problem"),
    [
        (0, 7, ""),
        (0, 0, NOTHING_READ),
        (3, 7, "the command ended with status 3; nothing was recorded"),
        (-1, 0, "the command ended with status -1; nothing was recorded"),
    ],
)
def test_nothing_read_is_nothing_recorded(status: int, chunks: int, problem: str) -> None:
    assert not_recorded(status, chunks) == problem
