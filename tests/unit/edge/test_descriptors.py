"""How many sandboxes an edge takes follows from how many descriptors it has."""

from __future__ import annotations

import pytest

from opendsec.edge.__main__ import within_descriptors
from opendsec.edge.settings import read_settings


@pytest.mark.parametrize(
    ("descriptors", "asked", "most"),
    [(1_048_576, "3839", 3839), (20_000, "3839", 3839), (1024, "4096", 288), (64, "9", 1)],
)
def test_no_more_sandboxes_than_descriptors_allow(descriptors: int, asked: str, most: int) -> None:
    given = {"OPENDSEC_EDGE_MAX_LIVE": asked, "OPENDSEC_EDGE_BACKENDS": "container"}
    settings = within_descriptors(read_settings(given), descriptors)
    assert settings.node.limits.max_live == most
    assert within_descriptors(settings, 1_048_576) == settings
