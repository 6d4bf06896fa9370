"""How much an image may be before it is refused: a small archive can claim to hold petabytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds for one import; beyond them it ends with ImageInvalidError that names the limit."""

    max_total_bytes: int = 256 << 30
    """Of all files together, holes counted, since they are written out."""
    max_file_bytes: int = 64 << 30
    max_entries: int = 10_000_000
    max_json_bytes: int = 4 << 20
    """Of a manifest, index or config; registries take no larger manifests."""
    max_header_bytes: int = 1 << 20
    """Of one entry's extended header: long names, extended attributes."""
    max_padding_bytes: int = 16 << 20
    """After the end mark of an archive; tar itself pads to 10 KiB."""
    max_ratio: int = 400
    """Uncompressed to compressed bytes of one archive, beyond the first `free_bytes`."""
    free_bytes: int = 1 << 30
    max_layers: int = 500
    """The kernel's own limit for one overlay."""
