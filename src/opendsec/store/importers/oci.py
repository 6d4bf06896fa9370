"""Read an OCI image layout: find the image, verify every byte of what describes it.

Index (nested ones too) → manifest of the platform → configuration → layers. Each blob must have the size and digest
its descriptor says. What the layers hold is `convert`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opendsec.errors import ImageInvalidError
from opendsec.model.image import ImageConfig, LayerRole
from opendsec.store.annotations import LAYER_ROLE
from opendsec.store.importers.files import ImageFiles, check_digest, decode_object
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci_config import (
    INDEX_TYPES,
    LAYER_TYPE,
    MANIFEST_TYPES,
    Descriptor,
    Platform,
    check_platform,
    choose,
    diff_ids,
    parse_config,
    parse_descriptor,
    parse_list,
)

_MAX_NESTING = 8
_CONFIG_TYPES = frozenset(
    {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayer:
    """One layer of an image as it came: an archive, perhaps compressed, in a file."""

    label: str
    """`layer 2 of 5 (sha256:…)`, for errors and progress."""
    diff_id: str
    """Digest of the uncompressed archive."""
    name: str
    """Of its file among the image's files."""
    blob: Descriptor | None = None
    """Size and digest of the file; a Docker archive says neither."""
    role: LayerRole | None = None
    """As the image itself says; None when it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OciImage:
    """One image: what to apply, lowest layer first, and the defaults of commands."""

    files: ImageFiles
    layers: tuple[ImageLayer, ...]
    config: ImageConfig


class Layout:
    """An OCI image layout directory."""

    def __init__(self, directory: Path, *, limits: Limits) -> None:
        self._files = ImageFiles(directory)
        self._limits = limits

    def find(self, ref: str = "", *, platform: Platform | None = None) -> OciImage:
        """The image meant by `ref` (see `choose`) for a platform, or this machine's.

        Raises ImageInvalidError, DigestMismatchError.
        """
        platform = platform or Platform.here()
        content = self._files.small("oci-layout", limit=self._limits.max_json_bytes)
        version = decode_object(content, where="oci-layout").get("imageLayoutVersion")
        if version != "1.0.0":
            raise ImageInvalidError(f"oci-layout: version {version!r} is not 1.0.0")
        index = decode_object(self._files.small("index.json", limit=self._limits.max_json_bytes), where="index.json")
        manifest, where = find_manifest(index, "index.json", self._blob, ref=ref, platform=platform)
        return read_manifest(manifest, where, self._blob, self._files, platform=platform, limits=self._limits)

    def _blob(self, descriptor: Descriptor) -> bytes:
        return self._files.small(blob_name(descriptor), limit=self._limits.max_json_bytes)


Fetch = Callable[[Descriptor], bytes]
"""The bytes of a small blob, not yet checked."""


def blob_name(descriptor: Descriptor) -> str:
    """Where a blob lies in a layout; the digest was checked to be one, so the path stays inside."""
    algorithm, _, encoded = descriptor.digest.partition(":")
    return f"blobs/{algorithm}/{encoded}"


def find_manifest(
    index: Mapping[str, Any], where: str, fetch: Fetch, *, ref: str, platform: Platform
) -> tuple[Mapping[str, Any], str]:
    """The manifest an index leads to, and its name for errors."""
    for _ in range(_MAX_NESTING):
        entry = choose(parse_list(index, "manifests", where=where), ref=ref, platform=platform, where=where)
        where, ref = entry.digest[:19], ""
        fields = _checked(entry, fetch)
        said = fields.get("mediaType", entry.media_type)
        if said != entry.media_type:
            raise ImageInvalidError(f"{where} calls itself {said!r}, its index {entry.media_type!r}")
        if entry.media_type in MANIFEST_TYPES:
            return fields, where
        assert entry.media_type in INDEX_TYPES
        index = fields
    raise ImageInvalidError(f"index.json: indexes are nested deeper than {_MAX_NESTING}")


def read_manifest(
    manifest: Mapping[str, Any], where: str, fetch: Fetch, files: ImageFiles, *, platform: Platform, limits: Limits
) -> OciImage:
    """The image a manifest describes; its layers lie in `files` as in a layout."""
    blobs = parse_list(manifest, "layers", where=where)
    check_layer_count(len(blobs), where=where, limits=limits)
    for number, blob in enumerate(blobs, 1):
        if not LAYER_TYPE.match(blob.media_type):
            raise ImageInvalidError(f"layer {number}: the media type {blob.media_type[:90]!r} is not known")
    descriptor = parse_descriptor(manifest.get("config"), where=f"{where}: config")
    if descriptor.media_type not in _CONFIG_TYPES:
        raise ImageInvalidError(f"{where}: {descriptor.media_type[:90]!r} is not the configuration of an image")
    config = _checked(descriptor, fetch)
    check_platform(config, platform=platform)
    layers = tuple(
        ImageLayer(
            label=f"layer {number} of {len(blobs)} ({blob.digest[:19]})",
            diff_id=diff_id,
            name=blob_name(blob),
            blob=blob,
            role=_role(blob, number),
        )
        for number, (blob, diff_id) in enumerate(zip(blobs, diff_ids(config, count=len(blobs)), strict=True), 1)
    )
    return OciImage(files=files, layers=layers, config=parse_config(config))


def check_layer_count(count: int, *, where: str, limits: Limits) -> None:
    """ImageInvalidError for more layers than an import takes."""
    if count > limits.max_layers:
        raise ImageInvalidError(f"{where}: {count} layers, at most {limits.max_layers}")


def _role(blob: Descriptor, number: int) -> LayerRole | None:
    said = blob.annotations.get(LAYER_ROLE)
    if said is None:
        return None
    try:
        return LayerRole(said)
    except ValueError as error:
        raise ImageInvalidError(f"layer {number}: {said[:40]!r} is not the role of a layer") from error


def _checked(descriptor: Descriptor, fetch: Fetch) -> dict[str, Any]:
    content = fetch(descriptor)
    check_digest(descriptor, len(content), hashlib.new(descriptor.digest.partition(":")[0], content).hexdigest())
    return decode_object(content, where=descriptor.digest[:19])
