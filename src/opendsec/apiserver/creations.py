"""What an idempotency key stands for: which sandboxes, for which request.

The row is written before an edge is asked. A repeat of the request, in this process or another, before or after a
kill -9, therefore asks for the same sandbox ids, and asking an edge twice for one id starts one sandbox.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import sqlalchemy as sa

from opendsec import errors
from opendsec.apiserver.schema import creations, started
from opendsec.apiserver.storage import Storage
from opendsec.model.ids import SandboxId
from opendsec.wire.contracts import HEADER_IDEMPOTENCY, OWN_KEY_PREFIX

KEEP_S = 24 * 3600.0
"""How long a key is remembered after its first use and the time its request may take, at least."""
OWN_KEY_KEEP_S = 3600.0
"""The same for a key the SDK made up: only the call that made it repeats it, and there is one for every create."""
SWEEP_EVERY_S = 60.0
"""How often keys that may be forgotten are."""

_INSERT = sa.text(
    "INSERT INTO creations (project, idempotency_key, body_digest, sandbox_ids, completed, expires_at)"
    " VALUES (:project, :key, :body_digest, :sandbox_ids, FALSE, :expires_at)"
    " ON CONFLICT (project, idempotency_key) DO NOTHING"
)
"""The same words for SQLite and PostgreSQL; nearly every key is new, so the usual claim is this one statement."""
_MARK = sa.text(
    "INSERT INTO started (project, idempotency_key, indexes, expires_at) VALUES (:project, :key, :indexes, :expires_at)"
)
_COMPLETE = sa.text(
    "UPDATE creations SET completed = TRUE"
    " WHERE project = :project AND idempotency_key = :key AND sandbox_ids = :sandbox_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The sandboxes a key stands for. `completed`: all have been started and told about; `started`: these indexes."""

    project: str
    key: str
    sandbox_ids: tuple[SandboxId, ...]
    expires_at: float = 0.0
    completed: bool = False
    started: frozenset[int] = frozenset()


def keep_s(key: str, timeout_s: float) -> float:
    """How long to remember a key whose request may take `timeout_s`."""
    return timeout_s + (OWN_KEY_KEEP_S if key.startswith(OWN_KEY_PREFIX) else KEEP_S)


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

    async def claim(
        self, *, project: str, key: str, body_digest: str, sandbox_ids: Sequence[SandboxId], timeout_s: float = 0.0
    ) -> Claim:
        """The claim of that key:

        a new one for `sandbox_ids`, or the one there is. `timeout_s`: how long its request may take. Raises
        ConflictError for another body.
        """

        def work(connection: sa.Connection) -> tuple[str, Claim]:
            now = time.time()
            if now > self._sweep_at:
                self._sweep_at = now + SWEEP_EVERY_S
                for table in (creations, started):
                    connection.execute(sa.delete(table).where(table.c.expires_at < now))
            expires_at = now + keep_s(key, timeout_s)
            fresh = {
                "project": project,
                "key": key,
                "body_digest": body_digest,
                "sandbox_ids": json.dumps(sandbox_ids),
                "expires_at": expires_at,
            }
            if connection.execute(_INSERT, fresh).rowcount:
                ids = tuple(sandbox_ids)
                return body_digest, Claim(project=project, key=key, sandbox_ids=ids, expires_at=expires_at)
            found = _find(connection, project, key)
            assert found is not None
            return found

        digest, claim = await self._storage.run(work)
        if digest != body_digest:
            raise errors.ConflictError(
                f"this {HEADER_IDEMPOTENCY} was used before with another request",
                detail={"field": HEADER_IDEMPOTENCY},
                remedy="use a fresh key for every new request",
            )
        return claim

    async def find(self, project: str, key: str) -> Claim:
        """The claim of a key. Raises NotFoundError."""
        found = await self._storage.run(lambda connection: _find(connection, project, key))
        if found is None:
            raise errors.NotFoundError(
                f"{HEADER_IDEMPOTENCY}: no request with this key is known", detail={"field": HEADER_IDEMPOTENCY}
            )
        return found[1]

    async def mark_started(self, claim: Claim, indexes: Iterable[int]) -> None:
        """Write down that these are about to be told as started."""
        row = {
            "project": claim.project,
            "key": claim.key,
            "indexes": json.dumps(sorted(indexes)),
            "expires_at": claim.expires_at,
        }
        await self._storage.run(lambda connection: connection.execute(_MARK, row))

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
        return replace(claim, sandbox_ids=ids)

    async def complete(self, claim: Claim) -> bool:
        """Mark it done. False: the key stands for other sandboxes by now, so these must go."""
        still = {"project": claim.project, "key": claim.key, "sandbox_ids": json.dumps(claim.sandbox_ids)}
        return bool(await self._storage.run(lambda connection: connection.execute(_COMPLETE, still).rowcount))

    async def forget(self, claim: Claim) -> None:
        """It failed for good and left nothing: the same key may try anew."""
        statement = sa.delete(creations).where(_is_still(claim), creations.c.completed.is_(False))
        await self._storage.run(lambda connection: connection.execute(statement))


def _find(connection: sa.Connection, project: str, key: str) -> tuple[str, Claim] | None:
    row = connection.execute(sa.select(creations).where(_is(project, key))).one_or_none()
    if row is None:
        return None
    of_key = sa.and_(started.c.project == project, started.c.idempotency_key == key)
    marks = connection.execute(sa.select(started.c.indexes).where(of_key)).scalars()
    return row.body_digest, Claim(
        project=project,
        key=key,
        sandbox_ids=tuple(json.loads(row.sandbox_ids)),
        expires_at=row.expires_at,
        completed=row.completed,
        started=frozenset(index for mark in marks for index in json.loads(mark)),
    )


def _is(project: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(creations.c.project == project, creations.c.idempotency_key == key)


def _is_still(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.and_(_is(claim.project, claim.key), creations.c.sandbox_ids == json.dumps(claim.sandbox_ids))
