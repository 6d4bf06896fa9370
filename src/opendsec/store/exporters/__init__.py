"""Write images out: as an OCI layout or archive, as an archive for Docker, or to a registry.

Each layer of the store becomes one OCI layer, streamed from the EROFS file through the compressor to where it goes;
nothing lies on this disk in between. References to a base and to toolkits are followed, so what is exported is
complete; roles of layers are annotations, so importing it gives the same layers back. Damaged layers are not exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, Layer
from opendsec.store.exporters.compression import Compression, Hashed, compressed
from opendsec.store.exporters.documents import (
    Written,
    WrittenLayer,
    encode_config,
    encode_docker_list,
    encode_index,
    encode_manifest,
)
from opendsec.store.exporters.layer_tar import layer_tar
from opendsec.store.exporters.reading import opened_layer
from opendsec.store.exporters.target import Target, TargetKind, opened_target
from opendsec.store.images import ImageStore
from opendsec.store.mounts import check_mountable
from opendsec.store.progress import OnProgress, Progress, quietly

__all__ = ["Exported", "ImageWriter", "export_image"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    image: Image
    """With all references followed."""
    manifest: Written
    layers: tuple[WrittenLayer, ...]
    left_out: tuple[str, ...]
    """Paths of sockets, which an OCI layer cannot hold."""


def export_image(
    store: ImageStore,
    name: str,
    target: Target,
    *,
    compression: Compression = Compression.GZIP,
    replace: bool = False,
    on_progress: OnProgress = quietly,
) -> Exported:
    """Write an image to `target`, whole or not at all.

    Raises ImageNotFoundError, DigestMismatchError, ImageInvalidError (an OCI image cannot say it; names the entry),
    ConflictError (the target is there), DiskFullError, HostCapabilityError.
    """
    image = store.compose(name)
    with opened_target(target, replace=replace) as place:
        writer = ImageWriter(store, image, compression=compression, on_progress=on_progress)
        layers = writer.write_layers(place.blob)
        config = place.blob([encode_config(image, layers)])
        manifest = place.blob([encode_manifest(config, layers, compression)])
        place.document("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        if target.kind is TargetKind.DOCKER_ARCHIVE:
            place.document("manifest.json", encode_docker_list(name, config, layers))
        place.document("index.json", encode_index(name, manifest))
    return Exported(image=image, manifest=manifest, layers=layers, left_out=tuple(writer.left_out))


class ImageWriter:
    """The layers of one image, as OCI layers, to wherever `put` puts them."""

    def __init__(
        self, store: ImageStore, image: Image, *, compression: Compression, on_progress: OnProgress = quietly
    ) -> None:
        check_mountable(image)
        self._store = store
        self._image = image
        self._compression = compression
        self._on_progress = on_progress
        self.left_out: list[str] = []

    def write_layers(self, put: Callable[[Iterator[bytes]], Written]) -> tuple[WrittenLayer, ...]:
        """Lowest first."""
        return tuple(self.write_layer(number, put) for number in range(len(self._image.layers)))

    def write_layer(self, number: int, put: Callable[[Iterator[bytes]], Written]) -> WrittenLayer:
        """One layer, counted from 0 at the lowest."""
        layer = self._image.layers[number]
        label = f"layer {number + 1} of {len(self._image.layers)}"
        with (
            self._store.staging() as work,
            _label_added(label),
            self._opened(layer, work, label) as root,
            closing(layer_tar(root, on_left_out=self.left_out.append)) as pieces,
        ):
            archive = Hashed(pieces)
            with closing(compressed(self._told(archive, layer, f"writing {label}"), self._compression)) as packed:
                blob = put(packed)
        return WrittenLayer(layer=layer, blob=blob, diff_id=archive.digest)

    def _opened(self, layer: Layer, work: Path, label: str) -> AbstractContextManager[int]:
        return opened_layer(
            self._store, layer, work, on_check=lambda: self._on_progress(Progress(phase=f"checking {label}"))
        )

    def _told(self, archive: Hashed, layer: Layer, phase: str) -> Iterator[bytes]:
        for piece in archive:
            done = min(archive.size_bytes, layer.size_bytes)  # Headers of many small files may be more.
            self._on_progress(Progress(phase=phase, done=done, total=layer.size_bytes))
            yield piece


@contextmanager
def _label_added(label: str) -> Iterator[None]:
    try:
        yield
    except ImageInvalidError as error:
        raise ImageInvalidError(
            f"{label}: {error.message}", detail={**error.detail, "layer": label}, remedy=error.remedy
        ) from error
