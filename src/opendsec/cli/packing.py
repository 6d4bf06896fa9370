"""`opendsec image pack`: what a sandbox has written becomes an image, wherever the platform is."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli.image_group import app
from opendsec.cli.output import Json, note, print_error, print_json, print_line, progress, size
from opendsec.cli.percent import Percent
from opendsec.cli.session import with_client
from opendsec.errors import OpenDSecError
from opendsec.model.image import FileRole, LayerRole
from opendsec.wire.contracts import PackResult

_SHOWN = 10
"""Paths left out that are named."""


@app.command("pack")
def pack(
    sandbox_id: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox, running or paused.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new image.")],
    scrub: Annotated[
        list[str] | None,
        typer.Option("--scrub", metavar="PATTERN", help="Leave out what matches, too; may be repeated."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="PATTERN", help="Keep what matches, whatever else does; may be repeated."),
    ] = None,
    no_defaults: Annotated[
        bool,
        typer.Option("--no-defaults", help="Leave out only what --scrub says, no histories, caches, credentials."),
    ] = False,
    role: Annotated[FileRole, typer.Option(help="What the new layer is for.")] = FileRole.WORKSPACE,
    alone: Annotated[
        bool, typer.Option("--alone", help="An image of the new layer alone, to lay over others.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Also when the name means another image.")] = False,
    as_json: Json = False,
) -> None:
    """Make an image of what a sandbox has written. The sandbox goes on.

    Printed is the image's reference, which always means this very image. Needs a key that may build.
    """

    async def main(client: DSecClient) -> int:
        try:
            sandbox = await client.connect(sandbox_id)
            with progress(f"packing {sandbox_id}", 100) as advance:
                packed = await sandbox.pack_diff(
                    name,
                    role=LayerRole(role),
                    alone=alone,
                    scrub=scrub or (),
                    keep=keep or (),
                    defaults=not no_defaults,
                    replace=replace,
                    on_progress=Percent(advance).show,
                )
        except OpenDSecError as error:
            print_error(error, as_json=as_json)
            return 1
        if as_json:
            print_json(packed.details)
            return 0
        for line in sentences(packed.details):
            note(line)
        print_line(packed)
        return 0

    with_client(main)


def sentences(result: PackResult) -> list[str]:
    """What a person wants to know about it."""
    told = []
    if result.changed:
        amount = f"{result.files} entries, {size(result.bytes)}" if result.files else size(result.layer_bytes)
        told.append(f"packed {amount} in {result.duration_s:.2f} s; it stood still for {result.frozen_ms:.0f} ms")
    else:
        told.append("nothing has changed: no image was made, what follows is the source's")
    if result.crash_consistent:
        told.append("its disk is as after a power cut: nobody inside made its file systems whole first")
    if result.left_out:
        shown = ", ".join(result.left_out_paths[:_SHOWN])
        more = ", …" if len(result.left_out_paths) > _SHOWN else ""
        told.append(f"left out {result.left_out}: {shown}{more}")
    if result.fell_back:
        shown = ", ".join(result.fell_back_paths[:_SHOWN])
        told.append(f"as in the source image again, not as in the sandbox: {shown}")
    return told
