"""Walk a tree of any depth, and miss nothing of it.

os.walk(3.11) calls itself for each level, so a tree of a thousand levels ends it, and it passes over directories that
cannot be read. This one does neither. Symbolic links are not followed; nothing may change the tree meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import AnyStr


def walked(top: AnyStr) -> Iterator[tuple[AnyStr, list[AnyStr], list[AnyStr]]]:
    """Each directory from `top` down, with the names of directories and of all else in it. OSError."""
    left = [top]
    while left:
        directory = left.pop()
        below: list[AnyStr] = []
        names: list[AnyStr] = []
        paths: list[AnyStr] = []
        with os.scandir(directory) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
                    paths.append(entry.path)
                else:
                    names.append(entry.name)
        yield directory, below, names
        left.extend(reversed(paths))
