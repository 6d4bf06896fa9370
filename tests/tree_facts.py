"""A whole tree as comparable values: what is where, whose, since when, linked to what, with which bytes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Container
from pathlib import Path


def tree_of(root: Path, *, times: bool = True, skip: Container[str] = ()) -> dict[str, tuple[object, ...]]:
    """Each path below root (and `.`): what lstat(2) says of it, its bytes' digest, attributes, hard links.

    `skip`: names in the root that are not looked into.
    """
    found: dict[str, tuple[object, ...]] = {}
    links: dict[tuple[int, int], list[str]] = defaultdict(list)
    tops = [Path(root, name) for name in os.listdir(root) if name not in skip]
    paths = [root, *tops]
    for one in tops:
        if one.is_symlink():
            continue  # os.walk would follow it.
        paths += (Path(top, name) for top, below, names in os.walk(one) for name in (*below, *names))
    for path in paths:
        status = os.lstat(f"{root}/.") if path == root else os.lstat(path)  # The root may be a descriptor's magic link.
        relative = os.path.relpath(path, root)
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            links[status.st_dev, status.st_ino].append(relative)
        found[relative] = (
            oct(status.st_mode),
            (status.st_uid, status.st_gid),
            status.st_mtime_ns if times else None,
            os.readlink(path) if stat.S_ISLNK(status.st_mode) else None,
            status.st_rdev if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) else None,
            (status.st_size, hashlib.sha256(path.read_bytes()).hexdigest()) if stat.S_ISREG(status.st_mode) else None,
            _attributes(f"{root}/." if path == root else path),
        )
    for names in links.values():
        for name in names if len(names) > 1 else ():  # A count may include names of a layer below.
            found[name] += (tuple(sorted(names)),)
    return found


def _attributes(path: Path | str) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)


def difference(left: dict[str, tuple[object, ...]], right: dict[str, tuple[object, ...]]) -> str:
    """What differs, one line each; empty when nothing does."""
    return "\n".join(
        f"{name}: {left.get(name)} != {right.get(name)}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    )
