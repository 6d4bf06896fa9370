"""Projects, API keys and their roles, as they are told. Secrets are told once, when a key is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Whose key it is. Sandboxes may be started and used with every one."""

    ADMIN = "admin"
    MEMBER = "member"
    BUILDER = "builder"
    RUNNER = "runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key without its secret."""

    key_id: str
    project: str
    role: Role
    title: str = ""
    created_at: float = 0.0
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A fresh key; the only time its secret is told."""

    key: str
    record: KeyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A name sandboxes and keys belong to."""

    name: str
    created_at: float
    """Unix time, seconds."""
