"""The image store: a directory tree of immutable, content-addressed files and the names that point into it.

    <root>/blobs/sha256/<hex>             EROFS files, mode 0444: metadata of layers, or layers of one file
    <root>/data/sha256/<hex>              data of layers, named by the digest of their chunk table
    <root>/tables/sha256/<hex>            those tables
    <root>/manifests/sha256/<hex>.json    canonical manifests; their digest is the image's
    <root>/tags/<quoted name>             which manifest a name means now, since when, and where it came from
    <root>/claims/<hex>.<token>           manifests published lately: what they need is not garbage (`gc`)
    <root>/removed/<hex>                  when a manifest last lost a name
    <root>/nodes/<node>.json              leases: what a node has mounted (`leases`)
    <root>/snapshots/<project>/<name>/    saved sandboxes (`snapshots`); they need layers as images do
    <root>/staging/<token>/               work in progress of live processes, with `<token>.lock` beside it
    <root>/lock                           held for milliseconds while names change
    <root>/condemned/, unreferenced.json, keeping.lock      of collections and checks (`gc`, `fsck`)
    <root>/names.json                     all names in one file (`names`)
    <root>/conversions/, profiles/        hints others keep (`layout.HINTS`)

Any number of processes on any number of nodes may use one store at once. Readers take no lock. Publishing first claims
what it needs, then links finished, synced files to their final names and sets the tag last, under the lock; so a crash
or a full disk at any point shows either the whole image or nothing. Removing forgets a name and nothing else: content
goes when `gc` has found that nobody needs it.

It does not know how layers are made (`erofs`, `importers`, `debian`) nor how they are mounted (`mounts`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import ConflictError, DiskFullError, ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.ids import check_image_name
from opendsec.model.image import Blob, Image, ImageConfig, Layer, LayerRole
from opendsec.store.chunks import file_digest, make_table, table_digest
from opendsec.store.compose import MAX_LAYERS, split_reference, stacked
from opendsec.store.composer import Composer
from opendsec.store.durable import (
    disk_full_named,
    link_into,
    rename_onto,
    sync_directory,
    sync_file,
    write_synced,
)
from opendsec.store.layout import BLOBS, CONTENT, DATA, TABLES, Layout, layer_files, manifest_file
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
    to_image,
    two_file_layer,
)
from opendsec.store.names import note_name
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
    """One store below `root`, made if it is not there. Opening it also removes what dead processes left in staging.

    `scratch` is a directory of this node for trees on their way to a layer, if the store's own file system may not
    hold them: network file systems know neither devices nor the attributes of overlays.
    """

    def __init__(self, root: Path, *, scratch: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.layout = Layout(root)
        self._clock = clock
        self._composer = Composer(self.layout, self.get)
        self._scratch = scratch
        self._lock_file = self.layout.lock
        with disk_full_named(root):
            root.mkdir(mode=0o711, parents=True, exist_ok=True)
            for private in (self.layout.staging, self.layout.snapshots):
                private.mkdir(mode=0o700, exist_ok=True)
            for directory in self.layout.directories():
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            reap_staging(self.layout.staging, self._lock_file)
            if scratch is not None and scratch.is_dir():
                reap_staging(scratch, scratch / ".lock")

    def get(self, name: str) -> Image:
        """The image a name, or `name@sha256:…`, means now.

        Raises ImageNotFoundError, InvalidSpecError when it cannot be a reference, ImageInvalidError when it is damaged.
        """
        check_image_name(name)
        try:
            tag, manifest = self._read(name)
        except FileNotFoundError as error:
            raise ImageNotFoundError(
                f"no image {name!r} in the store",
                detail={"image": name},
                remedy="see `opendsec image ls`; `opendsec image build-debian` and `opendsec image import` make one",
            ) from error
        if digest_of(manifest) != tag.digest:
            raise ImageInvalidError(
                f"the manifest of image {name!r} does not have the digest its tag says",
                detail={"image": name},
                remedy="opendsec image fsck",
            )
        return to_image(name, tag, manifest)

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """What a sandbox starts from; see `opendsec.store.compose`."""
        return self._composer.compose(image, workspace=workspace, toolkits=toolkits)

    def names(self) -> list[str]:
        """Names of all images, sorted: one directory is read, and no image. May hold one that was removed just now."""
        found = (path.name for path in self.layout.tags.iterdir())
        return sorted(name_of_tag_file(name) for name in found if not name.startswith("."))

    def stamps(self) -> dict[str, tuple[int, int]]:
        """For each name something that is another one when the name means another image; reads no image either."""
        found = {}
        with os.scandir(self.layout.tags) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed just now
                    if not entry.name.startswith("."):
                        status = entry.stat()
                        found[name_of_tag_file(entry.name)] = (status.st_ino, status.st_mtime_ns)
        return found

    def list(self) -> list[Image]:
        """All images, by name."""
        return list(self._images())

    def remove(self, name: str, *, force: bool = False) -> Image:
        """Forget a name; what it meant. Its content stays until it is collected (`opendsec.store.gc`).

        A name whose content is damaged or gone can be removed too: the image has no layers then. Raises
        ImageNotFoundError, and ConflictError when other images lie on it or ask for it, unless `force`: those that name
        its digest go on working then, those that name it alone do not.
        """
        check_image_name(name)
        if split_reference(name)[1]:
            raise InvalidSpecError(f"name: {name!r} ends as a digest does", detail={"field": "name"})
        if not force:
            self._check_unneeded(name)
        with locked(self._lock_file):
            image = self._removable(name)
            if image.digest:
                with contextlib.suppress(DiskFullError):  # only the grace period will be longer
                    self._note_removal(image.digest)
            self.layout.tag(name).unlink()
            sync_directory(self.layout.tags)
            note_name(self.layout, name, present=False)
        return image

    def needed_by(self, name: str) -> tuple[str, ...]:
        """Images whose manifest names that image, with or without a digest. Reads every manifest; damaged ones name
        nothing.
        """
        others = (self._present(other, damaged_too=True) for other in self.names() if other != name)
        return tuple(
            image.name
            for image in others
            if image is not None
            and any(split_reference(one)[0] == name for one in (image.base, *image.toolkits) if one)
        )

    def manifest(self, image: Image) -> bytes:
        """The bytes its digest is of. ImageNotFoundError when they have gone meanwhile."""
        try:
            return self.layout.content(manifest_file(image.digest)).read_bytes()
        except FileNotFoundError:
            raise ImageNotFoundError(f"image {image.name!r} has been removed meanwhile") from None

    def blob_path(self, digest: str) -> Path:
        """Where metadata, or a layer of one file, of that digest lies, whether or not it is there."""
        return self.root / BLOBS / hex_of(digest)

    def data_path(self, digest: str) -> Path:
        """Where the data of that digest lies, whether or not it is there."""
        return self.root / DATA / hex_of(digest)

    def table_path(self, digest: str) -> Path:
        """Where the chunk table of the data of that digest lies, whether or not it is there."""
        return self.root / TABLES / hex_of(digest)

    def staging(self) -> AbstractContextManager[Path]:
        """A private directory on the store's file system to make the files of layers in; see `staged`."""
        return staged(self.layout.staging, self._lock_file)

    def scratch(self) -> AbstractContextManager[Path]:
        """A private directory for trees: on this node where the store was told a place there, else as `staging`."""
        if self._scratch is None:
            return self.staging()
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        return staged(self._scratch, self._scratch / ".lock")

    def stage_layer(
        self,
        meta: Path,
        data: Path | None = None,
        *,
        role: LayerRole = LayerRole.BASE,
        table: bytes | None = None,
    ) -> StagedLayer:
        """Hash and sync finished files of one staging directory. Nobody may change them afterwards.

        `table`: the data's, from those who have hashed and synced it already.
        """
        with disk_full_named(self.root):
            mounted = _hashed(meta)
            if data is None:
                layer = Layer(digest=mounted.digest, size_bytes=mounted.size_bytes, role=role)
                return StagedLayer(layer=layer, meta=meta)
            content = make_table(data) if table is None else table
            table_file = data.with_name(f"{data.name}.table")
            write_synced(table_file, content)
            data.chmod(0o444)
            if table is None:
                sync_file(data)
            stored = Blob(digest=table_digest(content), size_bytes=data.stat().st_size)
        return StagedLayer(layer=two_file_layer(mounted, stored, role=role), meta=meta, data=data, table=table_file)

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
        instead_of: str = "",
        manifest: bytes = b"",
    ) -> Image:
        """Make an image visible under a name, whole and at once.

        Layers, lowest first, are new files or layers the store has already (ImageInvalidError when it has not); a layer
        that comes twice stays where it is highest. Publishing the same content again brings back what is missing of it,
        and else is no change. A name that means other content is a ConflictError unless `replace`; so is one that does
        not mean the digest `instead_of`, if that is given. ImageNotFoundError when a reference with a digest leads to
        nothing; one without may. `manifest`: the bytes an image of this very content has already, as an earlier version
        may have written them; else they are made.
        """
        check_image_name(name)
        if split_reference(name)[1]:
            raise InvalidSpecError(f"name: {name!r} ends as a digest does", detail={"field": "name"})
        if len(layers) > MAX_LAYERS:
            raise ImageInvalidError(
                f"image {name!r} would have {len(layers)} layers of its own, at most {MAX_LAYERS} can be stacked",
                remedy="merge some of them (`opendsec.store.merge`)",
            )
        flat = stacked(one.layer if isinstance(one, StagedLayer) else one for one in layers)
        references = Manifest(layers=flat, config=config, base=base, toolkits=tuple(toolkits))
        if manifest and decode_manifest(manifest) != references:
            raise ImageInvalidError(f"image {name!r}: its manifest describes other content")
        manifest = manifest or encode_manifest(references)
        tag = Tag(digest=digest_of(manifest), created_at=self._clock(), source=source)
        with disk_full_named(self.root), self.staging() as work:
            write_synced(work / "claim", manifest)
            write_synced(work / "manifest", manifest)
            write_synced(work / "tag", encode_tag(tag))
            with locked(self._lock_file):
                present = self._present(name, damaged_too=replace)
                if present is not None and present.digest == tag.digest:
                    if not self._is_whole(present):
                        self._add_content(work, layers, references, tag.digest)
                    return present
                if instead_of and (present is None or present.digest != instead_of):
                    raise ConflictError(f"image {name!r} has got another meaning meanwhile", detail={"field": "name"})
                if present is not None and not (replace or instead_of):
                    raise _taken(name, present)
                self._add_content(work, layers, references, tag.digest)
                if present is not None:
                    self._note_removal(present.digest)
                self._set_tag(work / "tag", name)
                note_name(self.layout, name, present=True)
        return to_image(name, tag, manifest)

    def check_free(self, name: str) -> None:
        """Raises ConflictError when the name means an image: for who knows already that it will be another one."""
        present = self._present(name, damaged_too=False)
        if present is not None:
            raise _taken(name, present)

    def _read(self, reference: str) -> tuple[Tag, bytes]:
        """A tag and its manifest. FileNotFoundError when there is no such name, or it has just lost its meaning."""
        for last in (False, True):
            try:
                tag = self._tag(reference)
                return tag, self.layout.content(manifest_file(tag.digest)).read_bytes()
            except FileNotFoundError:
                if last:
                    raise
                _look_again(self.layout.tags)
        raise AssertionError("unreachable")

    def _tag(self, reference: str) -> Tag:
        """The tag of a reference; of a pinned one a tag with the digest alone, if the store still has it."""
        name, digest = split_reference(reference)
        if digest:
            made_at = self.layout.content(manifest_file(digest)).stat().st_mtime
            return Tag(digest=digest, created_at=made_at, source="")
        return decode_tag(self.layout.tag(name).read_bytes(), name=name)

    def _present(self, name: str, *, damaged_too: bool = False) -> Image | None:
        """The image of a name. One that is damaged counts as none if it may be replaced."""
        try:
            return self.get(name)
        except ImageNotFoundError:
            return None
        except ImageInvalidError:
            if damaged_too:
                return None
            raise

    def _add_content(
        self, work: Path, layers: Sequence[StagedLayer | Layer], references: Manifest, digest: str
    ) -> None:
        """Everything but the name, on the disk when the call returns. The lock is held.

        The claim comes first: who collects looks at claims after it has moved something away and before it deletes it,
        we look for content after claiming it. So one of us sees the other, even where the lock does not reach.
        """
        (work / "claim").rename(self.layout.claim(digest))
        self._check_references(references)
        for one in layers:
            if isinstance(one, StagedLayer):
                self._add_layer(one)
            elif not all(self.layout.content(file).exists() for file in layer_files(one)):
                raise ImageInvalidError(f"layer {one.digest} is not in the store", detail={"layer": one.digest})
        link_into(work / "manifest", self.layout.content(manifest_file(digest)))
        for directory in CONTENT:
            sync_directory(self.root / directory)

    def _is_whole(self, image: Image) -> bool:
        """Whether all files of its layers are there; a check may have taken a damaged one away."""
        return all(self.layout.content(file).exists() for layer in image.layers for file in layer_files(layer))

    def _add_layer(self, staged_layer: StagedLayer) -> None:
        layer = staged_layer.layer
        if layer.data is not None and staged_layer.data is not None and staged_layer.table is not None:
            link_into(staged_layer.table, self.table_path(layer.data.digest))
            self._add_file(staged_layer.data, self.data_path(layer.data.digest), layer.data)
        self._add_file(staged_layer.meta, self.blob_path(layer.mounted.digest), layer.mounted)

    def _add_file(self, source: Path, target: Path, blob: Blob) -> None:
        if not link_into(source, target) and target.stat().st_size != blob.size_bytes:
            raise ImageInvalidError(
                f"the store has a damaged file where {blob.digest} belongs",
                detail={"digest": blob.digest},
                remedy="opendsec image fsck --repair, then try again",
            )

    def _check_references(self, manifest: Manifest) -> None:
        """What a reference with a digest means must be there now: nothing could bring it later."""
        for reference in (manifest.base, *manifest.toolkits):
            if split_reference(reference)[1]:
                self.get(reference)

    def _set_tag(self, tag: Path, name: str) -> None:
        """Where the lock does not reach, the link decides between two who both found the name free."""
        target = self.layout.tag(name)
        if target.exists():
            rename_onto(tag, target)
        elif link_into(tag, target):
            sync_directory(self.layout.tags)
        else:
            raise _taken(name, self.get(name))

    def _note_removal(self, digest: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with disk_full_named(self.root):
            fd = os.open(self.layout.removal(digest), flags, 0o644)
            try:
                os.utime(fd)
            finally:
                os.close(fd)

    def _check_unneeded(self, name: str) -> None:
        others = self.needed_by(name)
        if others:
            shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
            raise ConflictError(
                f"image {name!r} is needed by {shown}",
                detail={"image": name, "needed_by": list(others[:100])},
                remedy="remove those first, or say --force: those that name its digest go on working, others do not",
            )

    def _removable(self, name: str) -> Image:
        """The image; one without layers when there is a tag but nothing good behind it."""
        try:
            return self.get(name)
        except (ImageNotFoundError, ImageInvalidError):
            if not self.layout.tag(name).exists():
                raise
        # Nothing good is behind it.
        return Image(name=name, digest="", layers=(), config=ImageConfig(), created_at=0.0)

    def _images(self) -> Iterator[Image]:
        names = (path.name for path in self.layout.tags.iterdir() if not path.name.startswith("."))
        for name in sorted(name_of_tag_file(file) for file in names):
            image = self._present(name)
            if image is not None:
                yield image


def _look_again(directory: Path) -> None:
    """Network file systems remember for a while that a name was not there; opening its directory makes them ask."""
    with os.scandir(directory) as entries:
        next(entries, None)


def _hashed(path: Path) -> Blob:
    """A finished file as a blob named by the digest of its bytes, on the disk."""
    path.chmod(0o444)
    digest = file_digest(path)
    sync_file(path)
    return Blob(digest=digest, size_bytes=path.stat().st_size)


def _taken(name: str, present: Image) -> ConflictError:
    return ConflictError(
        f"image {name!r} exists with other content",
        detail={"field": "name", "digest": present.digest},
        remedy="choose another name, remove it first, or say --replace",
    )
