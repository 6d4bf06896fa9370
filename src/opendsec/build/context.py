"""The build context: a directory of this machine, without what .dockerignore leaves out.

It says what a source of COPY or ADD means, and the digest of what would be copied: names, kinds, modes, link targets
and bytes, not times. Nothing outside the directory is ever read: links are followed as a process chrooted into it
would follow them, and only those a source itself leads through; links below a copied directory are copied as links.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.build.patterns import Ignore, has_wildcard, names_matching, parse_ignore
from opendsec.errors import InvalidSpecError

_MAX_LINKS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEntry:
    """A file, directory or link of the context."""

    name: str
    """Below the source it belongs to; empty for the source itself."""
    where: Path
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One thing to copy: a file, or what is in a directory."""

    name: str
    """Relative to the context, as it was found."""
    entries: tuple[ContextEntry, ...]
    """Itself first, then, for a directory, all below it, parents before children."""

    @property
    def is_directory(self) -> bool:
        return self.entries[0].is_directory


class Context:
    """The directory `root`. `ignore_file`: the rules to use instead of `.dockerignore`, if it exists."""

    def __init__(self, root: Path, *, ignore_file: Path | None = None) -> None:
        if not root.is_dir():
            raise InvalidSpecError(f"context: {root} is not a directory", detail={"field": "context"})
        self._root = root.resolve()
        self._ignore = self._rules(ignore_file)

    def _rules(self, ignore_file: Path | None) -> Ignore:
        for path in (ignore_file, self._root / ".dockerignore"):
            if path is not None and path.is_file():
                return parse_ignore(path.read_text(encoding="utf-8", errors="surrogateescape"))
        return Ignore()

    def sources(self, pattern: str) -> list[Source]:
        """What a source means, in the order of names. InvalidSpecError when it names nothing; a pattern may."""
        wanted = posixpath.normpath(pattern).lstrip("/") if pattern.strip("/") else "."
        if wanted == ".." or wanted.startswith("../"):
            raise InvalidSpecError(f"{pattern!r} is outside the build context", detail={"field": "source"})
        found = [self._source(name) for name in self._named(wanted)]
        if not found and not has_wildcard(wanted):
            raise InvalidSpecError(
                f"{pattern!r} is not in the build context",
                detail={"field": "source"},
                remedy="it is not there, or .dockerignore leaves it out",
            )
        return found

    def _named(self, wanted: str) -> list[str]:
        names = [""]
        for part in [] if wanted == "." else wanted.split("/"):
            below: list[str] = []
            for directory in names:
                if has_wildcard(part):
                    matching = names_matching(part, self._list(directory))
                else:
                    matching = [part.replace("\\", "")]
                below += [f"{directory}/{name}" if directory else name for name in matching]
            names = below
        return [name for name in names if not self._is_left_out(name) and self._is_there(name)]

    def _list(self, directory: str) -> list[str]:
        place = self._resolved(directory)
        return [path.name for path in place.iterdir()] if place is not None and place.is_dir() else []

    def _is_left_out(self, name: str) -> bool:
        return bool(name) and self._ignore.ignores(name) and not (self._ignore.takes_back and self._has_kept(name))

    def _is_there(self, name: str) -> bool:
        if self._resolved(name) is not None:
            return True
        if (self._root / name).is_symlink():
            raise InvalidSpecError(
                f"{name!r} is a link that leads nowhere in the build context",
                detail={"field": "source"},
                remedy="copy the directory it is in, which keeps links as links, or name it in .dockerignore",
            )
        return False

    def _has_kept(self, name: str) -> bool:
        place = self._resolved(name)
        return place is not None and place.is_dir() and any(True for _ in self._below(place, name, ""))

    def _resolved(self, name: str) -> Path | None:
        """The real place of a name, links followed inside the context; None when there is nothing."""
        done: list[str] = []
        todo = name.split("/")[::-1] if name else []
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = self._root.joinpath(*done, part)
            try:
                status = here.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    return None
                target = os.readlink(here)  # noqa: PTH115  # A Path would tidy it.
                done = [] if target.startswith("/") else done
                todo.extend(target.split("/")[::-1])
                continue
            done.append(part)
        return self._root.joinpath(*done)

    def _source(self, name: str) -> Source:
        place = self._resolved(name)
        assert place is not None
        first = ContextEntry(name="", where=place, status=place.lstat())
        _check(first, name)
        entries = [first, *self._below(place, name, "")] if first.is_directory else [first]
        return Source(name=name, entries=tuple(entries))

    def _below(self, place: Path, source: str, prefix: str) -> Iterator[ContextEntry]:
        """What is kept below a directory; directories of ignored names only for the sake of what is kept in them."""
        for child in sorted(path.name for path in place.iterdir()):
            name = f"{prefix}/{child}" if prefix else child
            entry = ContextEntry(name=name, where=place / child, status=(place / child).lstat())
            full = f"{source}/{name}" if source else name
            if not self._ignore.ignores(full):
                _check(entry, full)
                yield entry
                if entry.is_directory:
                    yield from self._below(entry.where, source, name)
            elif entry.is_directory and self._ignore.takes_back:
                kept = list(self._below(entry.where, source, name))
                if kept:
                    yield entry
                    yield from kept


def _check(entry: ContextEntry, name: str) -> None:
    kind = stat.S_IFMT(entry.status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise InvalidSpecError(
            f"{name!r} in the build context is neither a file, a directory nor a link",
            detail={"field": "context"},
            remedy="name it in .dockerignore",
        )


def digest_sources(sources: Sequence[Source]) -> tuple[str, dict[Path, str]]:
    """Hex SHA-256 of all that would be copied, but for times and owners; and that of each file's bytes."""
    running = hashlib.sha256()
    files: dict[Path, str] = {}
    for source in sources:
        _add(running, b"source", posixpath.basename(source.name))
        for entry in source.entries:
            mode = entry.status.st_mode
            _add(running, oct(mode).encode(), entry.name)
            if stat.S_ISLNK(mode):
                _add(running, b"link", os.readlink(entry.where))  # noqa: PTH115
            elif stat.S_ISREG(mode):
                with entry.where.open("rb") as file:
                    files[entry.where] = hashlib.file_digest(file, "sha256").hexdigest()
                _add(running, b"bytes", files[entry.where])
    return running.hexdigest(), files


def _add(running: hashlib._Hash, kind: bytes, text: str) -> None:
    data = os.fsencode(text)
    running.update(b"%s %d\0%s" % (kind, len(data), data))
