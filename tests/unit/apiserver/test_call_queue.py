"""Every call of a batch ends once, whatever edges take, refuse, lose and become."""

from __future__ import annotations

import random

import pytest

from opendsec import errors
from opendsec.apiserver.call_queue import MAX_CHUNK, MAX_LOST, CallQueue

FULL = errors.CapacityError("full")
GONE = errors.ConnectError("gone")


def queue(count: int, *edges: str, lanes: int = 2, size: int = 10, pinned: dict[int, str] | None = None) -> CallQueue:
    return CallQueue([size] * count, edges, lanes=lanes, pinned=pinned or {})


def test_shares_are_bounded_and_shrink_towards_the_end() -> None:
    calls = queue(1000, "a", "b")
    sizes = []
    while taken := calls.take("a"):
        sizes.append(len(taken))
    assert sum(sizes) == 1000
    assert sizes[0] == MAX_CHUNK
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_bytes_bound_a_share_too_but_never_to_nothing() -> None:
    calls = queue(10, "a", lanes=1, size=3 * 1024 * 1024)
    assert [len(calls.take("a")) for _ in range(10)] == [1] * 10


def test_what_is_given_back_comes_first_and_in_order() -> None:
    calls = queue(6, "a", lanes=1)
    first = calls.take("a")
    assert calls.answered(first[0])
    assert calls.give_back(first, sent=True) == []
    assert calls.take("b") == first[1:]


def test_a_call_that_edges_do_not_survive_is_given_up() -> None:
    calls = queue(1, "a", "b")
    for lost in range(1, MAX_LOST + 1):
        assert calls.take("a") == [0]
        assert calls.give_back([0], sent=True) == ([0] if lost == MAX_LOST else [])
    assert calls.take("a") == []
    waiting = queue(1, "a")
    for _ in range(20):
        assert waiting.give_back(waiting.take("a"), sent=False) == []


def test_refused_by_all_is_told_and_by_one_is_kept_for_the_other() -> None:
    calls = queue(1, "a", "b")
    calls.take("a")
    assert calls.refused(0, "a", FULL) is None
    assert calls.take("a") == []
    assert calls.take("b") == [0]
    told = calls.refused(0, "b", FULL)
    assert isinstance(told, errors.UnschedulableError)
    assert set(told.detail["reasons"]) == {"a", "b"}  # type: ignore[call-overload]


def test_an_edge_that_is_gone_ends_what_only_it_could_do() -> None:
    calls = queue(4, "a", "b", pinned={0: "a", 1: "b"})
    assert calls.take("a") == [0]
    calls.give_back([0], sent=False)
    assert calls.take("b") == [1]
    assert calls.refused(1, "b", FULL) is FULL
    taken = calls.take("b")
    assert calls.refused(taken[0], "b", FULL) is None
    ended = dict(calls.edge_gone("a", GONE))
    assert set(ended) == {0, taken[0]}
    assert ended[0] is GONE
    rest = dict(calls.edge_gone("b", GONE))
    assert set(rest) == {2, 3} - {taken[0]}


@pytest.mark.parametrize("seed", range(50))
def test_every_index_ends_exactly_once(seed: int) -> None:
    chance = random.Random(seed)
    edges = ["a", "b", "c"]
    pinned = {index: chance.choice(edges) for index in range(200) if chance.random() < 0.1}
    calls = CallQueue([chance.randrange(1, 10**6) for _ in range(200)], edges, lanes=6, pinned=pinned)
    alive, ended = list(edges), []
    while calls.open:
        if not alive:
            break
        edge = chance.choice(alive)
        taken = calls.take(edge)
        what = chance.random()
        for index in taken:
            assert pinned.get(index, edge) == edge
            if what < 0.1:
                continue
            if what < 0.2:
                if calls.refused(index, edge, FULL) is not None and calls.answered(index):
                    ended.append(index)
            elif calls.answered(index):
                ended.append(index)
        ended += [index for index in calls.give_back(taken if what < 0.1 else [], sent=True) if calls.answered(index)]
        if chance.random() < 0.01 or not taken:
            alive.remove(edge)
            ended += [index for index, _ in calls.edge_gone(edge, GONE) if calls.answered(index)]
    assert sorted(ended) == list(range(200))
