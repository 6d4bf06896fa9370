"""Snapshots of sandboxes in the store: memory, devices and disk of one moment, from which further sandboxes start.

    <root>/snapshots/<name>/manifest.json    what it is of, and size and digest of every file
    <root>/snapshots/<name>/files/…          the backend's own, read in place by every node that has the store

Published by one rename, immutable, removed whole. What is half-written lies in the staging area and is never seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opendsec.model.image import ImageConfig, ImagePart, Layer
from opendsec.model.spec import BackendKind, SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One file of a snapshot."""

    size_bytes: int
    digest: str
    """`sha256:<hex>` of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The manifest."""

    name: str
    backend: BackendKind
    spec: SandboxSpec
    """Of the source: image, resources, network."""
    image_digest: str
    image_config: ImageConfig
    image_layers: tuple[Layer, ...]
    image_parts: tuple[ImagePart, ...]
    files: Mapping[str, SnapshotFile]
    """By path below `files/`."""
    created_at: float
    """Unix time, seconds."""
