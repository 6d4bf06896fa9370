"""What the engine of calls is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


def _containers() -> int:
    return max(8, 4 * (os.cpu_count() or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class FnCallSettings:
    """Everything an edge's engine is told. Directories are its own."""

    edge: str = "local"
    state_dir: Path
    """On ext4, XFS or btrfs: containers' upper layers (nothing is ever written to them) and artifacts."""
    run_dir: Path
    """On a tmpfs: sockets."""
    image: str = "debian"
    """Of calls that name none."""
    containers: int = field(default_factory=_containers)
    """At most so many at once, and so many runs: 4 per processor, 8 at least."""
    idle_s: float = 60.0
    """A container nobody needed for so long is ended."""
    calls_per_container: int = 1000
    """Then it is replaced."""
    queue: int = 65_536
    """So many calls wait at most; beyond that they are refused with CapacityError."""
    disk_mb: int = 512
    """What a run can write in each of the writable places, in MiB; it counts as memory too."""
    artifacts_mb: int = 1024
    """Of compile results, all together; the ones used least recently go first."""
