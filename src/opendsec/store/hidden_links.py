"""Layers that do not fit on each other: a directory of a workspace or toolkit where the layers below have a link.

Systems with merged directories have `/bin` as a link to `usr/bin`. A layer above that brings a real `/bin` hides the
link, and with it every program the base has there: commands are not found that are plainly in the image. So such a
composition is refused, by name, before anything is started. What one image does to itself is its own business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Image, ImagePart, PartKind

NAMES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Of the root, which distributions have as links (file-hierarchy(7), "UsrMerge")."""
_ABOVE = {PartKind.WORKSPACE: "workspace", PartKind.TOOLKIT: "toolkit"}


def may_hide(image: Image) -> bool:
    """Whether there is anything to look for."""
    return any(part.kind in _ABOVE for part in image.parts)


def check_links(image: Image, layers: Sequence[int]) -> None:
    """`layers`: descriptors of the image's layers, topmost first. Raises ImageInvalidError naming image and entry."""
    owners = {layer: part for part in image.parts if part.kind in _ABOVE for layer in part.layers}
    for name in NAMES:
        above: ImagePart | None = None
        for layer, fd in zip(reversed(image.layers), layers, strict=True):
            mode = _mode(name, fd)
            owner = owners.get(layer.digest)
            if stat.S_ISDIR(mode) and owner is not None:
                above = above or owner
            elif stat.S_ISLNK(mode) and above is not None and owner is not above:
                raise ImageInvalidError(
                    f"/{name} is a link to {os.readlink(name, dir_fd=fd)!r} below, and a directory of its own in the "
                    f"{_ABOVE[above.kind]} {above.name!r}, which would hide everything there",
                    detail={"image": image.name, "entry": name},
                    remedy="build that image with its files where the link leads",
                )
            elif mode:
                break


def _mode(name: str, fd: int) -> int:
    """0 when it is not there."""
    try:
        return os.lstat(name, dir_fd=fd).st_mode
    except FileNotFoundError:
        return 0
