"""Where everything of a store lies, as values. Nothing here touches a disk.

Content is known by its path relative to the root (`blobs/sha256/<hex>`): what collects, checks and leases content
speaks of such paths, so none of them has to know what kinds there are.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opendsec.model.image import Layer
from opendsec.store.manifest import hex_of, tag_file_name

MANIFESTS, TABLES, DATA, BLOBS = "manifests/sha256", "tables/sha256", "data/sha256", "blobs/sha256"
CONTENT = (MANIFESTS, TABLES, DATA, BLOBS)
"""In the order in which they may go: never a manifest without its layers, never data without its metadata gone."""

HINTS = ("conversions", "profiles", "names.json", ".names.json")
"""What others keep below the root and that may go at any time: neither content nor names."""

_FILE = re.compile(r"(manifests/sha256/[0-9a-f]{64}\.json|(?:tables|data|blobs)/sha256/[0-9a-f]{64})\Z")


def is_content(file: str) -> bool:
    """Whether a relative path is one of content."""
    return _FILE.match(file) is not None


def digest_of_file(file: str) -> str:
    """`sha256:<hex>` that a file of content is named by."""
    return f"sha256:{file.rpartition('/')[2].removesuffix('.json')}"


def manifest_file(digest: str) -> str:
    """Of the manifest of that digest."""
    return f"{MANIFESTS}/{hex_of(digest)}.json"


def layer_files(layer: Layer) -> tuple[str, ...]:
    """All files of a layer."""
    mounted = f"{BLOBS}/{hex_of(layer.mounted.digest)}"
    if layer.data is None:
        return (mounted,)
    data = hex_of(layer.data.digest)
    return (mounted, f"{DATA}/{data}", f"{TABLES}/{data}")


def files_of_layers(layers: Iterable[Layer]) -> set[str]:
    """All files of these layers."""
    return {file for layer in layers for file in layer_files(layer)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Places below one root."""

    root: Path

    @property
    def tags(self) -> Path:
        """What names mean."""
        return self.root / "tags"

    @property
    def staging(self) -> Path:
        """Work in progress."""
        return self.root / "staging"

    @property
    def claims(self) -> Path:
        """Manifests that were published lately, or are just being: nobody may collect what they need."""
        return self.root / "claims"

    @property
    def removed(self) -> Path:
        """One empty file for each manifest that lost a name; its time says when."""
        return self.root / "removed"

    @property
    def nodes(self) -> Path:
        """Leases: which node has mounted what."""
        return self.root / "nodes"

    @property
    def snapshots(self) -> Path:
        """Saved sandboxes, project by project (`opendsec.store.snapshots`)."""
        return self.root / "snapshots"

    @property
    def condemned(self) -> Path:
        """What is being collected; put back by whoever finds it."""
        return self.root / "condemned"

    @property
    def damaged(self) -> Path:
        """What a check with repair took out of the way."""
        return self.root / "damaged"

    @property
    def unreferenced(self) -> Path:
        """Since when content without a manifest has been seen to be of no use."""
        return self.root / "unreferenced.json"

    @property
    def lock(self) -> Path:
        """Held for milliseconds while names change or content goes."""
        return self.root / "lock"

    @property
    def keeping_lock(self) -> Path:
        """Held by the one process that collects or checks."""
        return self.root / "keeping.lock"

    def directories(self) -> tuple[Path, ...]:
        """All that a store needs, but for `staging`."""
        return (
            *(self.root / kind for kind in CONTENT),
            *(self.tags, self.claims, self.removed, self.nodes, self.condemned),
        )

    def tag(self, name: str) -> Path:
        """The tag of a name."""
        return self.tags / tag_file_name(name)

    def claim(self, digest: str) -> Path:
        """A new claim of a manifest: each has a name of its own, for times may be as coarse as seconds."""
        return self.claims / f"{hex_of(digest)}.{secrets.token_hex(4)}"

    def removal(self, digest: str) -> Path:
        """The record that a manifest lost a name."""
        return self.removed / hex_of(digest)

    def condemned_file(self, file: str) -> Path:
        """Where content waits to be deleted."""
        return self.condemned / file.replace("/", "+")

    def content(self, file: str) -> Path:
        """Content by its relative path."""
        return self.root / file
