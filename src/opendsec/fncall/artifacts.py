"""Results of compile calls, by content: what was compiled once for a project is not compiled again.

    <state>/artifacts/<key>      one line of JSON, then the files one after the other

`key` is a hash of project, image, language, code, files and command; the artifact's name, which callers get, follows
from it. The whole store has a limit; what was used least recently goes first. A file that is not whole is none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import NotFoundError
from opendsec.model.fncall import FnCallSpec

_KEY_CHARACTERS = 32
_HEADER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """What a compiler left."""

    name: str
    project: str
    image: str
    """Digest of what it was compiled in."""
    language: str
    files: Mapping[str, bytes]


def key_of(spec: FnCallSpec, *, project: str, image: str, command: tuple[str, ...]) -> str:
    """Everything that decides what a compiler makes of it."""
    digest = hashlib.sha256()
    env = [f"{name}={value}" for name, value in sorted(spec.env.items())]
    for text in (project, image, spec.language, spec.code, *command, *env):
        digest.update(f"{len(text.encode())}:".encode() + text.encode())
    for name, content in sorted(spec.files.items()):
        digest.update(f"{len(name.encode())}:{len(content)}:".encode() + name.encode() + content)
    return base64.b32encode(digest.digest()).decode("ascii").lower().rstrip("=")[:_KEY_CHARACTERS]


class Artifacts:
    """Of one edge."""

    def __init__(self, directory: Path, *, edge: str, most_bytes: int) -> None:
        self._directory = directory
        self._edge = edge
        self._most = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def open(self) -> None:
        """Take stock; what is half written goes."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sizes.clear()
        for path in sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime):
            if path.name.startswith("."):
                path.unlink()
            else:
                self._sizes[path.name] = path.stat().st_size
        self._bytes = sum(self._sizes.values())
        self._trim()

    def name_of(self, key: str) -> str:
        """As callers name it; `model.fncall_check.edge_of_artifact` finds the edge in it."""
        return f"art-{self._edge}-{key}"

    def find(self, key: str) -> Artifact | None:
        """None: it is not there (any more)."""
        if key not in self._sizes:
            return None
        found = self._read(key)
        if found is None:
            self._forget(key)
            return None
        self._sizes.move_to_end(key)
        os.utime(self._directory / key)
        return found

    def get(self, name: str, *, project: str) -> Artifact:
        """Raises NotFoundError, for those of other projects too."""
        prefix = f"art-{self._edge}-"
        found = self.find(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if found is None or found.project != project:
            raise NotFoundError(
                f"artifact: there is no {name[:80]!r}",
                detail={"field": "artifact"},
                remedy="compile again: results that are not used for long make room for others",
            )
        return found

    def keep(self, key: str, artifact: Artifact) -> None:
        """Written beside it and renamed: never half. One larger than the whole store is not kept. Raises OSError."""
        header = {
            "project": artifact.project,
            "image": artifact.image,
            "language": artifact.language,
            "files": [[name, len(content)] for name, content in artifact.files.items()],
        }
        first = json.dumps(header).encode() + b"\n"
        size = len(first) + sum(len(content) for content in artifact.files.values())
        if size > self._most or len(first) > _HEADER_BYTES:
            return
        temporary = self._directory / f".{key}"
        try:
            with temporary.open("wb") as file:
                file.write(first)
                for content in artifact.files.values():
                    file.write(content)
            temporary.rename(self._directory / key)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size
        self._trim()

    def _read(self, key: str) -> Artifact | None:
        try:
            with (self._directory / key).open("rb") as file:
                header = json.loads(file.readline(_HEADER_BYTES))
                files = {name: file.read(size) for name, size in header["files"]}
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # damaged
            return None
        if any(len(files[name]) != size for name, size in header["files"]):
            return None
        return Artifact(
            name=self.name_of(key),
            project=header["project"],
            image=header["image"],
            language=header["language"],
            files=files,
        )

    def _trim(self) -> None:
        while self._bytes > self._most and self._sizes:
            self._forget(next(iter(self._sizes)))

    def _forget(self, key: str) -> None:
        self._bytes -= self._sizes.pop(key)
        (self._directory / key).unlink(missing_ok=True)
