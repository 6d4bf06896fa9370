"""Read an OCI image layout: find the image, verify every byte, apply its layers in order to one tree.

Index (nested ones too) → manifest of this machine's platform → configuration → layers. Each blob must have the size
and digest its descriptor says, each layer the digest of its uncompressed bytes. Layers become one base layer for now;
`apply_layers` is the place where several would be kept apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.model.image import ImageConfig
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci_config import (
    INDEX_TYPES,
    LAYER_TYPE,
    MANIFEST_TYPES,
    Descriptor,
    check_platform,
    choose,
    diff_ids,
    parse_config,
    parse_descriptor,
    parse_list,
)
from opendsec.store.importers.tar import opened_archive, position
from opendsec.store.importers.unpack import TreeWriter
from opendsec.store.progress import OnProgress, Progress, quietly

_MAX_NESTING = 8
_CONFIG_TYPES = frozenset(
    {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OciImage:
    """One image of a layout: what to apply, lowest layer first, and the defaults of commands."""

    layers: tuple[Descriptor, ...]
    diff_ids: tuple[str, ...]
    config: ImageConfig


class Layout:
    """An OCI image layout directory."""

    def __init__(self, directory: Path, *, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits

    def find(self, ref: str = "", *, machine: str | None = None) -> OciImage:
        """The image meant by `ref` (see `choose`). ImageInvalidError, DigestMismatchError."""
        machine = machine or platform.machine()
        self._check_version()
        manifest, where = self._find_manifest(ref, machine)
        layers = tuple(parse_list(manifest, "layers", where=where))
        if len(layers) > self._limits.max_layers:
            raise ImageInvalidError(f"{where}: {len(layers)} layers, at most {self._limits.max_layers}")
        for number, layer in enumerate(layers, 1):
            if not LAYER_TYPE.match(layer.media_type):
                raise ImageInvalidError(f"layer {number}: the media type {layer.media_type[:90]!r} is not known")
        descriptor = parse_descriptor(manifest.get("config"), where=f"{where}: config")
        if descriptor.media_type not in _CONFIG_TYPES:
            raise ImageInvalidError(f"{where}: {descriptor.media_type[:90]!r} is not the configuration of an image")
        config = self._json(descriptor)
        check_platform(config, machine=machine)
        return OciImage(layers=layers, diff_ids=tuple(diff_ids(config, count=len(layers))), config=parse_config(config))

    def _check_version(self) -> None:
        version = _decode(self._small(self._directory / "oci-layout"), where="oci-layout").get("imageLayoutVersion")
        if version != "1.0.0":
            raise ImageInvalidError(f"oci-layout: version {version!r} is not 1.0.0")

    def _find_manifest(self, ref: str, machine: str) -> tuple[Mapping[str, Any], str]:
        index: Mapping[str, Any] = _decode(self._small(self._directory / "index.json"), where="index.json")
        where = "index.json"
        for _ in range(_MAX_NESTING):
            entry = choose(parse_list(index, "manifests", where=where), ref=ref, machine=machine, where=where)
            where, ref = entry.digest[:19], ""
            fields = self._json(entry)
            said = fields.get("mediaType", entry.media_type)
            if said != entry.media_type:
                raise ImageInvalidError(f"{where} calls itself {said!r}, its index {entry.media_type!r}")
            if entry.media_type in MANIFEST_TYPES:
                return fields, where
            assert entry.media_type in INDEX_TYPES
            index = fields
        raise ImageInvalidError(f"index.json: indexes are nested deeper than {_MAX_NESTING}")

    def _json(self, descriptor: Descriptor) -> dict[str, Any]:
        content = self._small(self.blob(descriptor))
        _check_digest(descriptor, len(content), hashlib.new(descriptor.digest.partition(":")[0], content).hexdigest())
        return _decode(content, where=descriptor.digest[:19])

    def blob(self, descriptor: Descriptor) -> Path:
        """Where a blob lies; the digest was checked to be one, so the path stays inside."""
        algorithm, _, encoded = descriptor.digest.partition(":")
        return self._directory / "blobs" / algorithm / encoded

    def _small(self, path: Path) -> bytes:
        with _open_regular(path) as file:
            content = file.read(self._limits.max_json_bytes + 1)
        if len(content) > self._limits.max_json_bytes:
            raise ImageInvalidError(f"{path.name[:80]} has more than {self._limits.max_json_bytes} bytes")
        return content

    def apply_layers(self, image: OciImage, tree: Path, *, on_progress: OnProgress = quietly) -> None:
        """Make the tree all layers together show. The directory `tree` must not exist yet."""
        writer = TreeWriter(tree, limits=self._limits)
        for number, (layer, diff_id) in enumerate(zip(image.layers, image.diff_ids, strict=True), 1):
            label = f"layer {number} of {len(image.layers)} ({layer.digest[:19]})"
            self._apply(writer, layer, diff_id, label, on_progress)

    def _apply(self, writer: TreeWriter, layer: Descriptor, diff_id: str, label: str, on_progress: OnProgress) -> None:
        with _open_regular(self.blob(layer), label=label) as file:
            _verify(file, layer, label, lambda done: on_progress(_step(f"verifying {label}", done, layer)))
            with opened_archive(
                file, label=label, limits=self._limits, hashed=diff_id.startswith("sha256:")
            ) as archive:
                with writer.layer(label):
                    for member in archive.entries():
                        writer.apply(archive, member)
                        on_progress(_step(f"unpacking {label}", position(file), layer, detail=member.name))
                if diff_id.startswith("sha256:") and archive.stream.digest() != diff_id:
                    raise DigestMismatchError(f"{label}: its uncompressed bytes do not have the digest {diff_id}")


def _step(phase: str, done: int, layer: Descriptor, *, detail: str = "") -> Progress:
    return Progress(phase=phase, done=done, total=layer.size_bytes, detail=detail)


def _verify(file: BinaryIO, layer: Descriptor, label: str, on_done: Callable[[int], None]) -> None:
    """Size and digest of a layer, before anything in it is believed. Leaves the file at its beginning."""
    algorithm = layer.digest.partition(":")[0]
    running = hashlib.new(algorithm)
    size = os.fstat(file.fileno()).st_size
    if size < layer.size_bytes:
        raise ImageInvalidError(f"{label} is truncated: {size} of {layer.size_bytes} bytes", detail={"layer": label})
    while chunk := file.read(4 << 20):
        running.update(chunk)
        on_done(file.tell())
    _check_digest(layer, size, running.hexdigest(), label=label)
    file.seek(0)


def _check_digest(descriptor: Descriptor, size: int, found: str, *, label: str = "") -> None:
    if size != descriptor.size_bytes or f"{descriptor.digest.partition(':')[0]}:{found}" != descriptor.digest:
        raise DigestMismatchError(
            f"{label or descriptor.digest}: its bytes do not have the size or digest its descriptor says",
            detail={"digest": descriptor.digest},
        )


def _open_regular(path: Path, *, label: str = "") -> BinaryIO:
    """Without waiting for the writer of a FIFO that lies in the place of a blob."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except FileNotFoundError as error:
        raise ImageInvalidError(f"{label or path.name[:80]} is missing from the layout") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ImageInvalidError(f"{label or path.name[:80]} is not a regular file")
    return file


def _decode(content: bytes, *, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ImageInvalidError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ImageInvalidError(f"{where} is not a JSON object")
    return fields
