"""Sockets that are given to a program when it is started."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def listening(path: Path, *, backlog: int = 4) -> Iterator[int]:
    """A Unix socket that listens at that path, in place of what was there; our own end is closed after the block.

    Who connects to it before the program does anything waits, and nobody polls for the path. Raises OSError.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(backlog)
        yield listener.fileno()
