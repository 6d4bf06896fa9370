"""Bring images from a store of this node to another one: a directory, or a bucket that edges read from.

Data goes first, then tables and metadata, then manifests, and the tag last; so at every moment the other store shows
a whole image or none. What is there already is not sent again. Every file is checked against its digest before it
leaves, and a directory checks what it got once more. Images that an image refers to are brought along, those with a
digest by that digest alone.

It refuses plain HTTP, which cannot be written to, and names that mean something else there, unless told to replace.
A bucket is not collected: what no name needs any more is left in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opendsec.errors import ConflictError, DigestMismatchError, ImageNotFoundError, UnsupportedError
from opendsec.model.image import Image, Layer
from opendsec.store.chunks import check_table, file_digest, make_table
from opendsec.store.compose import split_reference
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.layout import layer_files, manifest_file
from opendsec.store.loading.packs import encode_metadata, is_metadata_packed, metadata_name, pack_name
from opendsec.store.loading.profiles import MOST_BYTES, profile_name
from opendsec.store.loading.remote import RemoteStore
from opendsec.store.loading.sources import ObjectFiles, StoreFiles, is_remote, open_files
from opendsec.store.manifest import Tag, encode_tag, tag_file_name
from opendsec.store.names import NAMES_FILE
from opendsec.store.progress import OnProgress, Progress, quietly


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What was brought there."""

    images: tuple[str, ...]
    """Names and `name@sha256:…`, those referred to first."""
    sent_bytes: int
    present_bytes: int
    """Of what was there already."""


def sync_images(
    store: ImageStore,
    names: Sequence[str],
    destination: str,
    *,
    replace: bool = False,
    on_progress: OnProgress = quietly,
) -> Synced:
    """Raises ImageNotFoundError, ConflictError, DigestMismatchError, UnsupportedError (it cannot be written to),
    DiskFullError, NodeError (it cannot be reached), OSError.
    """
    images = list(_with_references(store, names))
    total = sum(layer.size_bytes for _, image in images for layer in image.layers)
    if destination.startswith(("http://", "https://")):
        raise UnsupportedError(
            f"{destination} cannot be written to: plain HTTP is for reading",
            remedy="sync to the directory that server shows, or to s3://bucket/prefix",
        )
    told = _Told(on_progress, total)
    if is_remote(destination):
        _to_bucket(store, images, open_files(destination, attempt_s=600.0), told, replace=replace)
    else:
        _to_directory(store, images, ImageStore(Path(destination)), told, replace=replace)
    return Synced(
        images=tuple(name for name, _ in images), sent_bytes=told.sent_bytes, present_bytes=told.present_bytes
    )


