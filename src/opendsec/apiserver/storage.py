"""Runs transactions on the database without holding up the event loop.

SQLite has one writer, so one thread serves it and no transaction ever waits for another; other databases get several
threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa

T = TypeVar("T")
_THREADS = 8


class Storage:
    """Owns an engine and the threads that use it."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        threads = 1 if engine.dialect.name == "sqlite" else _THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="storage")

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one transaction: committed when it returns, rolled back when it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transaction, work)

    def _transaction(self, work: Callable[[sa.Connection], T]) -> T:
        with self._engine.begin() as connection:
            return work(connection)

    def close(self) -> None:
        """Wait for what is running and close the connections."""
        self._threads.shutdown(wait=True)
        self._engine.dispose()
