"""Which edge gets a new sandbox: pure functions over what is known of the edges.

The edge has the last word (admission); a stale view costs a second try, never an overload. No clock, no randomness:
the seed is given.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opendsec import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeView:
    """One edge as last seen, with our own placements and calls since then added."""

    name: str
    live: int = 0
    accepting: bool = True
    calls: int = 0
    """FnCalls that ran or waited there, and those we have sent since: some of them are over, which spreads a burst of
    short ones instead of sending all to the edge that was emptiest."""
    takes_calls: bool = True
    gpu: bool = False


def order(views: Sequence[EdgeView], *, seed: int) -> tuple[str, ...]:
    """Every edge, best first: accepting before not, fewer live sandboxes before more, ties shuffled by `seed`."""
    shuffled = sorted(views, key=lambda view: view.name)
    random.Random(seed).shuffle(shuffled)  # noqa: S311 - spreading load, not guarding anything
    return tuple(view.name for view in sorted(shuffled, key=lambda view: (not view.accepting, view.live)))


def order_for_calls(views: Sequence[EdgeView], *, seed: int, gpu: bool = False) -> tuple[str, ...]:
    """Every edge, best first for one call: those that carry out calls, with a GPU if one is wanted, then the fewest
    calls.
    """
    shuffled = sorted(views, key=lambda view: view.name)
    random.Random(seed).shuffle(shuffled)  # noqa: S311 - spreading load, not guarding anything

    def rank(view: EdgeView) -> tuple[bool, bool, int]:
        return not view.takes_calls, gpu and not view.gpu, view.calls

    return tuple(view.name for view in sorted(shuffled, key=rank))


def split(count: int, views: Sequence[EdgeView]) -> dict[str, int]:
    """How many of `count` each edge gets, so that live sandboxes even out. Edges that get none are left out."""
    usable = [view for view in views if view.accepting] or list(views)
    level = sorted(usable, key=lambda view: (view.live, view.name))
    shares = {view.name: 0 for view in level}
    left = count
    for filled in range(1, len(level) + 1):
        group = level[:filled]
        gap = level[filled].live - level[filled - 1].live if filled < len(level) else left
        step = min(left, gap * filled)
        for position, view in enumerate(group):
            shares[view.name] += step // filled + (1 if position < step % filled else 0)
        left -= step
    return {name: share for name, share in shares.items() if share}


def may_try_elsewhere(error: errors.OpenDSecError) -> bool:
    """Whether another edge could take what this one refused; true only when nothing was started here."""
    if isinstance(error, errors.NotFoundError):
        return error.detail.get("field") == "snapshot"  # in the store of another edge, perhaps
    return isinstance(
        error,
        (
            errors.CapacityError,
            errors.SnapshotInvalidError,
            errors.ConnectError,
            errors.BackendUnavailableError,
            errors.HostCapabilityError,
            errors.DiskFullError,
            errors.ImageNotFoundError,
        ),
    )


def call_may_go_elsewhere(error: errors.OpenDSecError) -> bool:
    """As `may_try_elsewhere`, for a call: it leaves nothing behind, so a fault of the node counts too, and a GPU may be
    elsewhere.
    """
    if isinstance(error, errors.UnsupportedError):
        return error.detail.get("field") == "gpu"
    return may_try_elsewhere(error) or isinstance(error, errors.NodeError)


def refusal(reasons: Mapping[str, errors.OpenDSecError]) -> errors.OpenDSecError:
    """One error for 'no edge took it':

    the edges' own when they agree that it is not about room, or that there never will be any, else UnschedulableError.
    """
    if not reasons:
        return errors.UnschedulableError("no edge is known", remedy="start one, or name it in OPENDSEC_EDGES")
    kinds = {type(error) for error in reasons.values()}
    first = next(iter(reasons.values()))
    about_room = isinstance(first, (errors.CapacityError, errors.ConnectError))
    if len(kinds) == 1 and not (about_room and any(error.retryable for error in reasons.values())):
        return first
    told = {name: str(error) for name, error in reasons.items()}
    return errors.UnschedulableError(
        "no edge took it: " + "; ".join(f"{name}: {text}" for name, text in sorted(told.items())),
        detail={"reasons": told},
        remedy="try again later, ask for less, or add an edge",
    )
