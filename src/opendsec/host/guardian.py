"""What the guardians of loaders share: there is one on a run directory, and it hears that it shall end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from opendsec import errors


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """ConflictError when there is one already."""
    run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    (run_dir / "loader").mkdir(mode=0o700, exist_ok=True)
    fd = os.open(run_dir / "loader" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.ConflictError(f"a loader runs already on {run_dir}") from error
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """A descriptor that can be read once SIGTERM or SIGINT has come."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGTERM, signal.SIGINT)}
    signal.set_wakeup_fd(write_end)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
