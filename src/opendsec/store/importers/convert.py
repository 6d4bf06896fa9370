"""Turn the layers of one image into layers of the store: planned, then unpacked group by group, packed meanwhile.

`plan` looks up what was converted before, from the bottom; what it found is held in the staging directory. `convert`
does the rest: each group of image layers is applied to an overlay on all below it (`stack`), and while the next one is
unpacked, the one before is packed and hashed, and the next archive is verified, on other cores. The thread that called
is the only one that reports progress.

Each archive must have the size and digest its descriptor says, and uncompressed the digest the configuration says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.model.image import Layer, LayerRole
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.importers.background import Background, Task
from opendsec.store.importers.conversions import Conversion, Conversions, Found
from opendsec.store.importers.files import verify
from opendsec.store.importers.grouping import is_complete, known_groups
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import ImageLayer, OciImage
from opendsec.store.importers.stack import Stack
from opendsec.store.importers.tar import opened_archive, position
from opendsec.store.importers.unpack import Spent, TreeWriter
from opendsec.store.layers import make_layer
from opendsec.store.progress import OnProgress, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """Layers of the store an image is put on, lowest first, with their files."""

    layers: tuple[Layer, ...] = ()
    diff_ids: tuple[str, ...] = ()
    """What they were converted from, where that is known: an image that begins so has them already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is there already, and where the work begins."""

    roles: tuple[LayerRole, ...]
    """Of each image layer."""
    found: tuple[Found, ...]
    start: int
    """Number of the first image layer, counted from 0, that has to be unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """One group that was converted now."""

    layer: StagedLayer
    conversion: Conversion
    sizes: dict[str, int]
    """Bytes of each uncompressed archive, by digest."""


@dataclass(kw_only=True)
class Work:
    """What all steps of one import share."""

    store: ImageStore
    directory: Path
    """A staging directory of the store, for files of layers."""
    trees: Path
    """A directory of this node, for trees."""
    limits: Limits
    limit_bytes: int
    """Where a group of layers ends; see `grouping`."""
    on_progress: OnProgress
    below: Below = field(default_factory=Below)

    def conversion(self, image: OciImage, group: range) -> Conversion:
        """The name of a group's result."""
        diff_ids = [layer.diff_id for layer in image.layers]
        on = [layer.digest for layer in self.below.layers]
        return Conversion(below=(*on, *diff_ids[: group.start]), group=tuple(diff_ids[group.start : group.stop]))


def plan(work: Work, conversions: Conversions, image: OciImage, *, role: LayerRole | None) -> Plan:
    """What was converted before. `role`: of all layers; None leaves it to the image, and to base."""
    roles = tuple(role or layer.role or LayerRole.BASE for layer in image.layers)
    sizes = conversions.sizes([layer.diff_id for layer in image.layers])
    found: list[Found] = []
    start = 0
    for number, group in enumerate(known_groups(sizes, roles, limit_bytes=work.limit_bytes)):
        conversion = work.conversion(image, group)
        layer = conversions.find(conversion, work.directory, name=f"found{number}", role=roles[group.start])
        if layer is None:
            break
        found.append(layer)
        start = group.stop
    return Plan(roles=roles, found=tuple(found), start=start)


def convert(work: Work, image: OciImage, plan: Plan) -> list[Converted]:
    """Unpack and pack the rest. Raises what `verify`, `TreeWriter` and `make_layer` do."""
    if plan.start == len(image.layers):
        return []
    with Stack(work.trees) as stack, Background() as background:
        add_below(work, stack)
        for found in plan.found:
            stack.add_files(found.meta, found.data)
        return _Conversion(work, image, plan, stack, background).run()


def add_below(work: Work, stack: Stack) -> None:
    """Mount the layers the import is put on."""
    for layer in work.below.layers:
        data = None if layer.data is None else work.store.data_path(layer.data.digest)
        stack.add_files(work.store.blob_path(layer.mounted.digest), data)


