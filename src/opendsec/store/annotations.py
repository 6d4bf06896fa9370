"""Annotations by which an OCI image remembers what it was in a store. Written on export, read on import. Pure."""

from __future__ import annotations

LAYER_ROLE = "dev.opendsec.layer.role"
"""On the descriptor of a layer: `base`, `workspace` or `toolkit`. A layer without it is of the base."""
