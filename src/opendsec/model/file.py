"""Files inside a sandbox, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FileKind(StrEnum):
    """Type of a directory entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char_device"
    BLOCK_DEVICE = "block_device"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """lstat(2) of one path. `path` is as given (stat) or absolute (list)."""

    path: str
    kind: FileKind
    mode: int
    """Permission bits, 0-0o7777."""
    size_bytes: int
    mtime_s: float
    uid: int
    gid: int
    link_target: str | None = None


class FileEventKind(StrEnum):
    """What happened to a watched path."""

    CREATED = "created"
    MODIFIED = "modified"
    REMOVED = "removed"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    OVERFLOW = "overflow"
    """Events were lost; look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvent:
    """One change below a watched directory."""

    kind: FileEventKind
    path: str
