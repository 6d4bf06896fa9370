"""Copies of metadata on this node: how many stay when their layers are mounted no more.

What is mounted stays, whoever mounted it; so does what was used within the last minutes, for it may just be being
mounted. Of the rest the longest unused go once all are larger than KEEP_BYTES. A file that goes while somebody has it
mounted stays readable to them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from opendsec.linux.mount import mountinfo

KEEP_BYTES = 1 << 30
"""Metadata of some 250 GB of images."""
RECENT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One file of the directory."""

    name: str
    size_bytes: int
    used_at: float
    """Unix time, seconds."""


def is_used(path: Path) -> bool:
    """Note that a copy is used now; whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def surplus(
    copies: Iterable[Copy], *, mounted: Iterable[str], keep_bytes: int, now: float, recent_s: float = RECENT_S
) -> list[str]:
    """Names of those to go, the longest unused first. Pure."""
    held = set(mounted)
    ordered = sorted(copies, key=lambda one: one.used_at)
    total = sum(one.size_bytes for one in ordered)
    going = []
    for one in ordered:
        if total <= keep_bytes:
            break
        if one.name not in held and one.used_at < now - recent_s:
            going.append(one.name)
            total -= one.size_bytes
    return going


def trim(directory: Path, *, keep: Path, keep_bytes: int = KEEP_BYTES) -> int:
    """Remove the surplus of a directory of copies, but `keep`; how many files went."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.name != keep.name:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process trims, too
                    continue
                found.append(Copy(name=entry.name, size_bytes=status.st_size, used_at=status.st_mtime))
    if sum(one.size_bytes for one in found) <= keep_bytes:
        return 0
    place = directory.resolve()
    mounted = {Path(entry.source).name for entry in mountinfo() if Path(entry.source).parent == place}
    going = surplus(found, mounted=mounted, keep_bytes=keep_bytes, now=time.time())
    for name in going:
        (directory / name).unlink(missing_ok=True)
    return len(going)
