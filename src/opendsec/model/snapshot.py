"""What is told about snapshots: the saved memory, devices and disk of a sandbox, from which further ones start."""

from __future__ import annotations

from dataclasses import dataclass

from opendsec.model.spec import BackendKind, SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """One line of a list."""

    name: str
    backend: BackendKind | None = None
    """None with a `problem`."""
    spec: SandboxSpec | None = None
    """Of its source: image, resources, network; what a sandbox that starts from it gets."""
    size_bytes: int = 0
    """Of its files as they are read."""
    disk_bytes: int = 0
    """Of those, what takes room: memory that was never touched does not."""
    created_at: float = 0.0
    """Unix time, seconds."""
    source: str = ""
    """Id of the sandbox it was made of."""
    binding: str = ""
    """What can read it: VMM, version, accelerator, processor model. Empty: any node."""
    users: int = 0
    """Sandboxes that were started from it and live."""
    problem: str = ""
    """Why it cannot be read; all else is empty then."""
