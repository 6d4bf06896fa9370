"""What an idempotency key stands for: which sandboxes, for which request.

The row is written before an edge is asked. A repeat of the request, in this process or another, before or after a
kill -9, therefore asks for the same sandbox ids, and asking an edge twice for one id starts one sandbox.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from opendsec import errors
from opendsec.apiserver.schema import creations
from opendsec.apiserver.storage import Storage
from opendsec.model.ids import SandboxId
from opendsec.wire.contracts import HEADER_IDEMPOTENCY

KEEP_S = 24 * 3600.0
"""How long a key is remembered after its first use, at least."""
SWEEP_EVERY_S = 60.0
"""How often keys that may be forgotten are."""

_INSERT = sa.text(
    "INSERT INTO creations (project, idempotency_key, body_digest, sandbox_ids, completed, expires_at)"
    " VALUES (:project, :key, :body_digest, :sandbox_ids, FALSE, :expires_at)"
    " ON CONFLICT (project, idempotency_key) DO NOTHING"
)
"""The same words for SQLite and PostgreSQL; nearly every key is new, so the usual claim is this one statement."""
_COMPLETE = sa.text(
    "UPDATE creations SET completed = TRUE"
    " WHERE project = :project AND idempotency_key = :key AND sandbox_ids = :sandbox_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The sandboxes a key stands for. `completed`: they have been started and told about once."""

    project: str
    key: str
    sandbox_ids: tuple[SandboxId, ...]
    completed: bool = False


def check_key(key: str | None) -> str | None:
    """The key itself if it is 1 to 255 visible ASCII characters, or None. Raises InvalidSpecError."""
    if key is not None and not (0 < len(key) <= 255 and all("!" <= char <= "~" for char in key)):
        raise errors.InvalidSpecError(
            f"{HEADER_IDEMPOTENCY}: not 1 to 255 visible ASCII characters", detail={"field": HEADER_IDEMPOTENCY}
        )
    return key


class Creations:
    """Claims in the store, and one lock a key so that repeats in this process wait for the first."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._locks: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        self._sweep_at = 0.0

    @asynccontextmanager
    async def alone(self, project: str, key: str) -> AsyncIterator[None]:
        """While inside, no other request of this process works on that key."""
        name = (project, key)
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)

    async def claim(self, *, project: str, key: str, body_digest: str, sandbox_ids: Sequence[SandboxId]) -> Claim:
        """The claim of that key:

        a new one for `sandbox_ids`, or the one there is. Raises ConflictError for another body.
        """

        def work(connection: sa.Connection) -> tuple[str, tuple[SandboxId, ...], bool]:
            now = time.time()
            if now > self._sweep_at:
                self._sweep_at = now + SWEEP_EVERY_S
                connection.execute(sa.delete(creations).where(creations.c.expires_at < now))
            fresh = {
                "project": project,
                "key": key,
                "body_digest": body_digest,
                "sandbox_ids": json.dumps(sandbox_ids),
                "expires_at": now + KEEP_S,
            }
            if connection.execute(_INSERT, fresh).rowcount:
                return body_digest, tuple(sandbox_ids), False
            row = connection.execute(sa.select(creations).where(_is(project, key))).one()
            return row.body_digest, tuple(json.loads(row.sandbox_ids)), row.completed

        digest, ids, completed = await self._storage.run(work)
        if digest != body_digest:
            raise errors.ConflictError(
                f"this {HEADER_IDEMPOTENCY} was used before with another request",
                detail={"field": HEADER_IDEMPOTENCY},
                remedy="use a fresh key for every new request",
            )
        return Claim(project=project, key=key, sandbox_ids=ids, completed=completed)

    async def move(self, claim: Claim, sandbox_ids: Sequence[SandboxId]) -> Claim:
        """Let the key stand for other sandboxes, because an edge refused the first ones.

        The newest claim if another process was faster.
        """

        def work(connection: sa.Connection) -> tuple[SandboxId, ...]:
            statement = sa.update(creations).where(_is_still(claim)).values(sandbox_ids=json.dumps(sandbox_ids))
            if connection.execute(statement).rowcount:
                return tuple(sandbox_ids)
            row = connection.execute(sa.select(creations).where(_is(claim.project, claim.key))).one_or_none()
            return tuple(json.loads(row.sandbox_ids)) if row is not None else tuple(sandbox_ids)

        ids = await self._storage.run(work)
        return Claim(project=claim.project, key=claim.key, sandbox_ids=ids)

    async def complete(self, claim: Claim) -> bool:
        """Mark it done. False: the key stands for other sandboxes by now, so these must go."""
        still = {"project": claim.project, "key": claim.key, "sandbox_ids": json.dumps(claim.sandbox_ids)}
        return bool(await self._storage.run(lambda connection: connection.execute(_COMPLETE, still).rowcount))

    async def forget(self, claim: Claim) -> None:
        """It failed for good and left nothing: the same key may try anew."""
        statement = sa.delete(creations).where(_is_still(claim), creations.c.completed.is_(False))
        await self._storage.run(lambda connection: connection.execute(statement))


def _is(project: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(creations.c.project == project, creations.c.idempotency_key == key)


def _is_still(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.and_(_is(claim.project, claim.key), creations.c.sandbox_ids == json.dumps(claim.sandbox_ids))
