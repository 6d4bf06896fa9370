"""Writes docs/reference/cli.md from the commands themselves; `--check` fails when the page is not current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from opendsec.main import whole_app

PAGE = Path(__file__).parents[1] / "docs/reference/cli.md"
HEAD = """\
# Command line

Written by `scripts/cli_reference.py` from the commands themselves.

Exit statuses: the command's own; 124 it ran into its timeout, 125 the platform failed or refused (a sandbox, snapshot
or image that does not exist, too), 126 it could not be executed, 127 it was not found, 130 interrupted, 141 nobody
reads the output any more, 143 terminated, 1 a named file does not exist (for `doctor`, `demo` and `image`: it failed),
2 wrong usage. With `--json` standard output holds JSON and nothing else, errors included.
"""
"""The page above the commands."""

Words = tuple[str, ...]


def commands() -> list[tuple[Words, Any]]:
    """Every command with its words, in the order of the help."""
    return list(_below(typer.main.get_command(whole_app()), ()))


def _below(command: Any, words: Words) -> Iterator[tuple[Words, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
        return
    for name, child in children.items():
        yield from _below(child, (*words, name))


def section(words: Words, command: Any) -> str:
    """One command: usage, what it does, its options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["opendsec", *words, *(_metavar(argument) for argument in arguments)])
    rows = [f"| `{_cell(_metavar(item))}` | {_cell(item.help or '')} |" for item in arguments]
    rows += [
        f"| `{_names(option)}{_value(option)}` | {_cell(option.help or '')}{_default(option)} |" for option in options
    ]
    table = "".join(f"{row}\n" for row in ["| | |", "| --- | --- |", *rows]) if rows else ""
    return f"\n## {usage}\n\n{inspect.cleandoc(command.help or '')}\n\n{table}"


def _names(option: Any) -> str:
    """All names of an option; behind a slash those that say no."""
    return " / ".join(", ".join(names) for names in (option.opts, option.secondary_opts) if names)


def _cell(text: str) -> str:
    """Text in a cell of a table, where a bar would begin the next one."""
    return text.replace("|", chr(92) + "|")


def _metavar(argument: Any) -> str:
    text = argument.metavar or argument.name.upper()
    if argument.nargs == -1:
        text += "..."
    return text if argument.required else f"[{text}]"


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.default, Enum):
        return " " + "\\|".join(str(member.value) for member in type(option.default))
    return f" {option.metavar or option.name.upper()}"


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag and option.secondary_opts:
        return f" Default: {(option.opts if value else option.secondary_opts)[0]}."
    if value is None or value == "" or option.is_flag or callable(value) or len(str(value)) > 40:
        return ""
    return f" Default: {getattr(value, 'value', value)}."


def page() -> str:
    """The whole page."""
    return HEAD + "".join(section(words, command) for words, command in commands())


def main() -> int:
    """0 when the page is (now) current."""
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current: run scripts/cli_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
