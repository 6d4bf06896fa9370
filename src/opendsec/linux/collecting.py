"""What a program writes to its two pipes, collected up to a limit while it is given its input.

Who writes more is ended by whoever was given `too_long`; what follows is read and dropped, so that nothing waits at a
full pipe. It knows descriptors, and nothing of processes.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

_CHUNK = 65536


class Collected:
    """The bytes of one stream. `too_long` is called once, when it gets longer than `limit`."""

    def __init__(self, limit: int, too_long: Callable[[], None]) -> None:
        self._kept = bytearray()
        self._limit = limit
        self._too_long = too_long
        self.is_too_long = False

    def add(self, data: bytes) -> None:
        """The next bytes."""
        if self.is_too_long:
            return
        self._kept += data
        if len(self._kept) > self._limit:
            self.is_too_long = True
            self._kept.clear()
            self._too_long()

    def take(self) -> bytes:
        """All of it, when it was not too long."""
        return bytes(self._kept)


def exchange(stdin: int | None, data: bytes, streams: dict[int, Collected], *, until: float) -> None:
    """Write `data` to `stdin` and read the streams to their ends, whichever can go on. Closes `stdin`, which must not
    block.

    Blocking. Raises TimeoutError when `until` (monotonic) passes.
    """
    left = memoryview(data)
    with selectors.DefaultSelector() as ready:
        for fd in streams:
            ready.register(fd, selectors.EVENT_READ)
        if stdin is not None:
            ready.register(stdin, selectors.EVENT_WRITE)
        try:
            while ready.get_map():
                for key, _ in ready.select(_remaining(until)):
                    if key.fd == stdin:
                        left = _written(key.fd, left)
                        if not left:
                            ready.unregister(key.fd)
                            os.close(key.fd)
                            stdin = None
                    elif chunk := os.read(key.fd, _CHUNK):
                        streams[key.fd].add(chunk)
                    else:
                        ready.unregister(key.fd)
        finally:
            if stdin is not None:
                os.close(stdin)


def _remaining(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _written(fd: int, left: memoryview) -> memoryview:
    """What is still to be written; nothing when nobody reads any more."""
    try:
        return left[os.write(fd, left[:_CHUNK]) :]
    except BrokenPipeError:
        return left[:0]
