"""What the command line prints: results on standard output, everything about them on standard error.

With `--json` standard output holds JSON and nothing else, also for errors. Progress is drawn on a terminal only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from opendsec.errors import OpenDSecError
from opendsec.wire import codec

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Advance = Callable[[int], None]


def print_json(value: object) -> None:
    """One value as one line of JSON."""
    write_bytes(1, codec.encode(value) + b"\n")


def print_line(text: str) -> None:
    """One line of a result. Bytes of a name that are no text come out as they were."""
    write_bytes(1, text.encode("utf-8", "surrogateescape") + b"\n")


def note(text: str) -> None:
    """One line about what is going on."""
    write_bytes(2, text.encode("utf-8", "surrogateescape") + b"\n")


def write_bytes(descriptor: int, data: bytes) -> None:
    """All of it, now. Raises BrokenPipeError when nobody reads any more."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def print_error(error: OpenDSecError, *, as_json: bool) -> None:
    """An error of ours: one sentence, and its remedy below."""
    if as_json:
        print_json({"error": codec.error_fields(error)})
        return
    note(f"opendsec: {error.message}")
    if error.remedy:
        note(f"  → {error.remedy}")


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A plain table, as wide as its content when standard output is not a terminal."""
    if not sys.stdout.isatty():
        _print_columns([tuple(columns), *map(tuple, rows)])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    """All lines at once, quickly also when there are ten thousand."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    print_line("\n".join(line.rstrip() for line in padded))


def when(seconds: float | None) -> str:
    """Unix time as local date and time, to the second."""
    if seconds is None:
        return "-"
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def size(amount: int | None) -> str:
    """`12.3 MiB`."""
    if amount is None:
        return "-"
    value = float(amount)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Advance]:
    """A bar on standard error while the block runs; call what it gives with the number of steps done since then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _steps: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(title), total=total)
        yield lambda steps: bars.advance(task, steps)