class _Conversion:
    """One run of `convert`."""

    def __init__(self, work: Work, image: OciImage, plan: Plan, stack: Stack, background: Background) -> None:
        self._work = work
        self._image = image
        self._plan = plan
        self._stack = stack
        self._background = background
        self._spent = Spent()
        self._verified: dict[int, Task[None]] = {}
        self._verify_from(plan.start)

    def run(self) -> list[Converted]:
        packing: list[Task[StagedLayer]] = []
        made: list[tuple[Conversion, dict[str, int]]] = []
        start = self._plan.start
        while start < len(self._image.layers):
            name = f"group{start}"
            with self._stack.group(name) as (tree, upper):
                sizes = self._fill(tree, start)
            stop = start + len(sizes)
            self._stack.add_tree(upper)
            packing.append(
                self._background.submit(
                    name, partial(self._pack, name, self._label(start, stop), upper, self._plan.roles[start])
                )
            )
            diff_ids = [layer.diff_id for layer in self._image.layers[start:stop]]
            conversion = self._work.conversion(self._image, range(start, stop))
            made.append((conversion, dict(zip(diff_ids, sizes, strict=True))))
            start = stop
        self._work.on_progress(Progress(phase="writing the layers"))
        layers = self._background.finish(packing, "writing the layers", self._work.on_progress)
        return [
            Converted(layer=layer, conversion=conversion, sizes=sizes)
            for layer, (conversion, sizes) in zip(layers, made, strict=True)
        ]

    def _label(self, start: int, stop: int) -> str:
        """A group of image layers in words."""
        first = self._image.layers[start].label
        return first if stop == start + 1 else f"{first} to {self._image.layers[stop - 1].label}"

    def _fill(self, tree: Path, start: int) -> list[int]:
        """Apply layers until the group takes no more; bytes of each uncompressed archive."""
        writer = TreeWriter(tree, limits=self._work.limits, spent=self._spent)
        sizes: list[int] = []
        number = start
        while True:
            sizes.append(self._apply(writer, number))
            number += 1
            if is_complete(sum(sizes), self._plan.roles, number, limit_bytes=self._work.limit_bytes):
                return sizes

    def _apply(self, writer: TreeWriter, number: int) -> int:
        layer = self._image.layers[number]
        self._background.finish([self._verified.pop(number)], f"verifying {layer.label}", self._work.on_progress)
        self._verify_from(number + 1)
        return apply_layer(writer, self._image, layer, limits=self._work.limits, on_progress=self._work.on_progress)

    def _verify_from(self, number: int) -> None:
        """Verify this layer and the next meanwhile."""
        for ahead in range(number, min(number + 2, len(self._image.layers))):
            if ahead not in self._verified:
                label = f"verify{ahead}"
                call = partial(self._verify, label, self._image.layers[ahead])
                self._verified[ahead] = self._background.submit(label, call)

    def _verify(self, name: str, layer: ImageLayer) -> None:
        with self._image.files.open(layer.name, label=layer.label) as file:
            if layer.blob is not None:
                total = layer.blob.size_bytes
                verify(file, layer.blob, layer.label, lambda done: self._background.tell(name, done, total))

    def _pack(self, name: str, label: str, upper: Path, role: LayerRole) -> StagedLayer:
        def tell(step: Progress) -> None:
            self._background.tell(name, step.done, step.total)

        try:
            return make_layer(self._work.store, self._work.directory, upper, name=name, role=role, on_progress=tell)
        except ImageInvalidError as error:  # It knows the entry, and we the layers.
            raise ImageInvalidError(
                f"{label}: {error.message}", detail={**error.detail, "layer": label}, remedy=error.remedy
            ) from error


def apply_layer(
    writer: TreeWriter, image: OciImage, layer: ImageLayer, *, limits: Limits, on_progress: OnProgress
) -> int:
    """Apply one archive to a tree; its uncompressed bytes. DigestMismatchError when they are not what was said."""
    with image.files.open(layer.name, label=layer.label) as file:
        total = layer.blob.size_bytes if layer.blob is not None else os.fstat(file.fileno()).st_size
        with opened_archive(file, label=layer.label, limits=limits, hashed=layer.diff_id.partition(":")[0]) as archive:
            with writer.layer(layer.label):
                for member in archive.entries():
                    writer.apply(archive, member)
                    on_progress(
                        Progress(phase=f"unpacking {layer.label}", done=position(file), total=total, detail=member.name)
                    )
            if archive.stream.digest() != layer.diff_id:
                raise DigestMismatchError(
                    f"{layer.label}: its uncompressed bytes do not have the digest {layer.diff_id}",
                    detail={"layer": layer.label, "digest": layer.diff_id},
                )
            return archive.stream.done
