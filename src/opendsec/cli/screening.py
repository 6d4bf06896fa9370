"""`opendsec screen`: a picture of a full VM's display, or the display itself in a browser."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from opendsec import DSecClient
from opendsec.cli.output import Json, note, print_json, print_line, write_bytes
from opendsec.cli.session import with_client


def screen(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="A full VM.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the PNG goes; - is standard output.")
    ] = "",
    view: Annotated[
        bool, typer.Option("--view", help="Print an address that shows the display in a browser instead.")
    ] = False,
    browse: Annotated[bool, typer.Option("--open", help="Show it in this machine's browser.")] = False,
    seconds: Annotated[float, typer.Option(help="How long that address is good.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Take a picture of a full VM's display, or show the display in a browser."""
    if output and (view or browse):
        raise typer.BadParameter("a picture or a view, not both", param_hint="--output")
    if not (output or view or browse):
        output = f"{sandbox}.png"
    if output == "-" and os.isatty(1):
        raise typer.BadParameter("a PNG is nothing for a terminal; name a file", param_hint="--output")

    async def main(client: DSecClient) -> int:
        found = await client.connect(sandbox)
        if output:
            _write(output, await found.screen.screenshot(), as_json=as_json)
            return 0
        address = await found.screen.view(seconds=seconds)
        if as_json:
            print_json({"url": address})
        else:
            print_line(address)
        if browse and not webbrowser.open(address):
            note("opendsec: no browser was found on this machine; open the address in one")
            return 1
        return 0

    with_client(main)


def _write(output: str, png: bytes, *, as_json: bool) -> None:
    if output == "-":
        write_bytes(1, png)
        return
    Path(output).write_bytes(png)
    if as_json:
        print_json({"file": output, "bytes": len(png)})
    else:
        print_line(output)
