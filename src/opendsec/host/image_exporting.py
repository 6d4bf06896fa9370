"""`opendsec image export` and `opendsec image push`: images leave the store, for other tools and machines."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.cli.output import Json, note, print_json, print_line, size
from opendsec.host.image_group import app, errors_shown, open_store, progress_shown
from opendsec.host.image_importing import Authfile, CredsFile, TlsVerify, registry_access
from opendsec.store.exporters import Exported, export_image
from opendsec.store.exporters.compression import Compression
from opendsec.store.exporters.registry import push_image
from opendsec.store.exporters.target import parse_target

Name = Annotated[str, typer.Argument(help="Name of the image.")]
Packing = Annotated[Compression, typer.Option("--compression", help="How layers are compressed.")]


@app.command("export")
def export(
    name: Name,
    target: Annotated[
        str, typer.Argument(help="FILE (an OCI archive), oci:DIR, oci-archive:FILE or docker-archive:FILE.")
    ],
    compression: Packing = Compression.GZIP,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite FILE if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write an image, with all it refers to, as an OCI layout or an archive that other tools read."""
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        place = parse_target(target)
        exported = export_image(
            open_store(), name, place, compression=compression, replace=replace, on_progress=on_progress
        )
    print_exported(exported, str(place), as_json=as_json)


@app.command("push")
def push(
    name: Name,
    target: Annotated[str, typer.Argument(help="docker://HOST/NAME[:TAG] in a registry.")],
    compression: Packing = Compression.GZIP,
    authfile: Authfile = None,
    creds_file: CredsFile = "",
    tls_verify: TlsVerify = True,
    as_json: Json = False,
) -> None:
    """Put an image, with all it refers to, into a registry. Layers it has already are not sent again."""
    with errors_shown(as_json), progress_shown(f"image {name}") as on_progress:
        access = registry_access(authfile, creds_file, tls_verify=tls_verify)
        exported = push_image(
            open_store(), name, target, access=access, compression=compression, on_progress=on_progress
        )
    print_exported(exported, target, as_json=as_json)


def print_exported(exported: Exported, target: str, *, as_json: bool) -> None:
    """What went where; sockets that were left out are named on standard error."""
    for path in exported.left_out:
        note(f"opendsec: left out, it is a socket: {path}")
    written = sum(layer.blob.size_bytes for layer in exported.layers)
    if as_json:
        print_json(
            {
                "target": target,
                "image": exported.image.digest,
                "manifest": exported.manifest.digest,
                "layers": [
                    {
                        "layer": one.layer.digest,
                        "role": one.layer.role.value,
                        "digest": one.blob.digest,
                        "size_bytes": one.blob.size_bytes,
                    }
                    for one in exported.layers
                ],
                "left_out": list(exported.left_out),
            }
        )
        return
    count = len(exported.layers)
    print_line(f"{target}: {exported.manifest.digest}, {count} {'layer' if count == 1 else 'layers'}, {size(written)}")
