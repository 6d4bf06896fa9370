"""What a client process asked for and what it was answered, one JSON line each, in the order it happened.

A line is one write to a file opened for appending, so a process killed with -9 leaves whole lines, at worst without the
last answer. The next process of the same worker reads them and goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """`event` is `ask`, `answer` or `note`; an answer names the ask it belongs to."""

    event: str
    op: str
    facts: dict[str, Any]


class Diary:
    """The file of one worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def ask(self, op: str, kind: str, **facts: object) -> None:
        """Before the request leaves."""
        self._write("ask", op, {"kind": kind, **facts})

    def answer(self, op: str, **facts: object) -> None:
        """After its answer has come."""
        self._write("answer", op, facts)

    def close(self) -> None:
        """Nothing more is written."""
        os.close(self._fd)

    def _write(self, event: str, op: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"event": event, "op": op, "at": round(time.time(), 3), **facts}) + "\n"
        os.write(self._fd, line.encode("ascii"))


def read(path: Path) -> Iterator[Line]:
    """All whole lines."""
    if not path.exists():
        return
    for text in path.read_text(encoding="ascii").splitlines():
        facts = json.loads(text)
        yield Line(facts.pop("event"), facts.pop("op"), facts)
