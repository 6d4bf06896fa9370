"""Where an edge looks an image up by its name: the node's store, or, for edges that only offer the dummy backend,
nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from opendsec.model.ids import check_image_name
from opendsec.model.image import Image, ImageConfig


class ImageSource(Protocol):
    """`store.images.ImageStore` is one. Calls may block briefly; the node makes them in a thread of its own."""

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """All layers of a start in their order. ImageNotFoundError, ImageInvalidError, InvalidSpecError."""

    def names(self) -> list[str]:
        """Of all images, sorted; cheap, whatever the images hold."""


class AnyImage:
    """Every good name is an empty image: for backends that look at none."""

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """Raises InvalidSpecError for what cannot be a name."""
        check_image_name(image)
        digest = hashlib.sha256("\0".join((image, workspace, *(toolkits or ()))).encode("utf-8")).hexdigest()
        return Image(
            name=image, digest=f"sha256:{digest}", layers=(), config=ImageConfig(), created_at=0.0, source="dummy"
        )

    def names(self) -> list[str]:
        """None is kept."""
        return []
