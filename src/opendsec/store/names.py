"""The names of a store in one file, for readers that cannot list its directory: those behind plain HTTP.

    <store>/names.json     a JSON list, sorted

It is a hint. The directory `tags` says what names there are, an image starts by its name without this, and the file may
be removed at any time. Whoever changes a name changes the list while the lock of the store is held; a process that
dies in between, or two nodes whose locks do not reach each other, may leave it wrong by a name until the next
collection (`image gc`), which writes it anew. Where it cannot be written it is removed: none is better than an old one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from opendsec.store.layout import Layout
from opendsec.store.manifest import name_of_tag_file

log = logging.getLogger(__name__)

NAMES_FILE = "names.json"
PARTIAL = ".names.json"
"""What becomes that file: one name, so that who dies leaves no more than one."""


def changed(names: Sequence[str], name: str, *, present: bool) -> list[str]:
    """A sorted list with that name, or without it. Pure."""
    place = bisect_left(names, name)
    is_there = place < len(names) and names[place] == name
    if is_there == present:
        return list(names)
    return [*names[:place], name, *names[place:]] if present else [*names[:place], *names[place + 1 :]]


def note_name(layout: Layout, name: str, *, present: bool) -> None:
    """A name was set, or removed. The lock of the store is held."""
    listed = _listed(layout)
    wanted = _of_tags(layout) if listed is None else changed(listed, name, present=present)
    if wanted != listed:
        _write(layout, wanted)


def list_anew(layout: Layout) -> None:
    """Write what the tags say, whatever is there. The lock of the store is held."""
    _write(layout, _of_tags(layout))


def _listed(layout: Layout) -> list[str] | None:
    try:
        return msgspec.json.decode(_file(layout).read_bytes(), type=list[str])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _of_tags(layout: Layout) -> list[str]:
    found = (path.name for path in layout.tags.iterdir())
    return sorted(name_of_tag_file(name) for name in found if not name.startswith("."))


def _write(layout: Layout, names: Sequence[str]) -> None:
    target = _file(layout)
    try:
        partial = layout.root / PARTIAL
        partial.write_bytes(msgspec.json.encode(names))
        partial.chmod(0o644)
        partial.rename(target)
    except OSError as error:
        log.warning("names_not_listed", extra={"fields": {"file": str(target), "why": str(error)}})
        with suppress(OSError):
            target.unlink(missing_ok=True)


def _file(layout: Layout) -> Path:
    return layout.root / NAMES_FILE
