"""The JSON documents of an exported image: configuration, manifest, index, and Docker's own list. Pure.

They follow from the content of the image alone (no clock, no name of a machine), so the same image exported twice has
the same digest. Roles of layers are annotations (`opendsec.store.annotations`). Refused: an environment, argument or
label that is no UTF-8, which JSON cannot hold.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, ImageConfig, Layer
from opendsec.store.annotations import LAYER_ROLE
from opendsec.store.exporters.compression import MEDIA_TYPES, Compression
from opendsec.store.importers.oci_config import REF_NAME, oci_architecture

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_DOCKER_NAME = re.compile(
    r"(?:[a-z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A blob that lies where it was exported to."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenLayer:
    """A layer that lies there, compressed."""

    layer: Layer
    blob: Written
    diff_id: str
    """`sha256:<hex>` of the uncompressed archive."""


def encode_config(image: Image, layers: Sequence[WrittenLayer]) -> bytes:
    """The OCI configuration. ImageInvalidError when a text in it is no UTF-8."""
    fields = {
        "architecture": oci_architecture(platform.machine()),
        "os": "linux",
        "config": _config(image.config),
        "rootfs": {"type": "layers", "diff_ids": [one.diff_id for one in layers]},
        "history": [{"created_by": f"opendsec {one.layer.role.value} layer {one.layer.digest}"} for one in layers],
    }
    return _json(fields)


def _config(config: ImageConfig) -> Mapping[str, object]:
    """Only what is said, as others write it."""
    fields = {
        "User": config.user,
        "Env": [f"{name}={value}" for name, value in config.env.items()],
        "Entrypoint": list(config.entrypoint),
        "Cmd": list(config.cmd),
        "WorkingDir": config.workdir,
        "Labels": dict(config.labels),
    }
    return {key: value for key, value in fields.items() if value}


def encode_manifest(config: Written, layers: Sequence[WrittenLayer], compression: Compression) -> bytes:
    """The OCI manifest of these blobs."""
    return _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(CONFIG_TYPE, config),
            "layers": [
                _descriptor(MEDIA_TYPES[compression], one.blob, annotations={LAYER_ROLE: one.layer.role.value})
                for one in layers
            ],
        }
    )


def encode_index(name: str, manifest: Written) -> bytes:
    """`index.json` of a layout that holds one image."""
    entry = _descriptor(MANIFEST_TYPE, manifest, annotations={REF_NAME: name})
    entry["platform"] = {"architecture": oci_architecture(platform.machine()), "os": "linux"}
    return _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]})


def encode_docker_list(name: str, config: Written, layers: Sequence[WrittenLayer]) -> bytes:
    """`manifest.json` as `docker load` reads it."""
    tag = docker_tag(name)
    return _json(
        [
            {
                "Config": blob_path(config.digest),
                "RepoTags": [tag] if tag else None,
                "Layers": [blob_path(one.blob.digest) for one in layers],
            }
        ]
    )


def docker_tag(name: str) -> str:
    """`debian` → `debian:latest`; empty when Docker would not take the name."""
    if not _DOCKER_NAME.match(name):
        return ""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def blob_path(digest: str) -> str:
    """Where a blob lies in a layout."""
    algorithm, _, encoded = digest.partition(":")
    return f"blobs/{algorithm}/{encoded}"


def _descriptor(media_type: str, blob: Written, *, annotations: Mapping[str, str] | None = None) -> dict[str, object]:
    fields: dict[str, object] = {"mediaType": media_type, "digest": blob.digest, "size": blob.size_bytes}
    return fields | ({"annotations": dict(annotations)} if annotations else {})


def _json(fields: object) -> bytes:
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 40) : error.start].encode("utf-8", "replace").decode()
        raise ImageInvalidError(
            f"the configuration holds bytes that are no UTF-8, which an OCI image cannot say, after {around!r}",
            detail={"field": "config"},
        ) from error
