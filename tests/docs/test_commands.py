"""Every command line in README and documents is one the command understands: names, options, number of words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import typer.main

from opendsec.main import whole_app

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^```[a-z]*\n(.*?)^```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
_PAGES = [ROOT / "README.md", ROOT / "docs/next-steps.txt", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> Iterator[str]:
    """What a reader would type, without comments and prompts."""
    text = page.read_text(encoding="utf-8")
    pieces = [text] if page.suffix == ".txt" else [block or inline for block, inline in _CODE.findall(text)]
    for line in "\n".join(pieces).splitlines():
        words = re.split(r"\s{3,}|\s+#", line.strip().removeprefix("$ "))[0]
        if re.match(r"opendsec [a-z]", words) and "…`" not in words:
            yield words


def found() -> list[tuple[str, str]]:
    return [(str(page.relative_to(ROOT)), line) for page in _PAGES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), sorted(set(found())))
def test_a_command_is_understood(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    command = typer.main.get_command(whole_app())
    context = command.make_context("opendsec", [words[0]])
    name = "opendsec"
    while hasattr(command, "get_command"):
        name, words = words[0], words[1:]
        command = command.get_command(context, name)
        assert command is not None, f"{page}: there is no command {name}"
        if not words:
            return  # spoken of, not typed
    command.make_context(name, words, parent=context)


def test_there_are_commands_to_look_at() -> None:
    assert len(found()) > 20
