"""The few things that differ between the async SDK and its sync twin: pairs of one meaning, `AsyncX` and `X`.

`scripts/unasync.py` maps the first to the second. Waiting in the sync twin blocks its thread only.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class AsyncLock:
    """One holder at a time."""

    def __init__(self) -> None:
        self._lock = anyio.Lock(fast_acquire=True)

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class Lock:
    """One holder at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class AsyncGate:
    """At most `limit` holders; further ones wait."""

    def __init__(self, limit: int) -> None:
        self._semaphore = anyio.Semaphore(limit, fast_acquire=True)

    async def enter(self, timeout_s: float | None) -> bool:
        """True once inside, False when `timeout_s` passed first."""
        try:
            self._semaphore.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(timeout_s):
                await self._semaphore.acquire()
                return True
            return False
        return True

    def leave(self) -> None:
        self._semaphore.release()


class Gate:
    """At most `limit` holders; further ones wait."""

    def __init__(self, limit: int) -> None:
        self._semaphore = threading.Semaphore(limit)

    def enter(self, timeout_s: float | None) -> bool:
        """True once inside, False when `timeout_s` passed first."""
        return self._semaphore.acquire(timeout=timeout_s)

    def leave(self) -> None:
        self._semaphore.release()


async def async_pause(seconds: float) -> None:
    """Wait."""
    await anyio.sleep(seconds)


def pause(seconds: float) -> None:
    """Wait."""
    threading.Event().wait(seconds)


async def async_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that blocks (local files) without stopping the event loop."""
    return await anyio.to_thread.run_sync(lambda: function(*args, **kwargs))


def blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that blocks; here the caller's thread blocks."""
    return function(*args, **kwargs)


@asynccontextmanager
async def async_last_words(seconds: float) -> AsyncIterator[None]:
    """For clean-up after a cancellation: not cancelled again, but over after `seconds`."""
    with anyio.move_on_after(seconds, shield=True):
        yield


@contextmanager
def last_words(seconds: float) -> Iterator[None]:
    """The twin; `seconds` binds nothing because each call inside has a timeout of its own."""
    yield


def async_interruption() -> type[BaseException]:
    """What is raised in a call that its caller gives up."""
    return anyio.get_cancelled_exc_class()


def interruption() -> type[BaseException]:
    """What is raised in a call that its caller gives up."""
    return KeyboardInterrupt
