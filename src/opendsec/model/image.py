"""Images as values: ordered layers plus the defaults commands run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class LayerRole(StrEnum):
    """What a layer is for."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One immutable slice of an image: an EROFS file named by its digest."""

    digest: str
    """`sha256:<hex>` of the EROFS file."""
    size_bytes: int
    role: LayerRole = LayerRole.BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Defaults for commands, exactly as the OCI configuration has them."""

    env: Mapping[str, str] = field(default_factory=dict)
    """In order; PATH is whatever the image says, or the usual default when it says nothing."""
    workdir: str = "/"
    user: str = ""
    """As OCI: "", name, uid, or user:group. "" is root."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A named, immutable file tree."""

    name: str
    digest: str
    """`sha256:<hex>` of the canonical manifest: layers and config."""
    layers: tuple[Layer, ...]
    """Lowest first."""
    config: ImageConfig
    created_at: float
    """Unix time, seconds."""
    source: str = ""
    """Where it came from, for people: `oci:/path`, `mmdebstrap bookworm`."""
