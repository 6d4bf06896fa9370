"""What the user's SOURCE argument means: a directory, a tar archive, or an OCI layout, and which image of it. Pure
but for stat(2).

`oci:DIR` or `oci:DIR:REF`, `dir:DIR` and `tar:FILE` say it; a bare path is looked at: a directory with an `oci-layout`
file is a layout, any other directory a tree, any file an archive (of a tree, or of a layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opendsec.errors import InvalidSpecError


class SourceKind(StrEnum):
    """What an image is made from."""

    DIRECTORY = "dir"
    TAR = "tar"
    OCI = "oci"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place on this machine an image can be made from."""

    kind: SourceKind
    path: Path
    ref: str = ""
    """Which image of an OCI layout; empty: the only one."""

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.path}" + (f":{self.ref}" if self.ref else "")


def parse_source(text: str) -> Source:
    """The source meant by `text`. InvalidSpecError naming the field `source` when nothing usable is there."""
    prefix, separator, rest = text.partition(":")
    if not text or (separator and not rest):
        raise _bad(f"{text!r} names nothing")
    if separator and prefix in {kind.value for kind in SourceKind}:
        return _said(SourceKind(prefix), rest)
    path = Path(text)
    if path.is_dir():
        return Source(kind=SourceKind.OCI if (path / "oci-layout").is_file() else SourceKind.DIRECTORY, path=path)
    if path.is_file():
        return Source(kind=SourceKind.TAR, path=path)
    raise _bad(f"{text!r} is neither a directory nor a file")


def _said(kind: SourceKind, rest: str) -> Source:
    if kind is not SourceKind.OCI:
        source = Source(kind=kind, path=Path(rest))
        there = source.path.is_dir() if kind is SourceKind.DIRECTORY else source.path.is_file()
        if not there:
            raise _bad(f"{rest!r} is not a {'directory' if kind is SourceKind.DIRECTORY else 'file'}")
        return source
    if Path(rest).is_dir():
        return Source(kind=kind, path=Path(rest))
    directory, _, ref = rest.rpartition(":")
    if directory and Path(directory).is_dir():
        return Source(kind=kind, path=Path(directory), ref=ref)
    # An image name may hold colons itself (`host:5000/name:tag`): the shortest existing directory wins.
    directory, _, ref = rest.partition(":")
    if ref and Path(directory).is_dir():
        return Source(kind=kind, path=Path(directory), ref=ref)
    raise _bad(f"{rest!r} is not a directory")


def _bad(why: str) -> InvalidSpecError:
    return InvalidSpecError(
        f"source: {why}",
        detail={"field": "source"},
        remedy="give a directory, a tar archive, or oci:DIR[:REF] for an OCI layout",
    )
