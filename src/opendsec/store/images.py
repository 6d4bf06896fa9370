"""The image store: a directory tree of immutable, content-addressed files and the names that point into it.

    <root>/blobs/sha256/<hex>             EROFS files, mode 0444: metadata of layers, or layers of one file
    <root>/data/sha256/<hex>              data of layers, named by the digest of their chunk table
    <root>/tables/sha256/<hex>            those tables
    <root>/manifests/sha256/<hex>.json    canonical manifests; their digest is the image's
    <root>/tags/<quoted name>             which manifest a name means now, since when, and where it came from
    <root>/claims/<hex>                   manifests published lately: what they need is not garbage (`gc`)
    <root>/removed/<hex>                  when a manifest last lost a name
    <root>/nodes/<node>/                  leases: what a node has mounted (`leases`)
    <root>/staging/<token>/               work in progress of live processes, with `<token>.lock` beside it
    <root>/lock                           held for milliseconds while names change

Any number of processes on any number of nodes may use one store at once. Readers take no lock. Publishing first claims
what it needs, then links finished, synced files to their final names and sets the tag last, under the lock; so a crash
or a full disk at any point shows either the whole image or nothing. Removing forgets a name and nothing else: content
goes when `gc` has found that nobody needs it.

It does not know how layers are made (`erofs`, `importers`, `debian`) nor how they are mounted (`mounts`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import ConflictError, ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.ids import check_image_name
from opendsec.model.image import Blob, Image, ImageConfig, Layer, LayerRole
from opendsec.store.chunks import make_table, table_digest
from opendsec.store.compose import compose, split_reference
from opendsec.store.durable import (
    disk_full_named,
    link_into,
    rename_onto,
    sync_directory,
    sync_file,
    write_synced,
)
from opendsec.store.manifest import (
    Manifest,
    Tag,
    decode_manifest,
    decode_tag,
    digest_of,
    encode_manifest,
    encode_tag,
    hex_of,
    name_of_tag_file,
    tag_file_name,
    to_image,
    two_file_layer,
)
from opendsec.store.staging import locked, reap_staging, staged


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayer:
    """Finished files in a staging directory of the store, hashed and synced, but not yet part of it."""

    layer: Layer
    meta: Path
    """The EROFS file."""
    data: Path | None = None
    table: Path | None = None
    """Of `data`."""


class ImageStore:
    """One store below `root`, made if it is not there. Opening it also removes what dead processes left in staging."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._clock = clock
        self._blobs = root / "blobs" / "sha256"
        self._data = root / "data" / "sha256"
        self._tables = root / "tables" / "sha256"
        self._manifests = root / "manifests" / "sha256"
        self._tags = root / "tags"
        self._staging = root / "staging"
        self._lock_file = root / "lock"
        with disk_full_named(root):
            root.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._staging.mkdir(mode=0o700, exist_ok=True)
            for directory in (self._blobs, self._data, self._tables, self._manifests, self._tags):
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            if reap_staging(self._staging, self._lock_file):
                with locked(self._lock_file):
                    self._collect()

    def get(self, name: str) -> Image:
        """The image a name, or `name@sha256:…`, means now.

        Raises ImageNotFoundError, InvalidSpecError when it cannot be a reference, ImageInvalidError when it is damaged.
        """
        check_image_name(name)
        try:
            tag = self._tag(name)
            manifest = self._manifest_path(tag.digest).read_bytes()
        except FileNotFoundError as error:
            raise ImageNotFoundError(
                f"no image {name!r} in the store",
                detail={"image": name},
                remedy="see `opendsec image ls`; `opendsec image build-debian` and `opendsec image import` make one",
            ) from error
        if digest_of(manifest) != tag.digest:
            raise ImageInvalidError(f"the manifest of image {name!r} does not have the digest its tag says")
        return to_image(name, tag, manifest)

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """What a sandbox starts from; see `opendsec.store.compose`."""
        return compose(self.get, image, workspace=workspace, toolkits=toolkits)

    def list(self) -> list[Image]:
        """All images, by name."""
        return list(self._images())

    def names(self) -> list[str]:
        """Names of all images, sorted: one directory is read, and no image. May hold one that was removed just now."""
        return sorted(name_of_tag_file(path.name) for path in self._tags.iterdir())

    def remove(self, name: str) -> Image:
        """Forget a name and delete what no other name needs; what was removed. ImageNotFoundError."""
        with locked(self._lock_file):
            image = self.get(name)
            (self._tags / tag_file_name(name)).unlink()
            sync_directory(self._tags)
            self._collect()
        return image

    def blob_path(self, digest: str) -> Path:
        """Where metadata, or a layer of one file, of that digest lies, whether or not it is there."""
        return self._blobs / hex_of(digest)

    def data_path(self, digest: str) -> Path:
        """Where the data of that digest lies, whether or not it is there."""
        return self._data / hex_of(digest)

    def table_path(self, digest: str) -> Path:
        """Where the chunk table of the data of that digest lies, whether or not it is there."""
        return self._tables / hex_of(digest)

    def staging(self) -> AbstractContextManager[Path]:
        """A private directory on the store's file system to make layers in; see `staged`."""
        return staged(self._staging, self._lock_file)

    def stage_layer(self, meta: Path, data: Path | None = None, *, role: LayerRole = LayerRole.BASE) -> StagedLayer:
        """Hash and sync finished files of one staging directory. Nobody may change them afterwards."""
        with disk_full_named(self.root):
            mounted = _hashed(meta)
            if data is None:
                layer = Layer(digest=mounted.digest, size_bytes=mounted.size_bytes, role=role)
                return StagedLayer(layer=layer, meta=meta)
            content = make_table(data)
            table = data.with_name(f"{data.name}.table")
            write_synced(table, content)
            data.chmod(0o444)
            sync_file(data)
            stored = Blob(digest=table_digest(content), size_bytes=data.stat().st_size)
        return StagedLayer(layer=two_file_layer(mounted, stored, role=role), meta=meta, data=data, table=table)

    def publish(
        self,
        name: str,
        *,
        layers: Sequence[StagedLayer | Layer],
        config: ImageConfig,
        base: str = "",
        toolkits: Sequence[str] = (),
        source: str = "",
        replace: bool = False,
    ) -> Image:
        """Make an image visible under a name, whole and at once.

        Layers, lowest first, are new files or layers the store has already (ImageInvalidError when it has not).
        Publishing the same content again is no change. A name that means other content is a ConflictError unless
        `replace`.
        """
        check_image_name(name)
        if split_reference(name)[1]:
            raise InvalidSpecError(f"name: {name!r} ends as a digest does", detail={"field": "name"})
        flat = tuple(one.layer if isinstance(one, StagedLayer) else one for one in layers)
        references = Manifest(layers=flat, config=config, base=base, toolkits=tuple(toolkits))
        manifest = encode_manifest(references)
        tag = Tag(digest=digest_of(manifest), created_at=self._clock(), source=source)
        with disk_full_named(self.root), self.staging() as work, locked(self._lock_file):
            present = self._present(name)
            if present is not None and present.digest == tag.digest:
                return present
            if present is not None and not replace:
                raise _taken(name, present)
            try:
                self._add_layers(layers)
                self._add_manifest(work, manifest, tag.digest)
                write_synced(work / "tag", encode_tag(tag))
                rename_onto(work / "tag", self._tags / tag_file_name(name))
            finally:
                self._collect()
        return to_image(name, tag, manifest)

    def _present(self, name: str) -> Image | None:
        try:
            return self.get(name)
        except ImageNotFoundError:
            return None

    def _add_layers(self, layers: Sequence[StagedLayer | Layer]) -> None:
        for one in layers:
            if isinstance(one, StagedLayer):
                self._add_layer(one)
            elif not all(path.exists() for path in self._paths(one)):
                raise ImageInvalidError(f"layer {one.digest} is not in the store", detail={"layer": one.digest})

    def _add_layer(self, staged_layer: StagedLayer) -> None:
        layer = staged_layer.layer
        if layer.data is not None and staged_layer.data is not None and staged_layer.table is not None:
            link_into(staged_layer.table, self.table_path(layer.data.digest))
            link_into(staged_layer.data, self.data_path(layer.data.digest))
        link_into(staged_layer.meta, self.blob_path(layer.mounted.digest))

    def _paths(self, layer: Layer) -> tuple[Path, ...]:
        """All files of a layer."""
        meta = self.blob_path(layer.mounted.digest)
        if layer.data is None:
            return (meta,)
        return (meta, self.data_path(layer.data.digest), self.table_path(layer.data.digest))

    def _tag(self, reference: str) -> Tag:
        """The tag of a reference; of a pinned one a tag with the digest alone, if the store still has it."""
        name, digest = split_reference(reference)
        if digest:
            return Tag(digest=digest, created_at=self._manifest_path(digest).stat().st_mtime, source="")
        return decode_tag((self._tags / tag_file_name(name)).read_bytes(), name=name)

    def _add_manifest(self, work: Path, manifest: bytes, digest: str) -> None:
        write_synced(work / "manifest", manifest)
        link_into(work / "manifest", self._manifest_path(digest))

    def _manifest_path(self, digest: str) -> Path:
        return self._manifests / f"{hex_of(digest)}.json"

    def _images(self) -> Iterator[Image]:
        for name in self.names():
            image = self._present(name)
            if image is not None:
                yield image

    def _collect(self) -> None:
        """Delete what no tag needs; the lock is held. With a damaged tag about, nothing is: it may need anything."""
        needed: set[Path] = set()
        try:
            for path in self._tags.iterdir():
                tag = decode_tag(path.read_bytes(), name=name_of_tag_file(path.name))
                self._need(tag.digest, needed)
        except (ImageInvalidError, FileNotFoundError):
            return
        for directory in (self._manifests, self._blobs, self._data, self._tables):
            for path in directory.iterdir():
                if path not in needed:
                    path.unlink()

    def _need(self, digest: str, needed: set[Path]) -> None:
        """Add the files of a manifest and of all that it pins."""
        path = self._manifest_path(digest)
        if path in needed:
            return
        needed.add(path)
        manifest = decode_manifest(path.read_bytes())
        for layer in manifest.layers:
            needed.update(self._paths(layer))
        for reference in (manifest.base, *manifest.toolkits):
            pinned_digest = split_reference(reference)[1]
            if pinned_digest:
                self._need(pinned_digest, needed)


def _hashed(path: Path) -> Blob:
    """A finished file as a blob named by the digest of its bytes, on the disk."""
    with path.open("rb") as file:
        path.chmod(0o444)
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    sync_file(path)
    return Blob(digest=digest, size_bytes=path.stat().st_size)


def _taken(name: str, present: Image) -> ConflictError:
    return ConflictError(
        f"image {name!r} exists with other content",
        detail={"field": "name", "digest": present.digest},
        remedy="choose another name, remove it first, or say --replace",
    )
