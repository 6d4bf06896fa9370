"""What is mounted in this process's mount namespace, and what to do about it: mountinfo as values.

Mounting itself is `libc.mount`; this file reads and never decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MountEntry:
    """One line of /proc/PID/mountinfo (proc(5)); paths are unescaped."""

    mount_id: int
    root: str
    target: str
    options: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]


def mountinfo(path: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts, in the kernel's order: of two on one target the later is on top."""
    return parse_mountinfo(path.read_bytes().splitlines())


def parse_mountinfo(lines: Iterable[bytes]) -> list[MountEntry]:
    """Lines of mountinfo as values. ValueError for a line that is none."""
    return [_parse(line) for line in lines]


def _parse(line: bytes) -> MountEntry:
    before, separator, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if not separator or len(left) < 6 or len(right) < 3:
        raise ValueError(f"not a line of mountinfo: {line!r}")
    return MountEntry(
        mount_id=int(left[0]),
        root=_text(left[3]),
        target=_text(left[4]),
        options=tuple(_text(left[5]).split(",")),
        fstype=_text(right[0]),
        source=_text(right[1]),
        super_options=tuple(_text(right[2]).split(",")),
    )


def _text(field: bytes) -> str:
    """Spaces, tabs, newlines and backslashes are written as three octal digits."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field).decode("utf-8", "surrogateescape")
