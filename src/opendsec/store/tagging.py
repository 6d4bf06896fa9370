"""Names without new content: another name for an image, and a named image made of references to others.

No layer is read or written, so either takes milliseconds, whatever the size. An image that refers to its base and
toolkits by name is current when they are replaced: the next sandbox gets what those names mean then. What would not
start is refused before anything is published.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

from opendsec.errors import InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer
from opendsec.model.spec import check_env, check_path
from opendsec.store.compose import compose, pinned, split_reference
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.manifest import Manifest, digest_of, encode_manifest

EMPTY = "scratch"
"""The name of an image without a single file, in Dockerfiles and here. It has one layer, because a mount needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What a new image is to be made of."""

    base: str
    """Reference to the image below."""
    workspace: str = ""
    """Reference to an image whose layers become the new image's own; "": it has none."""
    toolkits: tuple[str, ...] | None = None
    """References, lowest first; None: those the base asks for."""
    pin: bool = False
    """Write references down with their digests, so that the image never changes."""


def tag_image(
    store: ImageStore, name: str, reference: str, *, config: ImageConfig | None = None, replace: bool = False
) -> Image:
    """Let `name` mean the image another reference means now. ImageNotFoundError, ConflictError, InvalidSpecError.

    With `config` it has these defaults of commands and no others, so what it lies on becomes its own. `EMPTY` is an
    image that is always there.
    """
    if reference == EMPTY:
        return _empty(store, name, config or ImageConfig(), replace=replace)
    image = store.get(reference)
    manifest = store.manifest(image) if config is None else b""
    if config is not None:
        check_env(config.env)
        check_path(config.workdir, "workdir")
        image = replaced(image, layers=store.compose(reference, toolkits=()).layers, config=config, base="")
    return store.publish(
        name,
        layers=image.layers,
        config=image.config,
        base=image.base,
        toolkits=image.toolkits,
        source=image.source,
        replace=replace,
        manifest=manifest,
    )


def _empty(store: ImageStore, name: str, config: ImageConfig, *, replace: bool) -> Image:
    with store.staging() as work:
        tree = work / "tree"
        tree.mkdir()
        tree.chmod(0o755)
        os.utime(tree, (0, 0))
        layer = make_layer(store, work, tree)
        return store.publish(name, layers=[layer], config=config, source=EMPTY, replace=replace)


def compose_image(store: ImageStore, name: str, wanted: Composition, *, replace: bool = False) -> Image:
    """Publish an image that refers to its base and toolkits; a sandbox of it starts from just what one gets that asks
    for the base, workspace and toolkits.

    Raises as `ImageStore.compose` does for what does not exist or has the wrong role, ConflictError for a taken name,
    ImageInvalidError when the image would lie on itself.
    """
    base = store.get(wanted.base)
    workspace = store.get(wanted.workspace) if wanted.workspace else None
    toolkits = base.toolkits if wanted.toolkits is None else wanted.toolkits
    store.compose(wanted.base, workspace=wanted.workspace, toolkits=toolkits)
    references = [wanted.base, *toolkits]
    if wanted.pin:
        references = [pinned(store.get(reference)) for reference in references]
    layers: tuple[Layer, ...] = workspace.layers if workspace else ()
    config = ImageConfig(env=workspace.config.env if workspace else {})
    _check_starts(store, name, layers, config, references)
    return store.publish(
        name,
        layers=layers,
        config=config,
        base=references[0],
        toolkits=references[1:],
        source=" ".join(("compose", wanted.base, wanted.workspace)).strip(),
        replace=replace,
    )


def _check_starts(
    store: ImageStore, name: str, layers: Sequence[Layer], config: ImageConfig, references: Sequence[str]
) -> None:
    """Composes the new image as it would be once its name means it: it may be its own base by way of others."""
    if split_reference(references[0]) == (name, ""):
        raise InvalidSpecError(
            f"base: image {name!r} cannot lie on itself",
            detail={"field": "base", "image": name},
            remedy="choose another name, or pin the base",
        )
    base, *toolkits = references
    manifest = Manifest(layers=tuple(layers), config=config, base=base, toolkits=tuple(toolkits))
    new = Image(
        name=name,
        digest=digest_of(encode_manifest(manifest)),
        layers=tuple(layers),
        config=config,
        created_at=0.0,
        base=base,
        toolkits=tuple(toolkits),
    )

    def look_up(reference: str) -> Image:
        return new if reference == name else store.get(reference)

    compose(look_up, name)
