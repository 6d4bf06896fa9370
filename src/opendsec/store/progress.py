"""How long work in the store tells where it stands. Values only; how they look is the command line's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at one phase of the work. A new `phase` means that the one before is over."""

    phase: str
    """A short sentence without a full stop: `writing the layer`."""
    done: int = 0
    """Bytes, or any other unit that grows to `total`."""
    total: int | None = None
    """None when it cannot be known."""
    detail: str = ""
    """The last line a program printed, the entry being unpacked; for people."""


OnProgress = Callable[[Progress], None]
"""Called from the thread that works, often: it must be quick and must not raise."""


def quietly(_progress: Progress) -> None:
    """Tell nobody."""
