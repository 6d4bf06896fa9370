"""Placement decides the same for the same view and seed, evens out, and says why nobody took it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opendsec import errors
from opendsec.apiserver.placement import EdgeView, may_try_elsewhere, order, refusal, split


def views_of(live: dict[str, int], *, closed: set[str] | None = None) -> list[EdgeView]:
    return [EdgeView(name=name, live=count, accepting=name not in (closed or set())) for name, count in live.items()]


def test_fewer_live_first_and_not_accepting_last() -> None:
    views = views_of({"a": 5, "b": 1, "c": 0, "d": 3}, closed={"c"})
    assert order(views, seed=1) == ("b", "d", "a", "c")


def test_ties_are_spread_by_the_seed_and_nothing_else() -> None:
    views = views_of(dict.fromkeys("abcdef", 0))
    assert {order(views, seed=seed)[0] for seed in range(100)} == set("abcdef")
    assert order(views, seed=7) == order(list(reversed(views)), seed=7)


@given(
    count=st.integers(1, 40_000),
    live=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 5000), min_size=1),
    closed=st.sets(st.sampled_from("abcdefgh")),
)
def test_a_split_is_whole_and_even(count: int, live: dict[str, int], closed: set[str]) -> None:
    shares = split(count, views_of(live, closed=closed))
    assert sum(shares.values()) == count
    assert all(share > 0 for share in shares.values())
    usable = {name for name in live if name not in closed} or set(live)
    assert set(shares) <= usable
    after = {name: live[name] + shares.get(name, 0) for name in usable}
    filled = [after[name] for name in shares]
    assert max(filled) - min(filled) <= 1
    assert all(after[name] >= max(filled) - 1 for name in usable)


def test_only_what_started_nothing_goes_to_the_next_edge() -> None:
    assert may_try_elsewhere(errors.CapacityError("full"))
    assert may_try_elsewhere(errors.ConnectError("away"))
    assert may_try_elsewhere(errors.ImageNotFoundError("not here"))
    for error in (errors.TransportError("?"), errors.StartError("x"), errors.InvalidSpecError("x")):
        assert not may_try_elsewhere(error)


def test_a_refusal_is_one_error_with_each_edge_s_reason() -> None:
    full = refusal({"b": errors.CapacityError("full"), "a": errors.ConnectError("away")})
    assert isinstance(full, errors.UnschedulableError)
    assert full.retryable
    assert full.detail["reasons"] == {"a": "away", "b": "full"}
    missing = errors.ImageNotFoundError("no image x")
    assert refusal({"a": missing, "b": errors.ImageNotFoundError("no image x")}) is missing
    assert isinstance(refusal({}), errors.UnschedulableError)
    never = errors.UnschedulableError("larger than the host", retryable=False)
    assert refusal({"a": never}) is never
    assert refusal({"a": never, "b": errors.UnschedulableError("full")}).retryable
