"""`opendsec image build-desktop`: a Debian desktop as the image of a disk, made on this machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from opendsec.cli.output import Json
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown
from opendsec.host.images import PROXIES, Replace, print_image
from opendsec.linux.launch import GUEST_PATH
from opendsec.model.ids import check_image_name
from opendsec.store.desktop import DesktopRecipe, build_desktop


@app.command("build-desktop")
def build(
    name: Annotated[str, typer.Argument(help="Name of the image.")] = "desktop",
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Further packages, comma-separated; may be repeated.")
    ] = None,
    suite: Annotated[str, typer.Option(help="Debian release.")] = "bookworm",
    mirror: Annotated[str, typer.Option(help="Mirror to use instead of this machine's own.")] = "",
    memory_mb: Annotated[int, typer.Option(min=256, help="MiB of a sandbox that names no limit.")] = 1024,
    cpus: Annotated[int, typer.Option(min=1, max=255, help="Of a sandbox that names no limit.")] = 2,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Build a Debian desktop for full VMs: X, openbox, a terminal, and the guest agent. Takes minutes."""
    packages = tuple(package for item in include or () for package in item.replace(",", " ").split())
    proxies = {key: value for key, value in os.environ.items() if key in PROXIES}
    recipe = DesktopRecipe(
        suite=suite, include=packages, mirror=mirror, memory_mb=memory_mb, cpus=cpus, proxies=proxies
    )
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        image = build_desktop(
            open_store(),
            check_image_name(name, field="name"),
            recipe,
            agent=GUEST_PATH,
            replace=replace,
            on_progress=on_progress,
        )
    print_image(image, as_json=as_json)
