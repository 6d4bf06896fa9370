"""Paths that are left out become few arguments, and never match what stays."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec.errors import InvalidSpecError
from opendsec.store.exclusion import Exclusion, exclude


def is_out(exclusion: Exclusion, path: str) -> bool:
    """As mkfs.erofs decides: of the path and, walking down, of every directory above it."""
    parts = path.split("/")
    ways = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return any(way in exclusion.paths or any(re.search(one, way) for one in exclusion.regexes) for way in ways)


def test_few_paths_are_named_one_by_one() -> None:
    assert exclude(["a", "b/c"], ["b"]) == Exclusion(paths=("a", "b/c"))


def test_a_directory_that_is_emptied_is_one_expression() -> None:
    out = [f"tmp/{number}" for number in range(1000)]
    assert exclude(out, ["tmp", "tmpx"]) == Exclusion(regexes=("^tmp/",))


def test_a_name_that_is_everywhere_is_one_expression() -> None:
    out = [f"lib/{number}/__pycache__" for number in range(1000)]
    stays = ["lib", *(f"lib/{number}" for number in range(1000)), *(f"lib/{number}/x.py" for number in range(1000))]
    assert exclude(out, stays) == Exclusion(regexes=("(^|/)__pycache__$",))


def test_an_ending_is_one_expression_unless_something_else_has_it() -> None:
    out = [f"src/{number}.o" for number in range(1000)]
    assert exclude(out, ["src", "src/x.c"]).regexes == ("[.]o$",)
    kept = exclude(out, ["src", "src/kept.o"])
    assert (kept.regexes, len(kept.paths)) == ((), 1000)


def test_a_name_that_is_nothing_but_an_ending_stays() -> None:
    out = [f"build/{number}/x{number}.env" for number in range(1000)]
    directories = [f"build/{number}" for number in range(1000)]
    kept = exclude(out, ["app", "app/.env", "build", *directories, *(f"{one}/y" for one in directories)])
    assert not is_out(kept, "app/.env")
    assert len(kept.paths) == 1000


def test_names_that_mean_something_else_to_an_expression_are_named_one_by_one() -> None:
    out = [f"a(b/{number}" for number in range(20)]
    assert exclude(out, ["a(b"]) == Exclusion(paths=tuple(out))
    dotted = [f"a.b/{number}" for number in range(20)]
    assert exclude(dotted, ["a.b"]).regexes == ("^a[.]b/",)


def test_too_many_for_the_arguments_of_a_program_are_refused() -> None:
    out = [f"d/{number:06}" for number in range(100_000)]
    with pytest.raises(InvalidSpecError, match="too many") as failed:
        exclude(out, ["d", "d/kept"])
    assert failed.value.detail == {"field": "scrub", "paths": 100_000}


_NAMES = st.sampled_from(["a", "b", "a.o", "b.o", "x.o.o", ".o", "o", "a+b", "[", "long name", "é", "__pycache__"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=300)
@given(st.sets(_PATHS, max_size=60), st.sets(_PATHS, max_size=20))
def test_everything_out_is_out_and_what_stays_stays(some: set[str], more: set[str]) -> None:
    stays = {way for path in more for way in _ways(path)}
    out = {path for path in some if not any(way in some for way in _ways(path)[:-1]) and path not in stays}
    out = {path for path in out if all(way in stays for way in _ways(path)[:-1])}
    exclusion = exclude(sorted(out), sorted(stays))
    assert [path for path in out if not is_out(exclusion, path)] == []
    assert [path for path in stays if is_out(exclusion, path)] == []


def _ways(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
