"""What the store writes about an image: the manifest (its content, whose digest is the image's) and the tag (its
name). Pure.

A manifest holds layers and config only, in one canonical form, so the same content has the same digest whoever made
it and whenever. Name, time and source belong to the tag. Text that is no UTF-8 (Linux allows it in environments)
survives as escaped surrogates. Unknown schema numbers are refused, not guessed at.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opendsec.errors import ImageInvalidError
from opendsec.model.image import (
    Blob,
    Devices,
    DiskFormat,
    Firmware,
    Graphics,
    Image,
    ImageConfig,
    Layer,
    LayerRole,
    Machine,
)

SCHEMA = 2
_READABLE = frozenset({1, 2})
"""Schema 1 knew layers of one file, and no references."""
_NOT_OURS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What bytes that are no manifest, or no tag, make of being read as one; they may come from a store that lies."""
MAX_CPUS = 255
MAX_CPUS = 255
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


def layer_digest(meta: Blob, data: Blob) -> str:
    """Names a layer of two files: the digest of a line of text with the digest of either.

    Neither alone would do: files of other content and the same names, sizes and times have the same metadata.
    """
    return digest_of(f"layer {meta.digest} {data.digest}\n".encode("ascii"))


def two_file_layer(meta: Blob, data: Blob, *, role: LayerRole) -> Layer:
    """The layer of these two files."""
    return Layer(
        digest=layer_digest(meta, data),
        size_bytes=meta.size_bytes + data.size_bytes,
        role=role,
        meta=meta,
        data=data,
    )


def tag_file_name(name: str) -> str:
    """An image name as one file name of the same length: names may hold `/` but never `+`."""
    return name.replace("/", "+")


def name_of_tag_file(file_name: str) -> str:
    """The image name a tag file stands for."""
    return file_name.replace("+", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of an image."""

    layers: tuple[Layer, ...]
    """Lowest first."""
    config: ImageConfig
    base: str = ""
    toolkits: tuple[str, ...] = ()


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes. Order of layers, environment and arguments counts; order of labels does not."""
    config = manifest.config
    return _canonical(
        {
            "schema": SCHEMA,
            "base": manifest.base,
            "layers": [_encode_layer(layer) for layer in manifest.layers],
            "toolkits": list(manifest.toolkits),
            "config": {
                "env": [[name, value] for name, value in config.env.items()],
                "workdir": config.workdir,
                "user": config.user,
                "entrypoint": list(config.entrypoint),
                "cmd": list(config.cmd),
                "labels": dict(config.labels),
                **({} if config.machine is None else {"machine": asdict(config.machine)}),
            },
        }
    )


def decode_manifest(content: bytes) -> Manifest:
    """The manifest. ImageInvalidError when the bytes are none of a schema that is known."""
    try:
        fields = json.loads(content)
        _check_schema(fields)
        return Manifest(
            layers=tuple(_decode_layer(one) for one in fields["layers"]),
            config=_decode_config(fields["config"]),
            base=str(fields.get("base", "")),
            toolkits=tuple(str(one) for one in fields.get("toolkits", ())),
        )
    except _NOT_OURS as error:
        raise ImageInvalidError(f"the store holds a damaged manifest: {error!r}") from error


def encode_tag(tag: Tag) -> bytes:
    """The bytes of a tag file."""
    return _canonical({"schema": SCHEMA, "digest": tag.digest, "created_at": tag.created_at, "source": tag.source})


def decode_tag(content: bytes, *, name: str) -> Tag:
    """The tag. ImageInvalidError naming the image when the bytes are no tag."""
    try:
        fields = json.loads(content)
        _check_schema(fields)
        hex_of(fields["digest"])
        tag = Tag(digest=fields["digest"], created_at=float(fields["created_at"]), source=str(fields["source"]))
        if not math.isfinite(tag.created_at):
            raise ValueError(f"created_at is {tag.created_at}")
        return tag
    except _NOT_OURS as error:
        raise ImageInvalidError(f"the tag of image {name!r} is damaged: {error!r}") from error


def to_image(name: str, tag: Tag, manifest: bytes) -> Image:
    """A tag and its manifest as one value."""
    decoded = decode_manifest(manifest)
    return Image(
        name=name,
        digest=tag.digest,
        layers=decoded.layers,
        config=decoded.config,
        created_at=tag.created_at,
        source=tag.source,
        base=decoded.base,
        toolkits=decoded.toolkits,
    )


def _encode_layer(layer: Layer) -> dict[str, object]:
    fields: dict[str, object] = {"digest": layer.digest, "size_bytes": layer.size_bytes, "role": layer.role.value}
    for key, blob in (("meta", layer.meta), ("data", layer.data)):
        if blob is not None:
            fields[key] = {"digest": blob.digest, "size_bytes": blob.size_bytes}
    return fields


def _decode_layer(fields: Mapping[str, Any]) -> Layer:
    role = LayerRole(fields["role"])
    if "meta" not in fields and "data" not in fields:
        only = _decode_blob(fields)
        return Layer(digest=only.digest, size_bytes=only.size_bytes, role=role)
    layer = two_file_layer(_decode_blob(fields["meta"]), _decode_blob(fields["data"]), role=role)
    if layer.digest != fields["digest"]:
        raise ValueError(f"layer {fields['digest']!r} does not have the digest of its two files")
    return layer


def _decode_blob(fields: Mapping[str, Any]) -> Blob:
    hex_of(fields["digest"])
    blob = Blob(digest=fields["digest"], size_bytes=int(fields["size_bytes"]))
    if blob.size_bytes < 0:
        raise ValueError(f"size_bytes is {blob.size_bytes}")
    return blob


def _check_schema(fields: Mapping[str, Any]) -> None:
    if fields["schema"] not in _READABLE:
        raise ValueError(f"schema {fields['schema']!r} is not {SCHEMA}")


def _decode_config(fields: Mapping[str, Any]) -> ImageConfig:
    env, labels = dict(fields["env"]), dict(fields["labels"])
    entrypoint, cmd = tuple(fields["entrypoint"]), tuple(fields["cmd"])
    texts = (fields["workdir"], fields["user"], *entrypoint, *cmd, *env, *env.values(), *labels, *labels.values())
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the config holds something else than text")
    return ImageConfig(
        env=env,
        workdir=fields["workdir"],
        user=fields["user"],
        entrypoint=entrypoint,
        cmd=cmd,
        labels=labels,
        machine=_decode_machine(fields["machine"]) if "machine" in fields else None,
    )


def _decode_machine(fields: Mapping[str, Any]) -> Machine:
    machine = Machine(
        format=DiskFormat(fields["format"]),
        virtual_bytes=int(fields["virtual_bytes"]),
        firmware=Firmware(fields["firmware"]),
        tpm=bool(fields["tpm"]),
        agent=bool(fields["agent"]),
        graphics=Graphics(fields["graphics"]),
        devices=Devices(fields["devices"]),
        memory_mb=int(fields["memory_mb"]),
        cpus=int(fields["cpus"]),
    )
    if machine.virtual_bytes <= 0 or machine.memory_mb <= 0 or not 1 <= machine.cpus <= MAX_CPUS:
        raise ValueError("a machine without disk, memory or processors")
    return machine


def _canonical(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
