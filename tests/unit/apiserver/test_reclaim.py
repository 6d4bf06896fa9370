"""Deleting what nobody was told about goes on whatever the database does for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa

from opendsec.apiserver import reclaim
from opendsec.apiserver.database import sqlite_url
from opendsec.apiserver.edges import Edges
from opendsec.apiserver.reclaim import Reclaimer
from opendsec.apiserver.schema import metadata, reclaims
from opendsec.apiserver.storage import Storage
from opendsec.errors import DiskFullError
from opendsec.model.ids import new_sandbox_id

pytestmark = pytest.mark.anyio
T = TypeVar("T")


class FullForAMoment(Storage):
    """The next `failures` transactions fail."""

    failures = 0

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        if self.failures:
            self.failures -= 1
            raise DiskFullError("the database cannot grow")
        return await super().run(work)


async def test_a_database_that_fails_for_a_moment_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "RETRY_S", 0.01)
    monkeypatch.setattr(reclaim, "SETTLE_S", -1.0)
    engine = sa.create_engine(sqlite_url(tmp_path / "db"))
    metadata.create_all(engine)
    storage = FullForAMoment(engine)
    reclaimer = Reclaimer(storage, Edges({}))
    await reclaimer.add("default", [new_sandbox_id("gone")])
    storage.failures = 3
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(reclaimer.run())
        while await _count(storage):
            await asyncio.sleep(0.005)
        running.cancel()
    storage.close()


async def _count(storage: FullForAMoment) -> int:
    if storage.failures:
        return -1
    return await storage.run(lambda connection: len(connection.execute(sa.select(reclaims)).all()))
