"""How `benchmarks.cold_start` shows its figures: Markdown, to be put into docs/reference/performance.md as it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

NAMES = {
    "local": "on the node's disk",
    "direct": "direct, no profile",
    "direct+p": "**direct**",
    "fuse": "fuse, no profile",
    "fuse+p": "**fuse**",
    "fuse+now": "fuse, not waiting",
    "fuse+other": "fuse, another command's profile",
    "fanotify": "fanotify, no profile",
    "fanotify+p": "**fanotify**",
    "unpack": "pull and unpack",
}


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one start."""

    create_s: float
    first_s: float
    again_s: float
    """The same command again, the page cache emptied: what is on the node is read from its disk."""
    warm_s: float
    """And once more."""
    fetched: int
    written: int
    cpu_s: float
    touched: int = 0
    asked: int = 0

    @property
    def both_s(self) -> float:
        """From the request to the result."""
        return self.create_s + self.first_s


Results = Mapping[tuple[str, str], Sequence[Figures]]
"""By command and arm."""


def median(results: Results, command: str, arm: str, what: str) -> float:
    """Of one figure."""
    return float(statistics.median(getattr(one, what) for one in results[command, arm]))


def table(results: Results, command: str, arms: Sequence[str]) -> Iterator[str]:
    """Medians of one command, a line for each arm. Times in ms, sizes in MB."""
    yield "| command | arm | create | first | of disk | create + first | again | fetched | of touched | written | CPU |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for arm in arms:

        def get(what: str, arm: str = arm) -> float:
            return median(results, command, arm, what)

        local, touched = get("first_s", "local"), max(1.0, get("touched", "local"))
        said = f"`{command}`" if arm == arms[0] else f"touches {touched / 1e6:.1f} MB" if arm == arms[1] else ""
        times = f"{get('create_s') * 1e3:.0f} | {get('first_s') * 1e3:.0f} | {get('first_s') / local:.2f}"
        again = f"{get('both_s') * 1e3:.0f} | {get('again_s') * 1e3:.0f}"
        fetched = "| " if arm == "local" else f"{get('fetched') / 1e6:.1f} | {get('fetched') / touched:.2f}"
        yield (
            f"| {said} | {NAMES[arm]} | {times} | {again} | {fetched} | {get('written') / 1e6:.1f} "
            f"| {get('cpu_s') * 1e3:.0f} |"
        )


def _goals(kind: str) -> list[tuple[str, str, str, str, float, bool]]:
    """What is held to what: words, arm, its figure, whose figure it is compared with, goal, whether at least."""
    profile = f"{kind}+p"
    return [
        (f"{kind}: ready to first result, of the node's disk", profile, "first_s", "local", 1.2, False),
        (f"{kind}: bytes read, of bytes touched", profile, "fetched", "touched", 1.2, False),
        (f"pull and unpack, of {kind}: create to result", profile, "both_s", "unpack", 5.0, True),
        (f"pull and unpack, of {kind}: bytes written", profile, "written", "unpack", 10.0, True),
        (f"{kind}: create to result, of without a profile", profile, "both_s", kind, 1.0, False),
        (f"{kind}, no profile: ready to first result, of the node's disk", kind, "first_s", "local", 1.2, False),
        (f"{kind}, no profile: bytes read, of bytes touched", kind, "fetched", "touched", 1.2, False),
        (f"pull and unpack, of {kind}, no profile: create to result", kind, "both_s", "unpack", 5.0, True),
    ]


def goals(results: Results, commands: Sequence[str], arms: Sequence[str]) -> Iterator[str]:
    """What was to be shown, and whether it was: a line for each goal, a column for each command."""
    yield f"| goal | | {' | '.join(f'`{command}`' for command in commands)} |"
    yield f"| --- | --- | {' | '.join('---' for _ in commands)} |"
    for kind in ("fuse", "fanotify", "direct"):
        for words, arm, what, other, goal, at_least in _goals(kind):
            if arm in arms and (other in arms or other == "touched"):
                cells = [_cell(_ratio(results, one, arm, what, other), goal, at_least=at_least) for one in commands]
                yield f"| {words} | {'≥' if at_least else '≤'} {goal:g} | {' | '.join(cells)} |"


def _ratio(results: Results, command: str, arm: str, what: str, other: str) -> float:
    mine = max(median(results, command, arm, what), 1e-9)
    if other == "touched":
        return mine / max(1.0, median(results, command, "local", "touched"))
    its = median(results, command, other, what)
    return its / mine if other == "unpack" else mine / max(its, 1e-9)


def _cell(ratio: float, goal: float, *, at_least: bool) -> str:
    shown = "over 1000" if ratio > 1000 else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
    kept = ratio >= goal if at_least else ratio <= goal
    return shown if kept else f"{shown} **missed**"
