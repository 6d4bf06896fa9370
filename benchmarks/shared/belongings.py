"""What a platform of ours holds, counted from the kernel's own lists, so that what stays after an end can be named.

Only what is the platform's own is counted: its control groups, its processes and their descriptors and namespaces, the
mounts in its processes' mount namespaces, files in its directories. Other work on the machine does not disturb it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from opendsec.linux.cgroup import find_mounts

NAMESPACES = ("mnt", "net", "ipc", "uts", "pid", "user", "cgroup")


def count(pids: Mapping[str, int], *, cgroup_root: str, places: Sequence[Path]) -> dict[str, int]:
    """Name of a kind → how many there are."""
    groups = [group for top in _group_tops(cgroup_root) for group, _, _ in os.walk(top)]
    return {
        "processes in sandboxes": len({pid for group in groups for pid in _read(Path(group) / "cgroup.procs").split()}),
        "cgroups": len(groups),
        "namespaces held": len(set().union(*map(_namespaces, pids.values()))),
        "files": sum(len(files) + len(folders) for place in places for _, folders, files in os.walk(place)),
        **{
            f"mounts seen by {name}": len(_read(Path(f"/proc/{pid}/mountinfo")).splitlines())
            for name, pid in pids.items()
        },
        **{f"descriptors of {name}": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        **{f"sockets of {name}": _sockets(pid) for name, pid in pids.items() if name == "apiserver"},
        **{f"threads of {name}": len(os.listdir(f"/proc/{pid}/task")) for name, pid in pids.items()},
        **{f"children of {name}": len(_children(pid)) for name, pid in pids.items()},
    }


def _group_tops(root: str) -> list[Path]:
    mounts = find_mounts()
    every = [*([mounts.unified] if mounts.unified else []), *mounts.legacy.values()]
    return [mount / root for mount in every if (mount / root).is_dir()]


def _namespaces(pid: int) -> set[str]:
    """Those the process is in, and those it keeps alive with descriptors."""
    process = Path(f"/proc/{pid}")
    links = [process / "ns" / name for name in NAMESPACES] + list((process / "fd").iterdir())
    return {text for link in links if (text := _target(link)).partition(":")[0] in NAMESPACES}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # the descriptor the listing itself used


def _sockets(pid: int) -> int:
    return sum(_target(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())


def _mounts(pid: int, places: Sequence[Path]) -> int:
    """Those at or below our directories, or made from something in them."""
    lines = _read(Path(f"/proc/{pid}/mountinfo")).splitlines()
    return sum(any(str(place) in line for place in places) for line in lines)


def _children(pid: int) -> list[str]:
    return [child for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children").split()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
