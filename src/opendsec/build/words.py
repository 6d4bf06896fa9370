"""Words of a Dockerfile: quotes, escapes and variables, by the rules of Docker's reference ("Environment replacement").

`$NAME`, `${NAME}`, and `${NAME:-word}`, `${NAME:+word}`, `${NAME:?word}` (without the colon: unset alone counts, not
empty), `${NAME#pattern}` and `##`, `%` and `%%`, `/pattern/text` and `//`. A variable nobody set is empty. Nothing is
expanded between single quotes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS = (":-", ":+", ":?", "-", "+", "?", "##", "#", "%%", "%", "//", "/")


class WordError(ValueError):
    """A word that is none; says why."""


def expand(word: str, variables: Mapping[str, str], *, escape: str = "\\") -> str:
    """The word with quotes taken off and variables replaced. Raises WordError."""
    return _Reader(word, variables, escape).word("")


def expand_document(text: str, variables: Mapping[str, str], *, escape: str = "\\") -> str:
    """A document in place with variables replaced; quotes and escapes are text, but an escaped `$` is no variable."""
    return _Reader(text, variables, escape, document=True).word("")


class _Reader:
    """One pass over one word."""

    def __init__(self, text: str, variables: Mapping[str, str], escape: str, *, document: bool = False) -> None:
        self._text = text
        self._at = 0
        self._variables = variables
        self._escape = escape
        self._document = document

    def word(self, until: str) -> str:
        """Up to one of the letters in `until`, which stays, or to the end."""
        done: list[str] = []
        while self._at < len(self._text) and self._text[self._at] not in until:
            letter = self._text[self._at]
            if letter == "$":
                done.append(self._variable())
            elif letter == self._escape:
                done.append(self._text[self._at + (not self._document) : self._at + 2])
                self._at += 2
            elif letter == "'" and not self._document:
                done.append(self._single())
            elif letter == '"' and not self._document:
                done.append(self._double())
            else:
                done.append(letter)
                self._at += 1
        return "".join(done)

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise WordError(f"a single quote is not closed in {self._text!r}")
        inside = self._text[self._at + 1 : end]
        self._at = end + 1
        return inside

    def _double(self) -> str:
        done: list[str] = []
        self._at += 1
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == '"':
                self._at += 1
                return "".join(done)
            if letter == "$":
                done.append(self._variable())
                continue
            if letter == self._escape:
                following = self._text[self._at + 1 : self._at + 2]
                if following not in ('"', "$", self._escape):
                    done.append(letter)
                done.append(following)
                self._at += 2
                continue
            done.append(letter)
            self._at += 1
        raise WordError(f"a double quote is not closed in {self._text!r}")

    def _variable(self) -> str:
        self._at += 1
        if self._text[self._at : self._at + 1] != "{":
            match = _NAME.match(self._text, self._at)
            if match is None:
                return "$"
            self._at = match.end()
            return self._variables.get(match[0], "")
        match = _NAME.match(self._text, self._at + 1)
        if match is None:
            raise WordError(f"{self._text!r} holds ${{ without a name after it")
        self._at = match.end()
        value = self._variables.get(match[0])
        if self._text[self._at : self._at + 1] == "}":
            self._at += 1
            return value or ""
        return self._modified(match[0], value)

    def _modified(self, name: str, value: str | None) -> str:
        operator = next((one for one in _OPERATORS if self._text.startswith(one, self._at)), None)
        if operator is None:
            raise WordError(f"{self._text!r}: what follows ${{{name} is not known")
        self._at += len(operator)
        first = self.word("/}" if operator[0] == "/" else "}")
        second = ""
        if operator[0] == "/" and self._text[self._at : self._at + 1] == "/":
            self._at += 1
            second = self.word("}")
        if self._text[self._at : self._at + 1] != "}":
            raise WordError(f"{self._text!r}: ${{{name} is not closed")
        self._at += 1
        return _apply(operator, name, value, first, second)


def _apply(operator: str, name: str, value: str | None, first: str, second: str) -> str:
    there = bool(value) if operator.startswith(":") else value is not None
    text = value or ""
    match operator.lstrip(":"):
        case "-":
            return text if there else first
        case "+":
            return first if there else ""
        case "?":
            if not there:
                raise WordError(f"{name}: {first or 'is not set'}")
            return text
        case "#" | "##":
            return _without_prefix(text, first, longest=operator == "##")
        case "%" | "%%":
            return _without_suffix(text, first, longest=operator == "%%")
        case _:
            return _pattern(first).sub(lambda _match: second, text, count=0 if operator == "//" else 1)


def _pattern(glob: str) -> re.Pattern[str]:
    """`*` any text, `?` one letter, a backslash takes their meaning away."""
    parts: list[str] = []
    letters = iter(glob)
    for letter in letters:
        if letter == "*":
            parts.append(".*")
        elif letter == "?":
            parts.append(".")
        else:
            parts.append(re.escape(next(letters, letter) if letter == "\\" else letter))
    return re.compile("".join(parts), re.DOTALL)


def _without_prefix(text: str, glob: str, *, longest: bool) -> str:
    pattern = _pattern(glob)
    ends = range(len(text), -1, -1) if longest else range(len(text) + 1)
    return next((text[end:] for end in ends if pattern.fullmatch(text, 0, end)), text)


def _without_suffix(text: str, glob: str, *, longest: bool) -> str:
    pattern = _pattern(glob)
    starts = range(len(text) + 1) if longest else range(len(text), -1, -1)
    return next((text[:start] for start in starts if pattern.fullmatch(text, start)), text)
