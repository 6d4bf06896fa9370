"""From a command-line function to the event loop and back: one client, clean interrupts, one exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, TypeVar

import typer

from opendsec import DSecClient
from opendsec.cli import exits

T = TypeVar("T")
Main = Callable[[T], Awaitable[int]]
Opening = Callable[[], AbstractAsyncContextManager[T]]


def with_client(main: Main[DSecClient]) -> NoReturn:
    """Run `main` with a client and leave with the status it returns.

    SIGINT and SIGTERM cancel it, so that its `finally` blocks run (a sandbox of `run` is stopped), then set the status.
    """
    with_opened(DSecClient, main)


def with_opened(opening: Opening[T], main: Main[T]) -> NoReturn:
    """As `with_client`, with whatever `opening` opens."""
    try:
        status = _run(opening, main)
    except BrokenPipeError:
        leave_broken_pipe()
    raise typer.Exit(status)


def _run(opening: Opening[T], main: Main[T]) -> int:
    try:
        return asyncio.run(_guarded(opening, main))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group that is no group: what a user can do something about."""
    error = group.exceptions[0]
    return first_cause(error) if isinstance(error, BaseExceptionGroup) else error


async def _guarded(opening: Opening[T], main: Main[T]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with opening() as opened:
            return await main(opened)
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def leave_broken_pipe() -> NoReturn:
    """Nobody reads standard output: end quietly, and keep the interpreter from writing to it once more."""
    sys.stdout = None
    raise SystemExit(exits.BROKEN_PIPE)
