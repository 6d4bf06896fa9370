"""What a sandbox starts from: an image with all its references followed. Pure; the store says what each means.

The order is base, the image's own layers, workspace, toolkits as they are listed: a higher layer hides what a lower one
has at the same path. A layer that would lie in the stack twice stays where it is highest; the lower one shows nothing.

It refuses references that go round in circles or deeper than MAX_DEPTH, and more layers than one overlay can have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
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
    """The image with every layer in its place, and no reference left. `toolkits`: None is what the image asks for.

    An image without references, asked for without more, is itself. Raises ImageNotFoundError, ImageInvalidError, and
    InvalidSpecError when `workspace` or `toolkits` names an image of another role.
    """
    whole = _with_base(look_up, image)
    chosen = whole.toolkits if toolkits is None else tuple(toolkits)
    if not (whole.base or workspace or chosen):
        return replace(whole, toolkits=())
    parts = [
        *([_part(look_up, workspace, LayerRole.WORKSPACE)] if workspace else []),
        *(_part(look_up, one, LayerRole.TOOLKIT) for one in chosen),
    ]
    layers = _stacked((*whole.layers, *(layer for part in parts for layer in part.layers)))
    if len(layers) > MAX_LAYERS:
        raise ImageInvalidError(f"image {image!r} has {len(layers)} layers in all, at most {MAX_LAYERS} can be stacked")
    config = whole.config
    for part in parts:
        config = replace(config, env={**config.env, **part.config.env})
    digest = digest_of(encode_manifest(Manifest(layers=layers, config=config)))
    return replace(whole, digest=digest, layers=layers, config=config, base="", toolkits=())


def _with_base(look_up: Lookup, reference: str) -> Image:
    """An image on its base, and that on its own. The base is left named, to say that it is not the image alone."""
    image = look_up(reference)
    layers, config, base, seen = image.layers, image.config, image.base, [image.digest]
    while base:
        below = look_up(base)
        if below.digest in seen or len(seen) > MAX_DEPTH:
            raise ImageInvalidError(
                f"image {reference!r}: its bases go round in a circle or are too many", detail={"image": base}
            )
        seen.append(below.digest)
        layers, config, base = (*below.layers, *layers), _over(below.config, config), below.base
    return replace(image, layers=layers, config=config)


def _part(look_up: Lookup, reference: str, role: LayerRole) -> Image:
    part = look_up(reference)
    if not part.layers or any(layer.role is not role for layer in part.layers):
        roles = ", ".join(sorted({layer.role.value for layer in part.layers})) or "none"
        field = "workspace" if role is LayerRole.WORKSPACE else "toolkits"
        raise InvalidSpecError(
            f"{field}: the layers of image {reference!r} have the role {roles}, not {role.value}",
            detail={"field": field, "image": reference},
            remedy=f"import or pack it with the role {role.value}",
        )
    return part


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


def _stacked(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Each layer once, where it is highest."""
    kept: dict[str, Layer] = {}
    for layer in reversed(tuple(layers)):
        kept.setdefault(layer.digest, layer)
    return tuple(reversed(kept.values()))
