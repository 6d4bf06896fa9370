"""Where an edge looks an image up by its name: the node's store, or, for edges that only offer the dummy backend,
nowhere.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from opendsec.model.ids import check_image_name
from opendsec.model.image import Image, ImageConfig


class ImageSource(Protocol):
    """`store.images.ImageStore` is one. Calls may block briefly; the node makes them in a thread of its own."""

    def get(self, name: str) -> Image:
        """Raises ImageNotFoundError."""

    def list(self) -> list[Image]:
        """All of them."""


class AnyImage:
    """Every good name is an empty image: for backends that look at none."""

    def get(self, name: str) -> Image:
        """Raises InvalidSpecError for what cannot be a name."""
        check_image_name(name)
        digest = hashlib.sha256(name.encode("utf-8")).hexdigest()
        return Image(
            name=name, digest=f"sha256:{digest}", layers=(), config=ImageConfig(), created_at=0.0, source="dummy"
        )

    def list(self) -> list[Image]:
        """None is kept."""
        return []