class _Told:
    """Adds up and shows."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self.sent_bytes = 0
        self.present_bytes = 0

    def add(self, name: str, size_bytes: int, *, sent: bool) -> None:
        if sent:
            self.sent_bytes += size_bytes
        else:
            self.present_bytes += size_bytes
        done = self.sent_bytes + self.present_bytes
        self._on_progress(Progress(phase=f"sending {name}", done=min(done, self._total), total=self._total))


def _with_references(store: ImageStore, names: Sequence[str]) -> Iterator[tuple[str, Image]]:
    """Each image once, those it refers to first. A name that means nothing here is left to who starts the image."""
    seen: set[str] = set()

    def walk(reference: str, *, asked: bool) -> Iterator[tuple[str, Image]]:
        if reference in seen:
            return
        seen.add(reference)
        try:
            image = store.get(reference)
        except ImageNotFoundError:
            if asked or split_reference(reference)[1]:
                raise
            return
        for other in (image.base, *image.toolkits):
            if other:
                yield from walk(other, asked=False)
        yield reference, image

    for name in names:
        yield from walk(name, asked=True)


# a directory


def _to_directory(
    store: ImageStore, images: Sequence[tuple[str, Image]], target: ImageStore, told: _Told, *, replace: bool
) -> None:
    for reference, image in images:
        name, digest = split_reference(reference)
        if digest and _has(target, reference):
            continue
        with target.staging() as work:
            layers = [_staged(store, target, layer, work / str(n), told, name) for n, layer in enumerate(image.layers)]
            target.publish(
                _name_for(name, digest),
                layers=layers,
                config=image.config,
                base=image.base,
                toolkits=image.toolkits,
                source=image.source,
                replace=replace or bool(digest),
                manifest=store.manifest(image),
            )
        for layer in image.layers:
            _bring_profile(store, open_files(str(target.root)), layer)


def _name_for(name: str, digest: str) -> str:
    """An image that is referred to by digest needs a name there too, or it would be collected before its user comes."""
    return f"{name}-{digest[7:19]}" if digest else name


def _has(target: ImageStore, reference: str) -> bool:
    try:
        target.get(reference)
    except ImageNotFoundError:
        return False
    return True


def _staged(
    store: ImageStore, target: ImageStore, layer: Layer, work: Path, told: _Told, name: str
) -> StagedLayer | Layer:
    """The layer as the other store has it, or copied there, to be published."""
    if all((target.root / file).exists() for file in layer_files(layer)):
        told.add(name, layer.size_bytes, sent=False)
        return layer
    work.mkdir()
    meta = work / "layer.meta"
    shutil.copyfile(store.blob_path(layer.mounted.digest), meta)
    told.add(name, layer.mounted.size_bytes, sent=True)
    data = None
    if layer.data is not None:
        data = work / "layer.data"
        shutil.copyfile(store.data_path(layer.data.digest), data)
        told.add(name, layer.data.size_bytes, sent=True)
    staged = target.stage_layer(meta, data, role=layer.role)
    if staged.layer != layer:
        raise _damaged(layer)
    return staged


# a bucket


def _to_bucket(
    store: ImageStore, images: Sequence[tuple[str, Image]], files: StoreFiles, told: _Told, *, replace: bool
) -> None:
    assert isinstance(files, ObjectFiles)
    remote = RemoteStore(files)
    for reference, image in images:
        name, digest = split_reference(reference)
        if not (digest or replace):
            _check_name(remote, name, image)
        for layer in image.layers:
            _send_layer(store, files, layer, told, name)
            _bring_profile(store, files, layer)
        files.write(manifest_file(image.digest), store.manifest(image))
        if not digest:  # the name may mean another image by now, one that was not sent
            tag = Tag(digest=image.digest, created_at=image.created_at, source=image.source)
            files.write(f"tags/{tag_file_name(name)}", encode_tag(tag))
    files.write(NAMES_FILE, msgspec.json.encode(remote.names()))


def _check_name(remote: RemoteStore, name: str, image: Image) -> None:
    try:
        present = remote.get(name)
    except ImageNotFoundError:
        return
    if present.digest != image.digest:
        raise ConflictError(
            f"image {name!r} exists in {remote.files.address} with other content",
            detail={"field": "name", "digest": present.digest},
            remedy="say --replace",
        )


def _send_layer(store: ImageStore, files: ObjectFiles, layer: Layer, told: _Told, name: str) -> None:
    meta, *others = layer_files(layer)
    for file in (*others, meta):  # the table after its data, metadata after both
        path = store.root / file
        size = path.stat().st_size
        missing = files.size(file) != size
        if missing:
            _check_file(store, layer, file)
            files.upload(file, path)
        told.add(name, size, sent=missing)


def _check_file(store: ImageStore, layer: Layer, file: str) -> None:
    """DigestMismatchError unless the file of this node's store is what its name says."""
    if layer.data is not None and file.startswith("data/"):
        check_table(make_table(store.root / file), layer.data.digest, layer.data.size_bytes)
    elif layer.data is not None and file.startswith("tables/"):
        check_table((store.root / file).read_bytes(), layer.data.digest, layer.data.size_bytes)
    elif file_digest(store.root / file) != layer.mounted.digest:
        raise _damaged(layer)


def _bring_profile(store: ImageStore, files: StoreFiles, layer: Layer) -> None:
    """And metadata compressed, also of a layer that has no profile: it is read first, and as a whole."""
    if is_metadata_packed(layer) and not _has_file(files, metadata_name(layer.digest)):
        files.write(metadata_name(layer.digest), encode_metadata(store.blob_path(layer.mounted.digest).read_bytes()))
    path = store.root / profile_name(layer.digest)
    if path.is_file() and path.stat().st_size <= MOST_BYTES:
        pack = store.root / pack_name(layer.digest)
        if pack.is_file():
            files.write(pack_name(layer.digest), pack.read_bytes())
        files.write(profile_name(layer.digest), path.read_bytes())


def _has_file(files: StoreFiles, name: str) -> bool:
    try:
        files.read(name, 0, 1)
    except FileNotFoundError:
        return False
    return True


def _damaged(layer: Layer) -> DigestMismatchError:
    return DigestMismatchError(
        f"layer {layer.digest} is damaged in this node's store",
        detail={"layer": layer.digest},
        remedy="opendsec image fsck",
    )
