"""Typed ids. A sandbox id carries its edge (`sbx-<edge>-<token>`), so nobody needs a directory of sandboxes.

Ids are opaque to users; only the apiserver reads the edge out of one. Tokens are 16 characters of base32
(80 random bits).
"""

from __future__ import annotations

import base64
import re
import secrets
from typing import NewType

from opendsec.errors import InvalidSpecError

SandboxId = NewType("SandboxId", str)
CommandId = NewType("CommandId", str)
"""`cmd-<n>` for commands numbered by the edge; unique within one sandbox."""

_EDGE = r"[a-z0-9](?:[a-z0-9]{0,30}[a-z0-9])?"
_EDGE_PATTERN = re.compile(rf"{_EDGE}\Z")
_SANDBOX_PATTERN = re.compile(rf"sbx-({_EDGE})-[a-z2-7]{{16}}\Z")
PROJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}\Z")


def new_token() -> str:
    """16 random base32 characters."""
    return base64.b32encode(secrets.token_bytes(10)).decode("ascii").lower()


def new_sandbox_id(edge: str) -> SandboxId:
    """A fresh id owned by the edge of that name. Raises InvalidSpecError for a bad edge name."""
    return SandboxId(f"sbx-{check_edge_name(edge)}-{new_token()}")


def check_edge_name(edge: str) -> str:
    """The name itself if it is one to 32 of a-z and 0-9, else InvalidSpecError."""
    if not _EDGE_PATTERN.match(edge):
        raise InvalidSpecError(
            f"edge name {edge!r} is not 1 to 32 lower-case letters and digits", detail={"field": "edge"}
        )
    return edge


def edge_of(sandbox_id: str) -> str:
    """Name of the edge that owns this sandbox. Raises InvalidSpecError for a malformed id."""
    match = _SANDBOX_PATTERN.match(sandbox_id)
    if match is None:
        raise InvalidSpecError(
            f"{sandbox_id[:80]!r} is not a sandbox id",
            detail={"field": "sandbox_id"},
            remedy="ids look like sbx-local-abcdefgh23456777; `opendsec ls` lists yours",
        )
    return match.group(1)


def is_id_of(edge: str, name: str) -> bool:
    """Whether `name` is the id of a sandbox of that edge."""
    match = _SANDBOX_PATTERN.match(name)
    return match is not None and match.group(1) == edge


def check_image_name(name: str, *, field: str = "image") -> str:
    """The name itself if it can be an image reference, else InvalidSpecError naming `field`."""
    if not _NAME_PATTERN.match(name) or ".." in name or "//" in name or name.endswith("/"):
        raise InvalidSpecError(
            f"{field} {name[:80]!r} is not an image name",
            detail={"field": field},
            remedy="names begin with a letter or digit and go on with these, or . _ : / @ -",
        )
    return name
