"""What is told about images: summaries for lists, details for one, entries of trees, and differences between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opendsec.model.file import FileKind
from opendsec.model.image import ImageConfig, ImagePart, Layer, LayerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSummary:
    """One line of a list. Sizes are of its own layers, not of what it refers to."""

    name: str
    digest: str
    created_at: float
    """Unix time, seconds."""
    source: str
    roles: tuple[LayerRole, ...]
    """Of its own layers, each once, lowest first."""
    layer_count: int
    size_bytes: int
    shared_bytes: int | None
    """Of those, in layers that at least one other image of the store is started with as well. None: the store is
    remote, and not read as a whole for it."""
    base: str = ""
    toolkits: tuple[str, ...] = ()
    problem: str = ""
    """Why it cannot be read; all else is empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLayer:
    """One layer of a start."""

    layer: Layer
    images: int | None
    """Images of the store that are started with it, this one included. None: as with `shared_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCost:
    """What a start reads, as it was recorded of earlier starts."""

    read_bytes: int
    """All metadata, and those chunks of data that were read."""
    of_bytes: int
    """All files of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDetails:
    """All that a store knows of one image."""

    name: str
    digest: str
    created_at: float
    source: str
    config: ImageConfig
    """As a sandbox gets it: with what bases and toolkits add."""
    layers: tuple[Layer, ...]
    """Its own, lowest first."""
    base: str
    toolkits: tuple[str, ...]
    size_bytes: int
    """Of its own layers."""
    start_digest: str = ""
    """Of the composition a sandbox is started from, when it asks for nothing else."""
    parts: tuple[ImagePart, ...] = ()
    """The images of that composition, lowest first."""
    start_layers: tuple[StartLayer, ...] = ()
    """Its layers, lowest first."""
    start_size_bytes: int = 0
    shared_bytes: int | None = 0
    """Of `start_layers`, in layers other images are started with as well. None: the store is remote."""
    metadata_bytes: int = 0
    """Of `start_layers`: what a start copies to the node before anything else."""
    start_cost: StartCost | None = None
    """None: no start of it was recorded."""
    problem: str = ""
    """Why no sandbox can be started from it: what it refers to is missing, or does not fit. All of `start_…` is empty
    then."""
    used_by: tuple[str, ...] = ()
    """Names of images that refer to it by its name, at most MAX_USED_BY."""
    used_by_count: int | None = 0
    """None: the store is remote."""


MAX_USED_BY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One name of a composed tree, as a sandbox that was just started sees it."""

    path: str
    """Absolute; bytes that are no UTF-8 as surrogates (PEP 383)."""
    kind: FileKind
    mode: int
    """Permission bits with set-id and sticky bits."""
    uid: int
    gid: int
    size_bytes: int = 0
    """Of a regular file; else 0."""
    mtime_ns: int = 0
    target: str = ""
    """Of a symbolic link."""
    device: tuple[int, int] | None = None
    """Major and minor number of a device."""
    xattrs: Mapping[str, str] = field(default_factory=dict)
    """Extended attributes, ACLs and capabilities included; values in base64."""
    layer: str = ""
    """Digest of the layer it comes from; of a directory, the highest that has it."""


class Change(StrEnum):
    """What became of a path from the first image to the second."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One path at which two composed trees differ."""

    change: Change
    path: str
    what: tuple[str, ...] = ()
    """For `changed`: which of kind, mode, owner, size, content, target, device, xattrs, mtime."""
    before: TreeEntry | None = None
    after: TreeEntry | None = None
