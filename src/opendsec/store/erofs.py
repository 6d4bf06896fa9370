"""Make an EROFS file from a directory tree with mkfs.erofs.

The result is two files: metadata (every name, mode and attribute), small and wanted at once, and data (the bytes of
the files, one after the other, each from a block of its own), which may stay far away. A tree without a byte of data
gives one file.

The same tree gives the same bytes (with another version of mkfs.erofs, other bytes that show the same): a fixed UUID, a
superblock time that follows from the tree, and the modification times of the files as they are. Owners, modes, links,
devices, FIFOs, extended attributes and capabilities are kept. Uncompressed, because that starts fastest and shares the
page cache best; the files are written to paths that must not exist.

It refuses names of 255 bytes, which older mkfs.erofs cut to 254 without a word, and times in the last two seconds
before 1970, which it would move; and nothing else about a tree: what may be in one is decided by whoever made it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import HostCapabilityError, ImageInvalidError
from opendsec.store.durable import disk_full, disk_full_named
from opendsec.store.marks import ORIGIN, is_whiteout
from opendsec.store.programs import ENVIRONMENT, Ended, find_program, run_program
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.walk import walked

UUID = "00000000-0000-0000-0000-000000000000"
OLDEST = (1, 5)
"""Version of mkfs.erofs; older ones were never tried."""

EXTENT_BYTES = 1 << 20
"""mkfs.erofs lays files out in extents of at most so much: larger ones save nothing, smaller ones cost metadata."""

NAME_BYTES = 254
"""Of one name; mkfs.erofs before 1.8.5 would cut the 255th without a word."""
_WHOLE_NAMES = (1, 9)
_BEFORE_1970 = 2**64 - 2
"""mkfs.erofs compares times without a sign and takes no later one than this, the last second but one before 1970."""
TIMEOUT_S = 3600.0
_UNUSED_REGEX = "erofs: invalid regex"
"""mkfs.erofs says so, leaves nothing out by it, and ends with 0."""
_VERSION = re.compile(r"mkfs\.erofs (?:\(erofs-utils\) )?(\d+(?:\.\d+)+)")


def mkfs_version() -> tuple[int, ...]:
    """Version of the installed mkfs.erofs. HostCapabilityError when there is none, or too old a one."""
    version = parse_version("\n".join(run_program([find_program("mkfs.erofs"), "-V"], timeout_s=10).tail))
    if version < OLDEST:
        raise HostCapabilityError(
            f"mkfs.erofs {'.'.join(map(str, version))} is older than {'.'.join(map(str, OLDEST))}",
            detail={"probe": "mkfs.erofs"},
            remedy="install erofs-utils of a newer release",
        )
    return version


def parse_version(text: str) -> tuple[int, ...]:
    """(1, 5) from `mkfs.erofs 1.5`, (1, 8, 6) from `mkfs.erofs (erofs-utils) 1.8.6`; (0, 0) when it holds no version.

    All of it, for releases that differ in the last number only have differed in the bytes they write.
    """
    match = _VERSION.search(text)
    return (0, 0) if match is None else tuple(int(number) for number in match[1].split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFacts:
    """What has to be known about a tree before it is written."""

    size_bytes: int
    """Of the regular files, hard links counted once."""
    newest_mtime_s: int
    before_1970: bool = False
    """Whether anything in it is older than that."""
    with_whiteouts: tuple[str, ...] = ()
    """Directories that hold one, a character device 0:0, and are not known to the kernel for it; see `ORIGIN`."""


def tree_facts(tree: Path, *, name_bytes: int = NAME_BYTES) -> TreeFacts:
    """Walk a tree once. ImageInvalidError for a name or time mkfs.erofs cannot write."""
    total = 0
    newest = oldest = int(os.lstat(tree).st_mtime)
    seen: set[tuple[int, int]] = set()
    with_whiteouts: set[str] = set()
    for directory, subdirectories, names in walked(str(tree)):
        for name in (*names, *subdirectories):
            if len(os.fsencode(name)) > name_bytes:
                raise _unwritable(
                    os.path.relpath(Path(directory, name), tree), "its name has 255 bytes, a layer takes 254"
                )
            status = os.lstat(Path(directory, name))
            newest = max(newest, int(status.st_mtime))
            oldest = min(oldest, status.st_mtime_ns // 10**9)
            if is_moved(status.st_mtime_ns):
                raise _unwritable(
                    os.path.relpath(Path(directory, name), tree), "its time is in the last two seconds before 1970"
                )
            if is_whiteout(status):
                with_whiteouts.add(directory)
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                continue
            if status.st_nlink > 1:
                seen.add((status.st_dev, status.st_ino))
            total += status.st_size
    unknown = sorted(path for path in with_whiteouts if ORIGIN not in os.listxattr(path))
    return TreeFacts(
        size_bytes=total, newest_mtime_s=max(0, newest), before_1970=oldest < 0, with_whiteouts=tuple(unknown)
    )


def is_moved(mtime_ns: int) -> bool:
    """Whether mkfs.erofs would give a file another time than this, in nanoseconds since 1970. Pure."""
    return -2 * 10**9 < mtime_ns < 0


def _unwritable(entry: str, why: str) -> ImageInvalidError:
    return ImageInvalidError(f"entry {entry!r}: {why}", detail={"entry": entry})


def mkfs_environment(facts: TreeFacts) -> dict[str, str]:
    """mkfs.erofs clamps times to SOURCE_DATE_EPOCH and takes it as the superblock's; beyond the newest it changes none.

    (Its option -T would give every file that time, whatever --preserve-mtime says.)
    """
    epoch = _BEFORE_1970 if facts.before_1970 else facts.newest_mtime_s + 1
    return {**ENVIRONMENT, "SOURCE_DATE_EPOCH": str(epoch)}


def make_erofs(
    meta: Path,
    tree: Path,
    *,
    data: Path | None = None,
    facts: TreeFacts | None = None,
    leave_out: Sequence[str] = (),
    leave_out_regexes: Sequence[str] = (),
    on_progress: OnProgress = quietly,
) -> bool:
    """Write the tree below `tree` to new files. Whether there is a `data` file: not without a byte of data.

    Without `data`, everything goes to `meta`. `facts`: of what is written, from those who have walked the tree already.
    `leave_out`: paths relative to the tree that are not written, with all below them; `leave_out_regexes`: POSIX
    extended ones that match such paths (all together have to fit into the arguments of one program, about 2 MB).
    Raises DiskFullError, or ImageInvalidError with mkfs.erofs' words, and what `on_progress` raises: it ends the work.
    """
    name_bytes = 255 if mkfs_version() >= _WHOLE_NAMES else NAME_BYTES
    facts = facts or tree_facts(tree, name_bytes=name_bytes)
    for directory in facts.with_whiteouts:
        os.setxattr(directory, ORIGIN, b"")
    split = data is not None and facts.size_bytes > 0
    arguments = [
        find_program("mkfs.erofs"),
        f"-U{UUID}",
        "-x2",
        "--quiet",
        *(f"--exclude-path={path}" for path in leave_out),
        *(f"--exclude-regex={regex}" for regex in leave_out_regexes),
        *((f"--chunksize={EXTENT_BYTES}", f"--blobdev={data}") if split else ()),
        str(meta),
        str(tree),
    ]
    growing = data if split and data is not None else meta
    if split and data is not None:
        with disk_full_named(data.parent):
            data.open("xb").close()  # mkfs.erofs 1.8.6 fails without a word when it is not there.

    def tell() -> None:
        if _is_full(meta.parent):
            raise disk_full(meta.parent)  # mkfs.erofs 1.8 may wait for itself for ever then
        done = growing.stat().st_size if growing.exists() else 0
        total = max(facts.size_bytes, 1)
        on_progress(Progress(phase="writing the layer", done=min(done, total), total=total))

    tell()
    ended = run_program(arguments, timeout_s=TIMEOUT_S, environment=mkfs_environment(facts), on_tick=tell)
    if ended.status != 0 or any(_UNUSED_REGEX in line for line in ended.tail):
        raise _failed(ended, meta)
    tell()
    return split


def _is_full(directory: Path) -> bool:
    free = os.statvfs(directory)
    return free.f_bavail * free.f_frsize < 1 << 20


def _failed(ended: Ended, output: Path) -> Exception:
    text = " ".join(ended.tail)
    if "No space left" in text or "[Error 28]" in text or _is_full(output.parent):
        return disk_full(output.parent)
    return ImageInvalidError(
        f"mkfs.erofs ended with status {ended.status}: {text[-400:] or 'it said nothing'}",
        detail={"program": "mkfs.erofs", "status": ended.status},
    )
