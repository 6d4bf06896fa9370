"""Keeps the log of `up -d` small while the platform runs.

Supervisor, apiserver and edge write to one open file, so it cannot be renamed away from them: it is copied to
`opendsec.log.1` and cut to nothing. Every writer appends, so all go on at its beginning. What is written between the
end of the copy and the cut, a few microseconds, is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger("opendsec.supervisor")

KEEP_BYTES = 10 * 1024 * 1024
"""A larger file is rotated; so both files together are about twice as large at most."""
LOOK_EVERY_S = 10.0


def older(path: Path) -> Path:
    """Where the previous lines are."""
    return path.with_suffix(".log.1")


def rotate(path: Path) -> bool:
    """Copy and cut the file when it is larger than KEEP_BYTES; whether it was. Raises OSError, and then it is as it
    was.
    """
    if path.stat().st_size <= KEEP_BYTES:
        return False
    kept = older(path)
    fresh = kept.with_suffix(".new")
    try:
        with path.open("rb") as source, fresh.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            shutil.copyfileobj(source, target, 1024 * 1024)
            os.truncate(path, 0)
        fresh.rename(kept)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return True


def is_ours(path: Path) -> bool:
    """Whether this process writes its log there; in a terminal it does not."""
    try:
        return os.path.samestat(os.fstat(2), path.stat())
    except FileNotFoundError:
        return False


async def keep_small(path: Path) -> None:
    """Look at the file for ever."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            if is_ours(path) and await asyncio.to_thread(rotate, path):
                log.info("log_rotated", extra={"fields": {"older": str(older(path))}})
        except OSError as exc:
            log.warning("log_not_rotated", extra={"fields": {"reason": str(exc)}})
