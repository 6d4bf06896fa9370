"""Put an image into a registry, with skopeo: written as a layout into the store's staging area first, then copied.

skopeo sends what the registry has not got yet, and the manifest last, so a push that is interrupted leaves a few blobs
nobody refers to and no tag. The layout costs as much disk as the compressed image while the push lasts; its bytes are
the same every time, so layers that were pushed before are not sent again.
"""

from __future__ import annotations

from opendsec.errors import InvalidSpecError
from opendsec.store.exporters import Exported, export_image
from opendsec.store.exporters.compression import Compression
from opendsec.store.exporters.target import Target, TargetKind
from opendsec.store.images import ImageStore
from opendsec.store.importers.skopeo import RegistryAccess, Skopeo
from opendsec.store.importers.source import parse_source
from opendsec.store.progress import OnProgress, Progress, quietly


def push_image(
    store: ImageStore,
    name: str,
    target: str,
    *,
    access: RegistryAccess,
    compression: Compression = Compression.GZIP,
    on_progress: OnProgress = quietly,
) -> Exported:
    """Push an image to `docker://HOST/NAME[:TAG]`, whatever the tag meant before.

    Raises as `export_image` does, and UnauthorizedError, ConnectError, CapacityError, NodeError of the registry.
    """
    reference = _reference(target)
    with store.staging() as work:
        layout = work / "layout"
        exported = export_image(
            store,
            name,
            Target(kind=TargetKind.OCI, path=layout),
            compression=compression,
            on_progress=on_progress,
        )
        (work / "skopeo").mkdir()
        skopeo = Skopeo(reference, access, work / "skopeo", on_progress=on_progress)
        total = sum(layer.blob.size_bytes for layer in exported.layers)
        on_progress(Progress(phase="sending layers", total=total))
        skopeo.tried(
            lambda: skopeo.run(
                "copy",
                "--quiet",
                "--preserve-digests",
                *skopeo.options(prefix="dest-"),
                f"oci:{layout}",
                f"docker://{reference}",
            )
        )
    return exported


def _reference(target: str) -> str:
    host, slash, _ = target.removeprefix("docker://").partition("/")
    if not target.startswith("docker://") or not (host and slash) or "@" in target:
        raise InvalidSpecError(
            f"target: {target!r} is no tag of a registry",
            detail={"field": "target"},
            remedy="give docker://HOST/NAME:TAG",
        )
    return parse_source(target).ref
