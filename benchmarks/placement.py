"""How long calls wait when edges are chosen by views that are a second old: the way the apiserver does it, beside the
fewest calls of the view, and beside the better of two edges drawn at random (power of two choices).

    python -m benchmarks.placement

A simulation of time and queues, with the apiserver's own `order_for_calls`: calls arrive at random, at 80 % of what all
edges can carry out; each edge carries out four at once. Waits are told as multiples of a call's own time. It measures
nothing of this machine.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.shared.report import quantile

from opendsec.apiserver.edges import VIEW_AGE_S
from opendsec.apiserver.placement import EdgeView, order_for_calls

AT_ONCE = 4
LOAD = 0.8
CALLS = 12_000

Choose = Callable[[Sequence[EdgeView], Counter[str], Counter[str], random.Random], str]
"""(the views, calls sent since, calls under way, …) → the edge."""


def with_sent(views: Sequence[EdgeView], sent: Counter[str], _: Counter[str], chance: random.Random) -> str:
    """As the apiserver does."""
    seen = [replace(view, calls=view.calls + sent[view.name]) for view in views]
    return order_for_calls(seen, seed=chance.getrandbits(32))[0]


def fewest(views: Sequence[EdgeView], _: Counter[str], under_way: Counter[str], chance: random.Random) -> str:
    """The fewest calls of the view; our own that are under way are newer."""
    seen = [replace(view, calls=max(view.calls, under_way[view.name])) for view in views]
    return order_for_calls(seen, seed=chance.getrandbits(32))[0]


def two_choices(views: Sequence[EdgeView], sent: Counter[str], under_way: Counter[str], chance: random.Random) -> str:
    """The better of two."""
    return fewest(chance.sample(list(views), 2), sent, under_way, chance)


def two_choices_with_sent(
    views: Sequence[EdgeView], sent: Counter[str], under_way: Counter[str], chance: random.Random
) -> str:
    """The better of two, with what was sent since."""
    return with_sent(chance.sample(list(views), 2), sent, under_way, chance)


POLICIES: tuple[Choose, ...] = (with_sent, fewest, two_choices, two_choices_with_sent)


@dataclass
class _Apiserver:
    """What one of several knows."""

    views: list[EdgeView] = field(default_factory=list)
    fresh_until: float = -1.0
    sent: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)


def waits(choose: Choose, *, edges: int, apiservers: int, call_s: float, seed: int) -> list[float]:
    """Of each call, in seconds."""
    chance = random.Random(seed)
    names = [f"e{number}" for number in range(edges)]
    busy: Counter[str] = Counter()
    queues: dict[str, deque[tuple[float, _Apiserver]]] = {name: deque() for name in names}
    known = [_Apiserver() for _ in range(apiservers)]
    between = call_s / (LOAD * edges * AT_ONCE)
    ends: list[tuple[float, int, str, _Apiserver]] = []
    found: list[float] = []
    now = 0.0

    def begin(name: str, whose: _Apiserver, came: float) -> None:
        busy[name] += 1
        found.append(now - came)
        heapq.heappush(ends, (now + chance.expovariate(1 / call_s), len(found), name, whose))

    def end_until(until: float) -> None:
        nonlocal now
        while ends and ends[0][0] <= until:
            now, _, name, whose = heapq.heappop(ends)
            busy[name] -= 1
            whose.under_way[name] -= 1
            if queues[name]:
                came, waiting = queues[name].popleft()
                begin(name, waiting, came)
        now = until

    for _ in range(CALLS):
        end_until(now + chance.expovariate(1 / between))
        whose = chance.choice(known)
        if now >= whose.fresh_until:
            whose.views = [EdgeView(name=name, calls=busy[name] + len(queues[name])) for name in names]
            whose.sent, whose.fresh_until = Counter(), now + VIEW_AGE_S
        name = choose(whose.views, whose.sent, whose.under_way, chance)
        whose.sent[name] += 1
        whose.under_way[name] += 1
        if busy[name] < AT_ONCE:
            begin(name, whose, now)
        else:
            queues[name].append((now, whose))
    return found


def main() -> None:
    print("waits as multiples of a call's time: mean / p99")
    print(f"{'edges':>5} {'apiservers':>10} {'call s':>7}  " + "  ".join(f"{one.__name__:>21}" for one in POLICIES))
    for edges in (3, 8, 32):
        for apiservers in (1, 4):
            for call_s in (0.02, 0.5, 5.0):
                cells = []
                for policy in POLICIES:
                    seen = waits(policy, edges=edges, apiservers=apiservers, call_s=call_s, seed=1)
                    cells.append(f"{statistics.mean(seen) / call_s:.2f} / {quantile(seen, 0.99) / call_s:.2f}")
                print(
                    f"{edges:5} {apiservers:10} {call_s:7.2f}  " + "  ".join(f"{cell:>21}" for cell in cells),
                    flush=True,
                )


if __name__ == "__main__":
    main()
