"""What the environment says about loading. Pure.

OPENDSEC_LOADER           auto, direct, fuse or fanotify (auto: direct for a directory, fuse for http(s):// and s3://)
OPENDSEC_CACHE_MB         of the node's disk for chunks, at most (a tenth of the disk, at least 1024)
OPENDSEC_STORE_TIMEOUT    seconds after which a read the store does not answer is an I/O error (30)
OPENDSEC_START_WAIT_MS    a create waits at most so long until what its start reads is here; 0: not at all (1000)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import InvalidSpecError
from opendsec.store.loading.base import LoaderKind
from opendsec.store.loading.fetch import PATIENCE_S
from opendsec.store.loading.sources import is_remote

LEAST_CACHE_MB = 1024
START_WAIT_MS = 1000
_MB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSettings:
    """How layers are read on this node."""

    address: str
    """Of the store: a directory, http(s)://… or s3://…"""
    kind: LoaderKind
    cache_mb: int | None
    """None: `default_cache_bytes`."""
    patience_s: float
    start_wait_s: float = START_WAIT_MS / 1000

    @property
    def attempt_s(self) -> float:
        """For one request of a read that may need several."""
        return max(1.0, self.patience_s / 3)


def read_loading(environment: Mapping[str, str], *, state_dir: Path) -> LoadingSettings:
    """Raises InvalidSpecError naming the variable."""
    address = environment.get("OPENDSEC_STORE") or str(state_dir / "store")
    return LoadingSettings(
        address=address,
        kind=_kind(environment.get("OPENDSEC_LOADER") or "auto", address),
        cache_mb=_number(environment, "OPENDSEC_CACHE_MB"),
        patience_s=float(_number(environment, "OPENDSEC_STORE_TIMEOUT") or PATIENCE_S),
        start_wait_s=_wait_ms(environment) / 1000,
    )


def default_cache_bytes(directory: Path) -> int:
    """A tenth of the file system a directory lies on."""
    disk = os.statvfs(directory)
    return max(LEAST_CACHE_MB * _MB, disk.f_blocks * disk.f_frsize // 10)


def _kind(text: str, address: str) -> LoaderKind:
    if text == "auto":
        return LoaderKind.FUSE if is_remote(address) else LoaderKind.DIRECT
    try:
        kind = LoaderKind(text)
    except ValueError:
        raise _bad("OPENDSEC_LOADER", f"{text!r} is not auto, direct, fuse or fanotify") from None
    if kind is LoaderKind.DIRECT and is_remote(address):
        raise _bad("OPENDSEC_LOADER", f"direct reads mounted file systems, not {address}")
    return kind


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise _bad(name, f"{text!r} is not a number from 1 on")
    return int(text)


def _wait_ms(environment: Mapping[str, str]) -> int:
    is_zero = environment.get("OPENDSEC_START_WAIT_MS") == "0"
    return 0 if is_zero else _number(environment, "OPENDSEC_START_WAIT_MS") or START_WAIT_MS


def _bad(name: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"{name}: {why}", detail={"field": name})
