"""Read layers straight from the store's files: the kernel asks the file system they lie on for just the blocks it
needs. For stores on a disk of this node, and for shared file systems that are mounted on it.

Metadata is copied to this node first, unless the store is on the same file system as the copies would be; so looking
names up never waits for another machine. Data is believed: whoever shares a file system trusts it, and `image fsck`
checks all of it.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from opendsec.errors import DigestMismatchError, ImageInvalidError, NodeError
from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import file_digest
from opendsec.store.durable import appearing, disk_full_named
from opendsec.store.images import ImageStore
from opendsec.store.loading.base import LayerFiles, Loader, LoaderKind
from opendsec.store.loading.copies import is_used, trim
from opendsec.store.manifest import hex_of


class DirectLoader(Loader):
    """`copies` is a directory of this node for metadata; it may be emptied whenever nothing is mounted."""

    kind = LoaderKind.DIRECT

    def __init__(self, store: ImageStore, copies: Path) -> None:
        self._store = store
        self._copies = copies
        self._data: dict[str, Path] = {}
        self._record = copies / ".generation"
        self._shared_generation = "0"
        with suppress(FileNotFoundError):
            self._shared_generation = self._record.read_text(encoding="ascii")

    @property
    def generation(self) -> str:
        """Counts how often layers had to be mounted anew (`renew`), over all processes of this node."""
        return self._shared_generation

    def attach(self, layer: Layer) -> LayerFiles:
        try:
            return self._attached(layer)
        except OSError as error:
            raise NodeError(
                f"layer {layer.digest} cannot be read from the store {self._store.root}: {error}",
                detail={"layer": layer.digest, "path": str(self._store.root)},
                remedy="see whether its file system is mounted and its servers answer; then try again",
                retryable=True,
            ) from error

    def _attached(self, layer: Layer) -> LayerFiles:
        meta = local_metadata(self._store, layer.mounted, self._copies)
        if layer.data is None:
            return LayerFiles(meta=meta)
        data = self._store.data_path(layer.data.digest)
        if not data.is_file() or data.stat().st_size != layer.data.size_bytes:
            raise ImageInvalidError(
                f"the data of layer {layer.digest} is not whole in the store", detail={"layer": layer.digest}
            )
        self._data[layer.digest] = data.resolve()
        shared = data.stat().st_dev != self._copies.stat().st_dev
        generation = self._shared_generation if shared else ""
        return LayerFiles(meta=meta, data=self._data[layer.digest], generation=generation, is_far=shared)

    def renew(self) -> None:
        """Files of the store that were given out answer with errors for good: they are to be opened anew."""
        self._shared_generation = str(int(self._shared_generation) + 1)
        with appearing(self._record) as partial:
            partial.write_text(self._shared_generation, encoding="ascii")

    def data_of(self, digest: str) -> Path | None:
        """The data file of a layer that was attached."""
        return self._data.get(digest)

    def close(self) -> None:
        """Nothing is held."""


def local_metadata(store: ImageStore, blob: Blob, copies: Path) -> Path:
    """Metadata as a file of this node: a checked copy, or the store's own file when that is on the same file system."""
    source = store.blob_path(blob.digest)
    if not source.is_file():
        raise ImageInvalidError(f"layer {blob.digest} is not in the store", detail={"layer": blob.digest})
    copies.mkdir(mode=0o700, parents=True, exist_ok=True)
    if source.stat().st_dev == copies.stat().st_dev:
        return source.resolve()
    target = copies / hex_of(blob.digest)
    if not (is_used(target) and target.stat().st_size == blob.size_bytes):
        _copy_checked(source, target, blob)
        trim(copies, keep=target)
    return target.resolve()


def _copy_checked(source: Path, target: Path, blob: Blob) -> None:
    """Whole or not at all. Not synced: after a crash of the machine nothing is mounted, and the size is looked at."""
    with appearing(target) as partial:
        with disk_full_named(target.parent), source.open("rb") as reader, partial.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
        if file_digest(partial) != blob.digest:
            raise DigestMismatchError(
                f"the store's file {source.name} does not have the digest it is named by",
                detail={"digest": blob.digest},
                remedy="opendsec image fsck",
            )
        partial.chmod(0o444)
