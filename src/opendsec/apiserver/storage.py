"""Runs transactions on the database without holding up the event loop.

SQLite has one writer, so one thread serves it, over one connection kept open, and no transaction ever waits for
another; other databases get several threads and connections from the engine's pool.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa

from opendsec import errors

T = TypeVar("T")
_THREADS = 8


class Storage:
    """Owns an engine and the threads that use it."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        threads = 1 if engine.dialect.name == "sqlite" else _THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="storage")
        self._kept: sa.Connection | None = None
        """SQLite's; belongs to its thread."""

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one transaction: committed when it returns, rolled back when it raises.

        Raises DiskFullError, or NodeError for another failure of the database.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transaction, work)

    def _transaction(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            if self._engine.dialect.name != "sqlite":
                with self._engine.begin() as connection:
                    return work(connection)
            if self._kept is None:
                self._kept = self._engine.connect()
            with self._kept.begin():
                return work(self._kept)
        except sa.exc.OperationalError as exc:
            raise _node_error(exc) from exc

    def _give_back(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def close(self) -> None:
        """Wait for what is running and close the connections."""
        self._threads.submit(self._give_back)
        self._threads.shutdown(wait=True)
        self._engine.dispose()


def _node_error(exc: sa.exc.OperationalError) -> errors.NodeError:
    reason = str(exc.orig)
    if getattr(exc.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return errors.DiskFullError(f"the apiserver's database cannot grow: {reason}", remedy="free space on its disk")
    return errors.NodeError(f"the apiserver's database failed: {reason}")
