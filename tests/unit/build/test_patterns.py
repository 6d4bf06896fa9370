"""Patterns of COPY and of .dockerignore."""

from __future__ import annotations

import pytest

from opendsec.build.patterns import names_matching, parse_ignore
from opendsec.errors import InvalidSpecError

NAMES = ["a.txt", "b.txt", "ab", "[x]", ".hidden", "c\nd"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("[a-b].txt", ["a.txt", "b.txt"]),
        ("[^a].txt", ["b.txt"]),
        ("\\[x\\]", ["[x]"]),
        ("*", sorted(NAMES)),
        ("c?d", ["c\nd"]),
        ("none*", []),
    ],
)
def test_names_of_one_directory(pattern: str, expected: list[str]) -> None:
    assert names_matching(pattern, NAMES) == expected


def test_a_bracket_that_is_not_closed() -> None:
    with pytest.raises(InvalidSpecError, match="bracket"):
        names_matching("[a", NAMES)


def test_a_range_that_is_none() -> None:
    with pytest.raises(InvalidSpecError, match=r"\[z-a\]"):
        names_matching("[z-a]", NAMES)
    with pytest.raises(InvalidSpecError, match=r"\[z-a\]"):
        parse_ignore("[z-a]")


IGNORED = [
    ("node_modules", "node_modules/x/y", True),
    ("node_modules", "sub/node_modules", False),
    ("**/node_modules", "sub/deep/node_modules/x", True),
    ("**/node_modules", "node_modules", True),
    ("*.md", "a.md", True),
    ("*.md", "sub/a.md", False),
    ("**/*.md", "sub/a.md", True),
    ("/lead", "lead", True),
    ("dir/", "dir/x", True),
    ("a/**", "a/b/c", True),
    ("a/**", "a", False),
    ("*", "anything/below", True),
    ("*/temp*", "some/temporary.txt", True),
    ("*/*/temp*", "some/temporary.txt", False),
    ("temp?", "tempa", True),
    ("# comment", "# comment", False),
    ("*.md\n!README.md", "README.md", False),
    ("*.md\n!README.md", "OTHER.md", True),
    ("*.md\n!README*.md\nREADME-secret.md", "README-secret.md", True),
    ("*\n!src\nsrc/*.o", "src/a.c", False),
    ("*\n!src\nsrc/*.o", "src/a.o", True),
    ("./x", "x", True),
    ("  spaced  ", "spaced", True),
    ("", "x", False),
]


@pytest.mark.parametrize(("text", "path", "expected"), IGNORED)
def test_ignored(text: str, path: str, expected: bool) -> None:
    assert parse_ignore(text).ignores(path) is expected
