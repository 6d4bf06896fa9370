"""Compositions that were made before, as long as every name in them still means the same.

Looking a composition up again costs one stat(2) for each name in it: a tag is replaced by another file when its name
gets another meaning, so a file that is still the same has the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.model.image import Image
from opendsec.store.compose import compose, split_reference
from opendsec.store.layout import Layout, manifest_file

MOST = 1000
"""Compositions kept; then all are forgotten."""

_Stamp = tuple[int, int, int] | None
_Asked = tuple[str, str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class _Made:
    image: Image
    stamps: Mapping[Path, _Stamp]


class Composer:
    """`get` looks an image up in the store of that layout. Threads may share it."""

    def __init__(self, layout: Layout, get: Callable[[str], Image]) -> None:
        self._layout = layout
        self._get = get
        self._made: dict[_Asked, _Made] = {}

    def compose(self, image: str, *, workspace: str = "", toolkits: Sequence[str] | None = None) -> Image:
        """See `opendsec.store.compose.compose`."""
        asked = (image, workspace, None if toolkits is None else tuple(toolkits))
        made = self._made.get(asked)
        if made is None or any(_stamp(path) != stamp for path, stamp in made.stamps.items()):
            made = self._compose(asked)
            if len(self._made) >= MOST:
                self._made.clear()
            self._made[asked] = made
        return made.image

    def _compose(self, asked: _Asked) -> _Made:
        stamps: dict[Path, _Stamp] = {}

        def look_up(reference: str) -> Image:
            path = self._file(reference)
            stamps.setdefault(path, _stamp(path))  # before it is read: a change in between is seen next time
            return self._get(reference)

        image, workspace, toolkits = asked
        return _Made(compose(look_up, image, workspace=workspace, toolkits=toolkits), stamps)

    def _file(self, reference: str) -> Path:
        """What says what a reference means: the tag, or the manifest itself."""
        name, digest = split_reference(reference)
        return self._layout.content(manifest_file(digest)) if digest else self._layout.tag(name)


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
