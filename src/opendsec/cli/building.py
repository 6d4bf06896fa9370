"""`opendsec image build`: a Dockerfile becomes an image, step by step, in sandboxes of the platform."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.build import (
    BuildEvent,
    BuildNote,
    BuildOptions,
    BuiltImage,
    Limits,
    StepBegun,
    StepDone,
    StepOutput,
    build,
)
from opendsec.cli import options
from opendsec.cli.image_group import app
from opendsec.cli.output import Json, note, print_error, print_json, print_line, size, write_bytes
from opendsec.cli.session import with_client
from opendsec.errors import InvalidSpecError, OpenDSecError
from opendsec.model.image import FileRole, LayerRole

_SHOWN = 100
"""Columns of a step's first line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Where the build is read from."""

    text: str
    context: Path
    ignore_file: Path | None


@app.command("build")
def build_image(
    context: Annotated[Path, typer.Argument(help="The directory COPY and ADD read.")] = Path(),
    name: Annotated[str, typer.Option("--tag", "-t", metavar="NAME", help="Name of the image.")] = "",
    file: Annotated[
        str, typer.Option("--file", "-f", help="The Dockerfile; - is standard input. [default: CONTEXT/Dockerfile]")
    ] = "",
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="For an ARG; may be repeated.")
    ] = None,
    target: Annotated[str, typer.Option(help="Stage to build, by name or number; default: the last.")] = "",
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Leave out steps that were taken before.")] = True,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Whether RUN has outgoing IPv4, or loopback only.")
    ] = True,
    role: Annotated[FileRole, typer.Option(help="What the layers are for.")] = FileRole.BASE,
    memory: options.Memory = None,
    cpus: options.Cpus = None,
    as_json: Json = False,
) -> None:
    """Build an image from a Dockerfile, without Docker: each step runs in a sandbox and becomes a layer.

    Steps that were taken before are found by their content. Needs a platform, and a key that may build.
    """

    async def main(client: DSecClient) -> int:
        try:
            files = _read(context, file)
            built = await build(
                client,
                files.text,
                name=_checked(name),
                context=files.context,
                ignore_file=files.ignore_file,
                options=BuildOptions(arguments=_arguments(build_arg), target=target, network=network),
                role=LayerRole(role),
                cache=cache,
                limits=Limits(memory_limit_mb=memory, cpu_cores_limit=cpus),
                on_event=_show,
            )
        except OpenDSecError as error:
            print_error(error, as_json=as_json)
            return 1
        _print(built, as_json=as_json)
        return 0

    with_client(main)


def _checked(name: str) -> str:
    if not name:
        raise InvalidSpecError("name: the image needs one", detail={"field": "name"}, remedy="say -t NAME")
    return name


def _read(context: Path, file: str) -> _Files:
    if not context.is_dir():
        raise InvalidSpecError(f"context: {context} is not a directory", detail={"field": "context"})
    if file == "-":
        return _Files(text=sys.stdin.read(), context=context, ignore_file=None)
    path = Path(file) if file else context / "Dockerfile"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidSpecError(f"file: {path}: {why}", detail={"field": "file"}) from error
    return _Files(text=text, context=context, ignore_file=path.with_name(f"{path.name}.dockerignore"))


def _arguments(given: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise InvalidSpecError(f"build-arg: {one[:80]!r} is not NAME=value", detail={"field": "build-arg"})
        found[key] = value
    return found


def _show(event: BuildEvent) -> None:
    """On standard error, one line for what begins and one for what ends; programs' output as it comes."""
    match event:
        case StepBegun():
            text = " ".join(event.text.split())
            shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
            stage = f"{event.stage}: " if event.stage else ""
            note(f"[{event.number}/{event.total}] {stage}{shown}")
        case StepOutput():
            write_bytes(2, event.data)
        case StepDone(cached=True):
            note("  taken before")
        case StepDone():
            made = size(event.layer_bytes) if event.layer_bytes else "nothing changed"
            note(f"  {event.seconds:.1f} s, {made}")
        case BuildNote():
            note(f"note: {event.text}")


def _print(built: BuiltImage, *, as_json: bool) -> None:
    if as_json:
        print_json(built)
        return
    print_line(f"image {built.name}: {built.digest}, {built.steps} steps, {built.cached} of them taken before")
