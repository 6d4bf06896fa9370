"""The table of languages (languages.toml), read once: how a program is compiled and run. Pure after `load`.

Which of them an image has is looked for in the image itself (`opendsec.fncall.member`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendsec.errors import UnsupportedError

TABLE = Path(__file__).with_name("languages.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """One row."""

    name: str
    file: str
    needs: tuple[str, ...]
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def compile_command(self, *, memory_mb: int) -> tuple[str, ...]:
        """Empty: nothing to compile."""
        return self._filled(self.compile, memory_mb)

    def run_command(self, args: tuple[str, ...], *, memory_mb: int) -> tuple[str, ...]:
        """With the call's own arguments."""
        return (*self._filled(self.run, memory_mb), *args)

    def _filled(self, words: tuple[str, ...], memory_mb: int) -> tuple[str, ...]:
        return tuple(word.replace("{file}", self.file).replace("{memory_mb}", str(memory_mb)) for word in words)


@functools.cache
def load(path: Path = TABLE) -> Mapping[str, Language]:
    """Every name and alias. Raises ValueError for a table with an unknown key or a name given twice."""
    found: dict[str, Language] = {}
    for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        try:
            language = Language(name=name, **values)
        except TypeError as error:
            raise ValueError(f"{path.name}: [{name}]: {error}") from None
        for each in (name, *language.aliases):
            if each in found:
                raise ValueError(f"{path.name}: {each!r} is the name of two languages")
            found[each] = language
    return found


def find(name: str) -> Language:
    """Raises UnsupportedError naming the field."""
    language = load().get(name)
    if language is None:
        known = sorted({each.name for each in load().values()})
        raise UnsupportedError(
            f"language: {name!r} is not known",
            detail={"field": "language", "language": name},
            remedy=f"use one of {', '.join(known)}",
        )
    return language
