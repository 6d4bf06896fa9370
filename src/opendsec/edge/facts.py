"""What the node has left, for admission. Two small reads; for a thread of its own."""

from __future__ import annotations

import os
from pathlib import Path

from opendsec.edge.admission import NodeFacts

MIB = 1024 * 1024


def measure(state_dir: Path) -> NodeFacts:
    """Memory of the machine and free space of the file system below `state_dir`. Raises OSError."""
    memory: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            memory[name] = int(value.split()[0]) // 1024
    disk = os.statvfs(state_dir)
    return NodeFacts(
        memory_total_mb=memory["MemTotal"],
        memory_available_mb=memory["MemAvailable"],
        disk_free_mb=disk.f_bavail * disk.f_frsize // MIB,
        cpu_count=os.cpu_count() or 1,
    )
