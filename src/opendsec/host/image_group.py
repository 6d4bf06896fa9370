"""`opendsec image …`, this machine's half: commands that work on the store itself, whether or not a platform runs.

What they share: the group, the store, progress, and how errors end a command. The client's half is
`opendsec.cli.image_group`; `opendsec.main` puts both into one group.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from opendsec.cli.exits import TERMINATED
from opendsec.cli.output import note, print_error
from opendsec.errors import HostCapabilityError, NodeError, OpenDSecError
from opendsec.store.images import ImageStore
from opendsec.store.location import open_location
from opendsec.store.progress import OnProgress
from opendsec.store.progress import Progress as Step

app = typer.Typer(no_args_is_help=True)

STATE_DIR = "/var/lib/opendsec"


def open_store() -> ImageStore:
    """The store OPENDSEC_STORE names, or that below OPENDSEC_STATE_DIR. InvalidSpecError."""
    return open_location(os.environ.get("OPENDSEC_STORE", ""), state_directory())


def state_directory() -> Path:
    """Of this node."""
    return Path(os.environ.get("OPENDSEC_STATE_DIR", STATE_DIR))


@contextmanager
def errors_shown(as_json: bool) -> Iterator[None]:
    """Errors of ours are printed, and the status is 1: it failed. SIGTERM unwinds like Ctrl-C: programs we run end."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except OpenDSecError as error:
        print_error(error, as_json=as_json)
        raise typer.Exit(1) from error
    except OSError as error:
        print_error(of_host(error), as_json=as_json)
        raise typer.Exit(1) from error


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def of_host(error: OSError) -> OpenDSecError:
    """A failed system call of ours: this machine's fault, or the user's for not being root."""
    words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, PermissionError) and os.geteuid() != 0:
        return HostCapabilityError(words, detail={"probe": "root"}, remedy="images belong to root: use sudo")
    return NodeError(words, retryable=False)


@contextmanager
def progress_shown(title: str) -> Iterator[OnProgress]:
    """A progress line on the terminal (standard error); nothing but the phases when that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Phases(title).show
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress, progress.add_task(escape(title), total=None, detail="")).show


class _Phases:
    """One line for each phase, for logs."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._phase = ""

    def show(self, step: Step) -> None:
        if step.phase != self._phase:
            self._phase = step.phase
            note(f"{self._title}: {step.phase}")


class _Bar:
    """One line that moves."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show(self, step: Step) -> None:
        self._progress.update(
            self._task,
            description=escape(step.phase),
            completed=step.done,
            total=step.total,
            detail=escape(step.detail[:60]),
        )
