"""`opendsec image import` and `opendsec image pull`: images come in from directories, archives, layouts, registries."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from opendsec.cli.output import Json
from opendsec.errors import InvalidSpecError
from opendsec.host.disk_importing import (
    Disk,
    OfFormat,
    WithAgent,
    WithCpus,
    WithDevices,
    WithFirmware,
    WithGraphics,
    WithMemory,
    WithTpm,
    machine_of,
    refuse_of_trees,
)
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown
from opendsec.host.images import Name, Replace, print_image
from opendsec.model.ids import check_image_name
from opendsec.model.image import Devices, FileRole, Firmware, Graphics, ImageConfig, LayerRole
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.grouping import COLLAPSE_BYTES
from opendsec.store.importers.oci_config import Platform
from opendsec.store.importers.skopeo import RegistryAccess
from opendsec.store.importers.source import Source, default_name, parse_source

Role = Annotated[FileRole | None, typer.Option(help="What its layers are for; default: as they say, else base.")]
On = Annotated[str, typer.Option("--on", help="Image it lies on: NAME, or NAME@sha256:… for that very content.")]
Toolkits = Annotated[
    list[str] | None, typer.Option("--toolkit", help="Toolkit a sandbox gets unless it asks for others; repeatable.")
]
Wanted = Annotated[
    str,
    typer.Option("--platform", help="Of an image for several: linux/arm64, linux/arm/v7, …; default: this machine's."),
]
CollapseMb = Annotated[
    int, typer.Option(min=0, help="Layers are taken together from the bottom until they have so many MiB unpacked.")
]
Authfile = Annotated[
    Path | None,
    typer.Option(help="Accounts of registries, as `skopeo login` writes them; default: where skopeo looks."),
]
CredsFile = Annotated[
    str, typer.Option("--creds-file", help="File with USER:PASSWORD for the registry; - is standard input.")
]
TlsVerify = Annotated[bool, typer.Option(help="Whether the registry must have a certificate that is trusted.")]


@app.command("import")
def import_source(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            help="A directory, an archive, oci:DIR[:REF], oci-archive:FILE[:REF], docker-archive:FILE[:REF] "
            "or docker://HOST/NAME[:TAG|@DIGEST]; dir:DIR and tar:FILE are never taken for an image."
        ),
    ],
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=value for commands; may be repeated.")] = None,
    workdir: Annotated[str | None, typer.Option(help="Working directory of commands.")] = None,
    user: Annotated[str | None, typer.Option(help="User of commands: name, uid, or user:group.")] = None,
    role: Role = None,
    on: On = "",
    toolkit: Toolkits = None,
    platform: Wanted = "",
    collapse_mb: CollapseMb = COLLAPSE_BYTES >> 20,
    authfile: Authfile = None,
    creds_file: CredsFile = "",
    tls_verify: TlsVerify = True,
    disk: Disk = False,
    firmware: WithFirmware = Firmware.BIOS,
    tpm: WithTpm = False,
    agent: WithAgent = False,
    graphics: WithGraphics = Graphics.STD,
    devices: WithDevices = Devices.PC,
    memory_mb: WithMemory = 1024,
    cpus: WithCpus = 1,
    disk_format: OfFormat = None,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Import an image. --env, --workdir and --user are for directories and archives; an OCI image brings its own."""
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        if disk:
            unpacked = {"env": env, "workdir": workdir, "user": user, "role": role, "on": on, "toolkit": toolkit}
            refuse_of_trees({**unpacked, "platform": platform, "authfile": authfile, "creds-file": creds_file})
            machine = machine_of(firmware, graphics, devices, tpm=tpm, agent=agent, memory_mb=memory_mb, cpus=cpus)
            whole = DiskRequest(name=name, path=Path(source), machine=machine, format=disk_format, replace=replace)
            return print_image(import_disk(open_store(), whole, on_progress=on_progress), as_json=as_json)
        request = ImportRequest(
            name=check_image_name(name, field="name"),
            source=parse_source(source),
            config=_given_config(env, workdir, user),
            replace=replace,
            role=None if role is None else LayerRole(role),
            on=check_image_name(on, field="on") if on else "",
            toolkits=_references(toolkit),
            platform=Platform.parse(platform) if platform else None,
            collapse_bytes=collapse_mb << 20,
            access=registry_access(authfile, creds_file, tls_verify=tls_verify),
        )
        image = import_image(open_store(), request, on_progress=on_progress)
    return print_image(image, as_json=as_json)


@app.command("pull")
def pull(
    first: Annotated[str, typer.Argument(metavar="[NAME]", help="Name of the image; default: its path and tag.")],
    second: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="docker://HOST/NAME[:TAG|@DIGEST] in a registry.")
    ] = "",
    role: Role = None,
    on: On = "",
    toolkit: Toolkits = None,
    platform: Wanted = "",
    collapse_mb: CollapseMb = COLLAPSE_BYTES >> 20,
    authfile: Authfile = None,
    creds_file: CredsFile = "",
    tls_verify: TlsVerify = True,
    replace: Replace = False,
    as_json: Json = False,
) -> None:
    """Fetch an image from a registry. Layers the store has been given before are not fetched again."""
    with errors_shown(as_json):
        source = in_registry(second or first)
        name = check_image_name(first if second else default_name(source), field="name")
        with progress_shown(f"image {name}") as on_progress:
            request = ImportRequest(
                name=name,
                source=source,
                replace=replace,
                role=None if role is None else LayerRole(role),
                on=check_image_name(on, field="on") if on else "",
                toolkits=_references(toolkit),
                platform=Platform.parse(platform) if platform else None,
                collapse_bytes=collapse_mb << 20,
                access=registry_access(authfile, creds_file, tls_verify=tls_verify),
            )
            image = import_image(open_store(), request, on_progress=on_progress)
    print_image(image, as_json=as_json)


def in_registry(text: str) -> Source:
    """The image of a registry that is meant. InvalidSpecError for all else, also for what is a file here or nothing."""
    if not text.startswith("docker://"):
        raise InvalidSpecError(
            f"source: {text[:120]!r} does not say a registry",
            detail={"field": "source"},
            remedy="give docker://HOST/NAME:TAG with the registry's host; `opendsec image import` takes files",
        )
    return parse_source(text)


def registry_access(authfile: Path | None, creds_file: str, *, tls_verify: bool) -> RegistryAccess:
    """What the options say about registries. InvalidSpecError."""
    if creds_file and authfile is not None:
        raise InvalidSpecError("creds-file: there is an --authfile too", detail={"field": "creds-file"})
    if authfile is not None and not authfile.is_file():
        raise InvalidSpecError(f"authfile: {authfile} is not a file", detail={"field": "authfile"})
    creds = ""
    if creds_file:
        text = sys.stdin.read() if creds_file == "-" else Path(creds_file).read_text("utf-8")
        creds = text.strip("\r\n")
    return RegistryAccess(authfile=authfile, creds=creds, tls_verify=tls_verify, environment=dict(os.environ))


def _references(toolkits: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(check_image_name(one, field="toolkit") for one in toolkits or ())


def _given_config(env: list[str] | None, workdir: str | None, user: str | None) -> ImageConfig | None:
    """None when nothing was said, so that an OCI image's own config is not mistaken for overridden."""
    if env is None and workdir is None and user is None:
        return None
    variables = {}
    for item in env or []:
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidSpecError(f"env: {item[:80]!r} is not NAME=value", detail={"field": "env"})
        variables[name] = value
    return ImageConfig(env=variables, workdir=workdir or "/", user=user or "")
