"""Which image layers share one layer of the store."""

from __future__ import annotations

import random

from opendsec.model.image import LayerRole
from opendsec.store.importers.grouping import known_groups

BASE, WORKSPACE = LayerRole.BASE, LayerRole.WORKSPACE


def groups(*sizes: int | None, limit: int = 10, roles: tuple[LayerRole, ...] = ()) -> list[list[int]]:
    found = known_groups(sizes, roles or (BASE,) * len(sizes), limit_bytes=limit)
    return [list(group) for group in found]


def test_small_ones_come_together_until_they_are_enough() -> None:
    assert groups(1, 2, 3, 4, 5, 6) == [[0, 1, 2, 3], [4, 5]]
    assert groups(100, 1, 100, 100) == [[0], [1, 2], [3]]
    assert groups() == []


def test_no_limit_keeps_all_apart_and_a_large_one_none() -> None:
    assert groups(1, 0, 3, limit=0) == [[0], [1], [2]]
    assert groups(1, 0, 3, limit=1 << 60) == [[0, 1, 2]]


def test_roles_are_never_mixed() -> None:
    assert groups(1, 1, 1, 1, roles=(BASE, BASE, WORKSPACE, BASE)) == [[0, 1], [2], [3]]


def test_what_is_not_known_ends_it() -> None:
    assert groups(10, None, 10) == [[0]]
    assert groups(1, None) == []


def test_a_group_depends_on_nothing_above_it() -> None:
    rng = random.Random(7)
    for _ in range(200):
        bottom = [rng.randrange(20) for _ in range(rng.randrange(1, 12))]
        above = [rng.randrange(20) for _ in range(5)]
        alone, taller = groups(*bottom), groups(*bottom, *above)
        assert alone[:-1] == taller[: len(alone) - 1]
        if sum(bottom[number] for number in alone[-1]) >= 10:
            assert alone[-1] == taller[len(alone) - 1]
