"""Many paths that are left out of a tree, as few arguments of mkfs.erofs. Pure.

Linux takes about 2 MB of arguments, and mkfs.erofs compares every path of the tree with every argument. So paths with
something in common become one expression, whenever it matches nothing that stays: all of one directory, all of one
name, all of one ending.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendsec.errors import InvalidSpecError

MAX_ARGUMENT_BYTES = 1_500_000
_FEW = 8
"""So many paths are no group yet."""
_PLAIN = re.compile(r"[A-Za-z0-9 _@%+=:,./-]+\Z")
"""Text whose bytes mean the same to every reader of regular expressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Relative paths, each with all below it."""

    paths: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    """POSIX extended."""


def exclude(out: Sequence[str], stays: Sequence[str]) -> Exclusion:
    """`out`: the topmost paths that are left out; `stays`: all that stay. Raises InvalidSpecError for too many."""
    regexes: list[str] = []
    rest: Sequence[str] = out
    for key, expression in ((_directory, "^{}/"), (_name, "(^|/){}$"), (_ending, "[.]{}$")):
        taken = {_matched_ending(path) if key is _ending else key(path) for path in stays}
        rest = _grouped(rest, key, taken, expression, regexes)
    if sum(len(path) + 32 for path in rest) > MAX_ARGUMENT_BYTES:
        raise InvalidSpecError(
            f"scrub: {len(rest)} paths would have to be left out one by one, such as {rest[0]!r}: those are too many",
            detail={"field": "scrub", "paths": len(rest)},
            remedy="leave out whole directories, or remove the files in the sandbox first",
        )
    return Exclusion(paths=tuple(rest), regexes=tuple(regexes))


def _grouped(
    out: Sequence[str], key: Callable[[str], str], taken: set[str], expression: str, regexes: list[str]
) -> list[str]:
    """Those that could not be put into a group; the groups' expressions are added."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path in out:
        groups[key(path)].append(path)
    rest: list[str] = []
    for text, paths in groups.items():
        if len(paths) < _FEW or text in taken or not _PLAIN.match(text):
            rest += paths
        else:
            regexes.append(expression.format(_escaped(text)))
    return rest


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _ending(path: str) -> str:
    """What follows the last dot of a name; a name without one is its own, which no expression is made for."""
    name = _name(path)
    stem, dot, ending = name.rpartition(".")
    return ending if dot and stem else f"\0{name}"


def _matched_ending(path: str) -> str:
    """The ending by whose expression a path is matched: of `.env` too, which no group is made of."""
    return _name(path).rpartition(".")[2]


def _escaped(text: str) -> str:
    return re.sub(r"([.+])", r"[\1]", text)
