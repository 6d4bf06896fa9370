"""What a sandbox starts from: an image with all its references followed. Pure; the store says what each means.

The order is base, the image's own layers, workspace, toolkits as they are listed: a higher layer hides what a lower one
has at the same path. A layer that would lie in the stack twice stays where it is highest; the lower one shows nothing.

It refuses references that go round in circles or deeper than MAX_DEPTH, and more layers than one overlay can have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from opendsec.errors import ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, ImagePart, Layer, LayerRole, PartKind
from opendsec.store.manifest import Manifest, digest_of, encode_manifest

MAX_DEPTH = 16
MAX_LAYERS = 500
"""The kernel's limit for one overlay (fs/overlayfs/params.c)."""

_PINNED = re.compile(r"(?P<name>.+)@(?P<digest>sha256:[0-9a-f]{64})\Z")

Lookup = Callable[[str], Image]
"""The image of a reference; ImageNotFoundError."""


def split_reference(reference: str) -> tuple[str, str]:
    """(name, digest) of `name@sha256:<hex>`; the digest is empty when the reference is a name alone."""
    match = _PINNED.match(reference)
    return (match["name"], match["digest"]) if match else (reference, "")


def pinned(image: Image) -> str:
    """A reference that will always mean this very image."""
    return f"{split_reference(image.name)[0]}@{image.digest}"


