"""Patterns of names: those of COPY and ADD (as Go's filepath.Match has them) and those of .dockerignore. Pure.

In both, `*` is any text without a slash, `?` one letter, `[a-z]` one of these (`[^…]` none of them), a backslash takes
a letter's meaning away. In .dockerignore `**` is any number of directories, a pattern that fits a directory fits all
below it, `!` in front takes names back, and the last line that fits decides.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from opendsec.errors import InvalidSpecError

_MAGIC = re.compile(r"[*?\[]")


def has_wildcard(pattern: str) -> bool:
    """Whether a name of COPY or ADD is a pattern."""
    return _MAGIC.search(pattern) is not None


def component(pattern: str) -> re.Pattern[str]:
    """A pattern for one component of a path. Raises InvalidSpecError for a bracket that is not closed."""
    return _compiled(pattern, directories=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreRule:
    """One line of .dockerignore."""

    pattern: re.Pattern[str]
    takes_back: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """All of them."""

    rules: tuple[IgnoreRule, ...] = ()

    @property
    def takes_back(self) -> bool:
        """Whether below an ignored directory there may be names that are not."""
        return any(rule.takes_back for rule in self.rules)

    def ignores(self, path: str) -> bool:
        """Whether a path relative to the context is left out."""
        ignored = False
        for rule in self.rules:
            if rule.takes_back == ignored and _fits(rule.pattern, path):
                ignored = not rule.takes_back
        return ignored


def parse_ignore(text: str) -> Ignore:
    """The rules of a .dockerignore."""
    rules = []
    for line in text.lstrip("\ufeff").splitlines():
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        takes_back = pattern.startswith("!")
        cleaned = _cleaned(pattern.removeprefix("!").strip())
        if cleaned:
            rules.append(IgnoreRule(pattern=_compiled(cleaned, directories=True), takes_back=takes_back))
    return Ignore(rules=tuple(rules))


def _cleaned(pattern: str) -> str:
    cleaned = posixpath.normpath(pattern).lstrip("/") if pattern else ""
    return "" if cleaned == "." else cleaned


def _fits(pattern: re.Pattern[str], path: str) -> bool:
    """The path itself, or a directory above it."""
    while path:
        if pattern.match(path):
            return True
        path = posixpath.dirname(path)
    return False


def _compiled(pattern: str, *, directories: bool) -> re.Pattern[str]:
    try:
        return re.compile(_translated(pattern, directories=directories) + r"\Z", re.DOTALL)
    except re.error as error:
        raise InvalidSpecError(f"the pattern {pattern!r}: {error.msg}", detail={"field": "pattern"}) from error


def _translated(pattern: str, *, directories: bool) -> str:
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "*" and directories and pattern.startswith("*", at):
            while pattern.startswith("*", at):
                at += 1
            if pattern.startswith("/", at):
                at += 1
                parts.append("(?:.*/)?")
            else:
                parts.append(".*")
        elif letter == "*":
            parts.append("[^/]*")
        elif letter == "?":
            parts.append("[^/]")
        elif letter == "[":
            at, part = _bracket(pattern, at)
            parts.append(part)
        elif letter == "\\" and at < len(pattern):
            parts.append(re.escape(pattern[at]))
            at += 1
        else:
            parts.append(re.escape(letter))
    return "".join(parts)


def _bracket(pattern: str, at: int) -> tuple[int, str]:
    """From behind the bracket to behind its end."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[str] = []
    while at < len(pattern) and (pattern[at] != "]" or not ranges):
        if pattern[at] == "\\" and at + 1 < len(pattern):
            at += 1
        low = pattern[at]
        at += 1
        if pattern.startswith("-", at) and at + 1 < len(pattern) and pattern[at + 1] != "]":
            high = pattern[at + 1]
            at += 2
            ranges.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            ranges.append(re.escape(low))
    if at >= len(pattern):
        raise InvalidSpecError(f"the pattern {pattern!r} has a bracket that is not closed", detail={"field": "pattern"})
    return at + 1, f"(?!/)[{'^' if negated else ''}{''.join(ranges)}]"


def names_matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Of the names of one directory, those that fit one component, sorted."""
    compiled = component(pattern)
    return sorted(name for name in names if compiled.match(name))
