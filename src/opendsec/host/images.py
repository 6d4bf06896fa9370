"""`opendsec image build-debian`: make a base image on this machine. And what is printed of an image that was made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from opendsec.cli.output import Json, print_json, print_line, size
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown
from opendsec.model.image import Image
from opendsec.store.debian import BASE_PACKAGES, DebianRecipe, build_debian

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

Name = Annotated[str, typer.Argument(help="Name of the image.")]
Replace = Annotated[bool, typer.Option("--replace", help="Let the name mean the new image if it is taken.")]


@app.command("build-debian")
def build(
    name: Name,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Packages beyond the minimal system, comma-separated; may be repeated."),
    ] = None,
    suite: Annotated[str, typer.Option(help="Debian release.")] = "bookworm",
    mirror: Annotated[str, typer.Option(help="Mirror to use instead of this machine's own.")] = "",
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build even if the same request was built before.")
    ] = False,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Build a Debian image with mmdebstrap. The same request again is answered from the store."""
    packages = BASE_PACKAGES if include is None else _split(include)
    recipe = DebianRecipe(suite=suite, include=packages, mirror=mirror)
    proxies = {key: value for key, value in _environment().items() if key in PROXIES}
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        image = build_debian(
            open_store(), name, recipe, proxies=proxies, rebuild=rebuild, replace=replace, on_progress=on_progress
        )
    print_image(image, as_json=as_json)


def to_json(image: Image) -> dict[str, object]:
    """An image as JSON types."""
    return asdict(image) | {"size_bytes": image_size(image)}


def image_size(image: Image) -> int:
    """Bytes of all layers."""
    return sum(layer.size_bytes for layer in image.layers)


def _environment() -> Mapping[str, str]:
    return os.environ


def _split(include: list[str]) -> tuple[str, ...]:
    return tuple(package for item in include for package in item.replace(",", " ").split())


def print_image(image: Image, *, as_json: bool) -> None:
    """What was made."""
    if as_json:
        print_json(to_json(image))
    else:
        print_line(f"image {image.name}: {image.digest}, {size(image_size(image))}")
