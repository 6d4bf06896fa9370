"""The one interface behind which loaders are strangers to each other.

A loader gives the kernel two files to mount a layer from: its metadata, complete and on this node, and its data, which
may be anything that answers reads with the right bytes or with an error: never with zeros in their place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opendsec.model.image import Layer


class LoaderKind(StrEnum):
    """How data of layers is read."""

    DIRECT = "direct"
    FUSE = "fuse"
    FANOTIFY = "fanotify"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFiles:
    """What one layer is mounted from."""

    meta: Path
    data: Path | None = None
    """None for a layer of one file."""
    generation: str = ""
    """What `Loader.generation` has to be for this to be readable; "": it always is."""
    is_filled_late: bool = False
    """Data is written to its file just before it is read. Reading around the page cache would wait for the disk each
    time; whoever fills the file sees that its pages are not kept twice for long."""
    is_far: bool = False
    """Data comes from another machine, or may: it pays to read before anybody asks what a start reads."""


class Loader(ABC):
    """One way of reading layers on this node. Threads may share it."""

    kind: LoaderKind

    @property
    def generation(self) -> str:
        """Which life of whatever serves the data this is. It differs once files that were given out before answer
        with errors for good: a layer mounted from them must be attached and mounted anew. Waits for nobody.
        """
        return ""

    @abstractmethod
    def attach(self, layer: Layer) -> LayerFiles:
        """The files of a layer, ready to be read; the metadata is there whole and was checked. Idempotent.

        Raises ImageInvalidError (the store has not got it), DigestMismatchError (it has other bytes), DiskFullError,
        HostCapabilityError, NodeError (the store cannot be reached; retryable).
        """

    @abstractmethod
    def close(self) -> None:
        """This process needs it no more. What is mounted goes on being served."""
