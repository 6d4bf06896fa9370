"""Work of one import that goes on beside the thread that asked for it, and ends with it.

A task tells how far it is; the thread that waits for it is the one that reports that. When an import fails, whatever
still runs for it is ended, its programs too, before the failure goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar

from opendsec.linux import libc
from opendsec.linux.mount import attach
from opendsec.store.progress import OnProgress, Progress

T = TypeVar("T")

_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[T]):
    """Something that runs in the background."""

    name: str
    future: Future[T]


class _Abandoned(Exception):
    """Raised inside a task whose import has failed elsewhere: it ends what it does, its program with it."""


class Background:
    """Tasks on other cores. Leaving the context ends them all, waits for them, and drops what they would say."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="import")
        self._over = threading.Event()
        self._done: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, name: str, call: Callable[[], T]) -> Task[T]:
        """Start it as soon as a core is free."""
        self._done[name] = (0, 1)
        return Task(name=name, future=self._pool.submit(call))

    def tell(self, name: str, done: int, total: int | None) -> None:
        """Called by tasks: how far they are."""
        if self._over.is_set():
            raise _Abandoned(name)
        self._done[name] = (done, total or max(done, 1))

    def finish(self, tasks: Sequence[Task[T]], phase: str, on_progress: OnProgress) -> list[T]:
        """What the tasks returned; waits for them, and tells how far they are. Raises what the first failed one did."""
        futures = [task.future for task in tasks]
        while wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION).not_done:
            if failed := [future for future in futures if future.done() and future.exception() is not None]:
                failed[0].result()
            about = [self._done[task.name] for task in tasks]
            on_progress(Progress(phase=phase, done=sum(one[0] for one in about), total=sum(one[1] for one in about)))
        return [future.result() for future in futures]


def with_mounted(tree: int, target: Path, call: Callable[[], T]) -> T:
    """Call while a detached mount is to be seen at `target`, by this thread and what it starts, and by nobody else.

    The thread leaves the mount namespace of its process for ever: it must be one of a `Background`.
    """
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount("none", "/", flags=libc.MS_REC | libc.MS_PRIVATE)
    attach(tree, target)
    try:
        return call()
    finally:
        libc.umount2(target, libc.MNT_DETACH)
