"""Make an EROFS file from a directory tree with mkfs.erofs.

The same tree gives the same bytes: fixed time stamp and UUID in the superblock, modification times of the files kept
as they are. Owners, modes, links, devices, FIFOs, extended attributes and capabilities are kept. Uncompressed,
because that starts fastest and shares the page cache best; the file is written to a path that must not exist.

It refuses nothing about the content of the tree: what may be in one is decided by whoever made it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from opendsec.errors import ImageInvalidError
from opendsec.store.durable import disk_full
from opendsec.store.programs import Ended, find_program, run_program
from opendsec.store.progress import OnProgress, Progress, quietly

UUID = "00000000-0000-0000-0000-000000000000"
BUILD_TIME = 0
"""Unix seconds in every superblock."""

TIMEOUT_S = 3600.0
_VERSION = re.compile(r"mkfs\.erofs \(erofs-utils\) (\d+)\.(\d+)|mkfs\.erofs (\d+)\.(\d+)")


def mkfs_version() -> tuple[int, int]:
    """Major and minor version of the installed mkfs.erofs. HostCapabilityError when there is none."""
    ended = run_program([find_program("mkfs.erofs"), "-V"], timeout_s=10)
    match = _VERSION.search("\n".join(ended.tail))
    return parse_version("\n".join(ended.tail)) if match else (0, 0)


def parse_version(text: str) -> tuple[int, int]:
    """(1, 5) from `mkfs.erofs 1.5` or `mkfs.erofs (erofs-utils) 1.8.6`; (0, 0) when the text holds no version."""
    match = _VERSION.search(text)
    if match is None:
        return (0, 0)
    major, minor = (group for group in match.groups() if group is not None)
    return (int(major), int(minor))


def mkfs_arguments(output: Path, tree: Path) -> list[str]:
    """Arguments of mkfs.erofs. `-T` comes first, because the later `--preserve-mtime` must win for files."""
    return [f"-T{BUILD_TIME}", "--preserve-mtime", f"-U{UUID}", "-x2", "--quiet", str(output), str(tree)]


def make_erofs(output: Path, tree: Path, *, on_progress: OnProgress = quietly) -> None:
    """Write the tree below `tree` to the new file `output`. DiskFullError, or ImageInvalidError with its words."""
    program = find_program("mkfs.erofs")
    total = tree_size(tree)

    def tell() -> None:
        done = output.stat().st_size if output.exists() else 0
        on_progress(Progress(phase="writing the layer", done=min(done, total), total=total))

    tell()
    ended = run_program([program, *mkfs_arguments(output, tree)], timeout_s=TIMEOUT_S, on_tick=tell)
    if ended.status != 0:
        raise _failed(ended, output)
    on_progress(Progress(phase="writing the layer", done=total, total=total))


def tree_size(tree: Path) -> int:
    """Bytes of the regular files below a directory, hard links counted once; 1 at least, for it is a divisor."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for directory, _, names in os.walk(tree):
        for name in names:
            status = os.lstat(Path(directory, name))
            if status.st_nlink > 1:
                key = (status.st_dev, status.st_ino)
                if key in seen:
                    continue
                seen.add(key)
            total += status.st_size
    return max(total, 1)


def _failed(ended: Ended, output: Path) -> Exception:
    text = " ".join(ended.tail)
    free = os.statvfs(output.parent)
    if "No space left" in text or "[Error 28]" in text or free.f_bavail * free.f_frsize < 1 << 20:
        return disk_full(output.parent)
    return ImageInvalidError(
        f"mkfs.erofs ended with status {ended.status}: {text[-400:] or 'it said nothing'}",
        detail={"program": "mkfs.erofs", "status": ended.status},
    )
