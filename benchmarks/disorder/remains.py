"""What of one platform is on the machine: processes, control groups, mounts, links, descriptors, files.

Only what bears this platform's directories or group names is counted, so other platforms may run beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from opendsec.linux.cgroup import find_mounts
from opendsec.linux.mount import mountinfo

_KEPT = frozenset({"journal", "out"})
"""Of an ended sandbox: its answers, for those who still ask."""


def processes(run_dir: Path, group: str) -> list[str]:
    """Those started with this run directory, and those in its control groups."""
    marker = f"OPENDSEC_RUN_DIR={run_dir}".encode()
    own = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == own:
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            groups = (entry / "cgroup").read_text(encoding="ascii")
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if marker in environment or f"/{group}/" in groups:
            found.append(f"process {entry.name} {words.strip()}")
    return found


def groups(group: str) -> list[str]:
    """Control groups of sandboxes in every hierarchy."""
    mounts = find_mounts()
    tops = [mount / group for mount in (mounts.unified, *mounts.legacy.values()) if mount is not None]
    return [
        f"control group {folder}"
        for top in tops
        for kind in ("latency", "batch")
        if (top / kind).is_dir()
        for folder in (top / kind).iterdir()
        if folder.is_dir()
    ]


def mounts(*places: Path) -> list[str]:
    """Mounts below these directories, in this mount namespace."""
    return [
        f"mount {entry.target}"
        for entry in mountinfo()
        if any(entry.target.startswith(f"{place}/") for place in places)
    ]


def files(state_dir: Path, run_dir: Path, edge: str = "local") -> list[str]:
    """What a clean stop removes; journals and outputs of ended sandboxes stay."""
    found = [f"file {path}" for path in run_dir.rglob("*")]
    state = state_dir / "edge" / edge
    for own in (state / "sandboxes").iterdir() if (state / "sandboxes").is_dir() else ():
        found += [f"file {path}" for path in own.iterdir() if path.name.partition(".")[0] not in _KEPT]
    found += [f"file {path}" for path in (state / "trash").iterdir()] if (state / "trash").is_dir() else []
    return found


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def network_namespaces() -> set[str]:
    """Of all processes that can be seen."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
    return found
