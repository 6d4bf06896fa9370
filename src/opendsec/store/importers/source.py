"""What the user's SOURCE argument means: a directory, an archive, an OCI layout or an image of a registry, and which
image of it. Pure but for stat(2).

The words of skopeo and podman say it: `oci:DIR[:REF]`, `oci-archive:FILE[:REF]`, `docker-archive:FILE[:REF]`,
`docker://HOST/NAME[:TAG|@DIGEST]`, and `dir:DIR`, `tar:FILE` for a tree. A bare path is looked at: a directory with an
`oci-layout` file is a layout, any other directory a tree; what is in a file shows when it is unpacked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opendsec.errors import InvalidSpecError


class SourceKind(StrEnum):
    """What an image is made from."""

    DIRECTORY = "dir"
    TAR = "tar"
    OCI = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"
    ARCHIVE = "archive"
    """A file of any of these kinds: tar, oci-archive, docker-archive."""
    REGISTRY = "docker"


_DIRECTORIES = frozenset({SourceKind.DIRECTORY, SourceKind.OCI})
_SAID = frozenset(kind.value for kind in SourceKind) - {SourceKind.ARCHIVE.value}
_REFERENCE = re.compile(
    r"[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place an image can be made from."""

    kind: SourceKind
    path: Path = Path()
    """Of all but an image of a registry."""
    ref: str = ""
    """Which image of a layout or archive, empty: the only one; of a registry, HOST/NAME[:TAG|@DIGEST]."""

    def __str__(self) -> str:
        if self.kind is SourceKind.REGISTRY:
            return f"docker://{self.ref}"
        return f"{self.kind.value}:{self.path}" + (f":{self.ref}" if self.ref else "")


def parse_source(text: str) -> Source:
    """The source meant by `text`. InvalidSpecError naming the field `source` when nothing usable is there."""
    prefix, separator, rest = text.partition(":")
    if not text or (separator and not rest):
        raise _bad(f"{text!r} names nothing")
    if separator and prefix in _SAID:
        return _said(SourceKind(prefix), rest)
    path = Path(text)
    if path.is_dir():
        return Source(kind=SourceKind.OCI if (path / "oci-layout").is_file() else SourceKind.DIRECTORY, path=path)
    if path.is_file():
        return Source(kind=SourceKind.ARCHIVE, path=path)
    raise _bad(f"{text!r} is neither a directory nor a file")


def _said(kind: SourceKind, rest: str) -> Source:
    if kind is SourceKind.REGISTRY:
        return Source(kind=kind, ref=_registry_reference(rest))
    wanted = "directory" if kind in _DIRECTORIES else "file"
    if _there(kind, Path(rest)):
        return Source(kind=kind, path=Path(rest))
    if kind in (SourceKind.DIRECTORY, SourceKind.TAR):
        raise _bad(f"{rest!r} is not a {wanted}")
    path, _, ref = rest.rpartition(":")
    if path and _there(kind, Path(path)):
        return Source(kind=kind, path=Path(path), ref=ref)
    # An image name may hold colons itself (`host:5000/name:tag`): the shortest existing path wins.
    path, _, ref = rest.partition(":")
    if ref and _there(kind, Path(path)):
        return Source(kind=kind, path=Path(path), ref=ref)
    raise _bad(f"{rest!r} is not a {wanted}")


def _there(kind: SourceKind, path: Path) -> bool:
    return path.is_dir() if kind in _DIRECTORIES else path.is_file()


def _registry_reference(rest: str) -> str:
    reference = rest.removeprefix("//")
    if not rest.startswith("//") or not _REFERENCE.match(reference):
        raise _bad(f"docker:{rest[:120]!r} is not docker://HOST[:PORT]/NAME[:TAG|@sha256:DIGEST]")
    if "/" not in reference or not re.match(r"[^/]*[.:]|localhost/", reference):
        raise _bad(f"docker:{rest[:120]!r} does not name its registry")
    return reference


def default_name(source: Source) -> str:
    """What an image of a registry is called when nobody says: its path and tag. InvalidSpecError for other sources."""
    if source.kind is not SourceKind.REGISTRY:
        raise InvalidSpecError("name: only an image of a registry has a name of its own", detail={"field": "name"})
    return source.ref.partition("/")[2].partition("@")[0]


def _bad(why: str) -> InvalidSpecError:
    return InvalidSpecError(
        f"source: {why}",
        detail={"field": "source"},
        remedy="give a directory, an archive, oci:DIR[:REF] for an OCI layout, or docker://HOST/NAME:TAG",
    )
