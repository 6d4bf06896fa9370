"""`opendsec cp`: files and trees into a sandbox and out of it. A place inside is written `sbx-…:/path`."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from opendsec import DSecClient, FileError, FileKind, Sandbox, TransferProgress
from opendsec.cli import options
from opendsec.cli.output import Json, note, print_json, size
from opendsec.cli.session import with_client

Place = Annotated[str, typer.Argument(help="`PATH` here, or `SANDBOX:/PATH` inside.")]
OnTransfer = Callable[[TransferProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A path in a sandbox."""

    sandbox_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What arrived where."""

    target: str
    files: int
    bytes: int
    skipped_links: tuple[str, ...] = ()


def parse_place(text: str) -> Inside | str:
    """`sbx-…:/path` → Inside, anything else is a path here. Raises typer.BadParameter for a relative path inside."""
    name, colon, path = text.partition(":")
    if not (colon and name.startswith("sbx-") and "/" not in name):
        return text
    if not path.startswith("/"):
        raise typer.BadParameter(f"{text!r}: the path inside a sandbox starts with /", param_hint="PLACE")
    return Inside(sandbox_id=name, path=path)


def cp(
    source: Place,
    target: Place,
    user: options.User = None,
    as_json: Json = False,
) -> None:
    """Copy a file or a tree: `opendsec cp ./project sbx-…:/workspace`, `opendsec cp sbx-…:/workspace/log .`.

    As with cp(1): a target that is a directory gets the source below its own name; any other target is the copy's name.
    """
    from_, to = parse_place(source), parse_place(target)

    async def main(client: DSecClient) -> int:
        if isinstance(from_, str) and isinstance(to, Inside):
            copied = await _upload(client, from_, to, user)
        elif isinstance(from_, Inside) and isinstance(to, str):
            copied = await _download(client, from_, to, user)
        else:
            raise typer.BadParameter("exactly one of the two is SANDBOX:/PATH", param_hint="PLACE")
        if as_json:
            print_json(copied)
            return 0
        note(f"{copied.files} {'file' if copied.files == 1 else 'files'}, {size(copied.bytes)} → {copied.target}")
        for entry in copied.skipped_links:
            note(f"opendsec: left out, it leads out of the tree: {entry}")
        return 0

    with_client(main)


async def _upload(client: DSecClient, source: str, to: Inside, user: str | None) -> Copied:
    sandbox = await client.connect(to.sandbox_id)
    path = await _inside_target(sandbox, source, to.path, user)
    with _shown(source) as on_transfer:
        tree = await sandbox.files.upload(source, path, user=user, progress=on_transfer)
    return Copied(target=path, files=tree.files, bytes=tree.bytes)


async def _download(client: DSecClient, source: Inside, to: str, user: str | None) -> Copied:
    sandbox = await client.connect(source.sandbox_id)
    path = _local_target(source.path, to)
    with _shown(source.path) as on_transfer:
        tree = await sandbox.files.download(source.path, path, user=user, progress=on_transfer)
    return Copied(target=path, files=tree.files, bytes=tree.bytes, skipped_links=tree.skipped_links)


async def _inside_target(sandbox: Sandbox, source: str, path: str, user: str | None) -> str:
    if not os.path.lexists(source):
        raise FileError(f"{source} does not exist here", detail={"path": source, "errno": "ENOENT"})
    try:
        kind = (await sandbox.files.stat(path, user=user)).kind
    except FileError as error:
        if error.detail.get("errno") != "ENOENT":
            raise
        return path + Path(source).name if path.endswith("/") else path
    if kind is FileKind.DIRECTORY:
        return posixpath.join(path, Path(source).absolute().name)
    return path


def _local_target(path: str, target: str) -> str:
    if Path(target).is_dir() or target.endswith("/"):
        return str(Path(target) / (posixpath.basename(path.rstrip("/")) or "root"))
    return target


@contextmanager
def _shown(title: str) -> Iterator[OnTransfer | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task(escape(title), total=None)

        def show(step: TransferProgress) -> None:
            bars.update(task, completed=step.bytes_done, total=step.bytes_total, description=escape(step.current[-40:]))

        yield show