def compose(look_up: Lookup, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
    """The image with every layer in its place, no reference left, and `parts` that say where each layer came from.

    `toolkits`: None is what the image asks for. An image without references, asked for without more, keeps its digest;
    any other composition has one of its own, which follows from its layers and config alone. Raises ImageNotFoundError,
    ImageInvalidError, and InvalidSpecError when an image is of the wrong role; `detail["field"]` names which of them.
    """
    whole = _with_base(look_up, image)
    chosen = whole.toolkits if toolkits is None else tuple(toolkits)
    _check_bottom(whole, image)
    _check_disk(whole, image, alone=not (workspace or chosen))
    above = [
        *([_part(look_up, workspace, PartKind.WORKSPACE)] if workspace else []),
        *(_part(look_up, one, PartKind.TOOLKIT, asked_by="" if toolkits is not None else image) for one in chosen),
    ]
    parts = (*whole.parts, *(_as_part(one, PartKind(one.layers[0].role.value)) for one in above))
    if not (whole.base or workspace or whole.toolkits or chosen):
        return replace(whole, layers=stacked(whole.layers), parts=parts)
    layers = stacked((*whole.layers, *(layer for one in above for layer in one.layers)))
    if len(layers) > MAX_LAYERS:
        raise ImageInvalidError(f"image {image!r} has {len(layers)} layers in all, at most {MAX_LAYERS} can be stacked")
    config = whole.config
    for one in above:
        config = replace(config, env={**config.env, **one.config.env})
    digest = digest_of(encode_manifest(Manifest(layers=layers, config=config)))
    return replace(whole, digest=digest, layers=layers, config=config, base="", toolkits=(), parts=parts)


def to_look_at(look_up: Lookup, reference: str) -> Image:
    """The image as it can be looked at: composed; or, if it is a toolkit or workspace and lies on nothing, its own
    layers alone, from which no sandbox could start."""
    image = look_up(reference)
    if image.layers and not image.base and image.layers[0].role in (LayerRole.WORKSPACE, LayerRole.TOOLKIT):
        return replace(image, toolkits=(), parts=(_as_part(image, PartKind(image.layers[0].role.value)),))
    return compose(look_up, reference)


def _with_base(look_up: Lookup, reference: str) -> Image:
    """An image on its base, and that on its own. The base is left named, to say that it is not the image alone."""
    image = _found(look_up, reference, "image")
    layers, config, base, seen = image.layers, image.config, image.base, [image.digest]
    parts = [_as_part(image, PartKind.IMAGE)]
    while base:
        below = _found(look_up, base, "image", asked_by=reference)
        if below.digest in seen or len(seen) > MAX_DEPTH:
            raise ImageInvalidError(
                f"image {reference!r}: its bases go round in a circle or are too many", detail={"image": base}
            )
        seen.append(below.digest)
        parts.insert(0, _as_part(below, PartKind.BASE))
        layers, config, base = (*below.layers, *layers), _over(below.config, config), below.base
    return replace(image, layers=layers, config=config, parts=tuple(parts))


def _check_bottom(whole: Image, reference: str) -> None:
    """A toolkit or workspace is no system to start in."""
    if whole.layers and whole.layers[0].role not in (LayerRole.BASE, LayerRole.DISK):
        role = whole.layers[0].role.value
        raise InvalidSpecError(
            f"image: image {reference!r} is a {role}, with no base below it",
            detail={"field": "image", "image": reference},
            remedy=f"start a base image and name this one as its {role}",
        )


def _check_disk(whole: Image, reference: str, *, alone: bool) -> None:
    """Nothing can be laid over a disk but its own differences, and a disk over nothing."""
    disks = [layer for layer in whole.layers if layer.role is LayerRole.DISK]
    if disks and not (alone and len(disks) == len(whole.layers) and len(whole.parts) == 1):
        raise InvalidSpecError(
            f"image: image {reference!r} is a whole disk: no base, workspace or toolkit goes with it",
            detail={"field": "image", "image": reference},
            remedy="leave out workspace and toolkits; put files into the guest once it runs",
        )


def _part(look_up: Lookup, reference: str, kind: PartKind, *, asked_by: str = "") -> Image:
    field = "workspace" if kind is PartKind.WORKSPACE else "toolkits"
    part = _found(look_up, reference, field, asked_by=asked_by)
    if not part.layers or any(layer.role.value != kind.value for layer in part.layers):
        roles = ", ".join(sorted({layer.role.value for layer in part.layers})) or "none"
        raise InvalidSpecError(
            f"{field}: the layers of image {reference!r} have the role {roles}, not {kind.value}",
            detail={"field": field, "image": reference},
            remedy=f"import or pack it with the role {kind.value}",
        )
    return part


def _found(look_up: Lookup, reference: str, field: str, *, asked_by: str = "") -> Image:
    """The image of a reference; errors name the field it was asked for in, or the image that refers to it."""
    try:
        return look_up(reference)
    except ImageNotFoundError as error:
        if not asked_by:
            error.detail["field"] = field
            if field != "image":
                error.message = f"{field}: {error.message}"
                error.args = (error.message,)
            raise
        raise ImageNotFoundError(
            f"image {asked_by!r} needs {reference!r}, and there is no such image in the store",
            detail={"field": field, "image": reference, "asked_by": asked_by},
            remedy=f"make or import {reference!r} again, or compose {asked_by!r} anew",
        ) from error


def _as_part(image: Image, kind: PartKind) -> ImagePart:
    name = split_reference(image.name)[0]
    return ImagePart(kind=kind, name=name, digest=image.digest, layers=tuple(layer.digest for layer in image.layers))


def _over(below: ImageConfig, above: ImageConfig) -> ImageConfig:
    """What the upper image says, and what it leaves open as the lower one says."""
    plain = ImageConfig()
    return ImageConfig(
        env={**below.env, **above.env},
        workdir=above.workdir if above.workdir != plain.workdir else below.workdir,
        user=above.user or below.user,
        entrypoint=above.entrypoint or below.entrypoint,
        cmd=above.cmd or below.cmd,
        labels={**below.labels, **above.labels},
    )


def stacked(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Each layer once, where it is highest: the kernel refuses to stack one twice, and the lower one shows nothing."""
    kept: dict[str, Layer] = {}
    for layer in reversed(tuple(layers)):
        kept.setdefault(layer.digest, layer)
    return tuple(reversed(kept.values()))
