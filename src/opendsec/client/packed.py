"""What packing a sandbox gives back: the new image's reference, with all that is known about it."""

from __future__ import annotations

from typing import Self

from opendsec.wire.contracts import PackResult


class PackedImage(str):
    """The image reference `name@sha256:…`, which always means this very image: a `str` for every place that takes one.

    `details` says what was packed, what was left out, and for how long the sandbox stood still.
    """

    __slots__ = ("details",)
    details: PackResult

    def __new__(cls, details: PackResult) -> Self:
        made = super().__new__(cls, details.image)
        made.details = details
        return made

    @property
    def changed(self) -> bool:
        """False: nothing was left to pack, and this is the image the sandbox was started from."""
        return self.details.changed
