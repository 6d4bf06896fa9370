"""What the store writes about an image: the manifest (its content, whose digest is the image's) and the tag (its
name). Pure.

A manifest holds layers and config only, in one canonical form, so the same content has the same digest whoever made
it and whenever. Name, time and source belong to the tag. Text that is no UTF-8 (Linux allows it in environments)
survives as escaped surrogates. Unknown schema numbers are refused, not guessed at.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole

SCHEMA = 1
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A name's present meaning."""

    digest: str
    created_at: float
    source: str


def hex_of(digest: str) -> str:
    """The hex part of `sha256:<hex>`. ImageInvalidError for anything else, so a digest can never be a path."""
    match = _DIGEST.match(digest)
    if match is None:
        raise ImageInvalidError(f"{digest[:90]!r} is not a sha256 digest", detail={"field": "digest"})
    return match.group(1)


def digest_of(content: bytes) -> str:
    """`sha256:<hex>` of these bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def tag_file_name(name: str) -> str:
    """An image name as one file name of the same length: names may hold `/` but never `+`."""
    return name.replace("/", "+")


def name_of_tag_file(file_name: str) -> str:
    """The image name a tag file stands for."""
    return file_name.replace("+", "/")


def encode_manifest(layers: tuple[Layer, ...], config: ImageConfig) -> bytes:
    """The canonical bytes. Order of layers, environment and arguments counts; order of labels does not."""
    return _canonical(
        {
            "schema": SCHEMA,
            "layers": [
                {"digest": layer.digest, "size_bytes": layer.size_bytes, "role": layer.role.value} for layer in layers
            ],
            "config": {
                "env": [[name, value] for name, value in config.env.items()],
                "workdir": config.workdir,
                "user": config.user,
                "entrypoint": list(config.entrypoint),
                "cmd": list(config.cmd),
                "labels": dict(config.labels),
            },
        }
    )


def decode_manifest(content: bytes) -> tuple[tuple[Layer, ...], ImageConfig]:
    """Layers, lowest first, and config. ImageInvalidError when the bytes are no manifest of this schema."""
    try:
        fields = json.loads(content)
        _check_schema(fields)
        layers = tuple(
            Layer(digest=one["digest"], size_bytes=one["size_bytes"], role=LayerRole(one["role"]))
            for one in fields["layers"]
        )
        return layers, _decode_config(fields["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise ImageInvalidError(f"the store holds a damaged manifest: {error!r}") from error


def encode_tag(tag: Tag) -> bytes:
    """The bytes of a tag file."""
    return _canonical({"schema": SCHEMA, "digest": tag.digest, "created_at": tag.created_at, "source": tag.source})


def decode_tag(content: bytes, *, name: str) -> Tag:
    """The tag. ImageInvalidError naming the image when the bytes are no tag."""
    try:
        fields = json.loads(content)
        _check_schema(fields)
        return Tag(digest=fields["digest"], created_at=float(fields["created_at"]), source=str(fields["source"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ImageInvalidError(f"the tag of image {name!r} is damaged: {error!r}") from error


def to_image(name: str, tag: Tag, manifest: bytes) -> Image:
    """A tag and its manifest as one value."""
    layers, config = decode_manifest(manifest)
    return Image(
        name=name, digest=tag.digest, layers=layers, config=config, created_at=tag.created_at, source=tag.source
    )


def _check_schema(fields: Mapping[str, Any]) -> None:
    if fields["schema"] != SCHEMA:
        raise ValueError(f"schema {fields['schema']!r} is not {SCHEMA}")


def _decode_config(fields: Mapping[str, Any]) -> ImageConfig:
    return ImageConfig(
        env=dict(fields["env"]),
        workdir=fields["workdir"],
        user=fields["user"],
        entrypoint=tuple(fields["entrypoint"]),
        cmd=tuple(fields["cmd"]),
        labels=fields["labels"],
    )


def _canonical(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
