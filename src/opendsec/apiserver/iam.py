"""Who may do what: projects, API keys and roles.

A key is `odk_` and 43 characters of 256 random bits. Only its SHA-256 is stored (a slow hash would add nothing to a
random secret), it is shown once, when it is made. Roles: a runner starts and uses sandboxes of its project; a builder
may also pack and change images; a member is both in one, as every key was before there were these two; an admin also
makes projects and keys. A deleted key stops working at once in the apiserver that deleted it and within CACHE_S
elsewhere.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa

from opendsec import errors
from opendsec.apiserver.schema import api_keys, projects
from opendsec.apiserver.storage import Storage
from opendsec.model.access import KeyRecord, NewKey, Project, Role
from opendsec.model.ids import PROJECT_NAME, new_token
from opendsec.wire.contracts import RIGHT_BUILD

KEY_PREFIX = "odk_"
CACHE_S = 5.0
_MAX_CACHED = 10_000
_KEY = re.compile(KEY_PREFIX + r"[A-Za-z0-9_-]{43}\Z")


class Right(StrEnum):
    """What a role may allow, beyond starting and using sandboxes, which every key may."""

    BUILD = RIGHT_BUILD
    """Make, publish and change images: pack, build, push, tag, remove."""
    ADMINISTER = "administer"
    """Make projects and keys."""


RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.ADMIN: frozenset(Right),
    Role.MEMBER: frozenset({Right.BUILD}),
    Role.BUILDER: frozenset({Right.BUILD}),
    Role.RUNNER: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is asking."""

    key_id: str
    project: str
    role: Role


def check_project_name(name: str) -> str:
    """The name itself if it is 1 to 63 lower-case letters, digits and inner dashes, else InvalidSpecError."""
    if not PROJECT_NAME.match(name):
        raise errors.InvalidSpecError(
            f"project: {name[:80]!r} is not 1 to 63 lower-case letters, digits and inner dashes",
            detail={"field": "project"},
        )
    return name


def require_build(principal: Principal) -> None:
    """Raises ForbiddenError unless the principal may make and change images."""
    if Right.BUILD not in RIGHTS[principal.role]:
        raise errors.ForbiddenError(
            "this key may run sandboxes, and neither pack nor change images",
            detail={"role": principal.role, "right": Right.BUILD},
            remedy="use a key with the role builder",
        )


def require_admin(principal: Principal) -> None:
    """Raises ForbiddenError unless the principal is an admin."""
    if Right.ADMINISTER not in RIGHTS[principal.role]:
        raise errors.ForbiddenError(
            "this key may not administer keys and projects", detail={"role": principal.role}, remedy="use an admin key"
        )


def hash_key(key: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Iam:
    """Reads and writes principals in the store; `clock` is monotonic seconds for the cache."""

    def __init__(self, storage: Storage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._cache: dict[str, tuple[float, Principal]] = {}
        self._deletions = 0

    async def verify(self, token: str) -> Principal:
        """The principal of a key. Raises UnauthorizedError, alike for every wrong key."""
        if not _KEY.match(token):
            raise _unknown_key()  # whoever guesses does not keep the store busy
        digest = hash_key(token)
        cached = self._cache.get(digest)
        if cached is not None and cached[0] > self._clock():
            return cached[1]
        principal = await self._found(digest)
        if principal is None:
            self._cache.pop(digest, None)
            raise _unknown_key()
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[digest] = (self._clock() + CACHE_S, principal)
        return principal

    async def _found(self, digest: str) -> Principal | None:
        """As the store has it, read again when a key was deleted meanwhile: what was read before must not be kept."""
        while True:
            deletions = self._deletions
            principal = await self._storage.run(lambda connection: _find_key(connection, digest))
            if deletions == self._deletions:
                return principal

    async def create_project(self, name: str) -> Project:
        """Raises ConflictError when it is there already."""
        check_project_name(name)
        if not await self._storage.run(lambda connection: insert_project(connection, name)):
            raise errors.ConflictError(f"project {name} exists already", detail={"field": "name"})
        return Project(name=name, created_at=time.time())

    async def list_projects(self) -> tuple[Project, ...]:
        """By name."""
        rows = await self._storage.run(
            lambda connection: connection.execute(sa.select(projects).order_by(projects.c.name)).all()
        )
        return tuple(Project(name=row.name, created_at=row.created_at) for row in rows)

    async def create_key(self, *, project: str, role: Role, title: str = "") -> NewKey:
        """Raises NotFoundError for a project that does not exist."""
        check_project_name(project)
        if len(title) > 200:
            raise errors.InvalidSpecError("title: longer than 200 characters", detail={"field": "title"})
        return await self._storage.run(
            lambda connection: insert_key(connection, project=project, role=role, title=title)
        )

    async def list_keys(self) -> tuple[KeyRecord, ...]:
        """Oldest first, without secrets."""
        rows = await self._storage.run(
            lambda connection: connection.execute(sa.select(api_keys).order_by(api_keys.c.created_at)).all()
        )
        return tuple(
            KeyRecord(
                key_id=row.key_id, project=row.project, role=Role(row.role), title=row.title, created_at=row.created_at
            )
            for row in rows
        )

    async def delete_key(self, key_id: str) -> None:
        """Raises NotFoundError when there is none of that id."""
        statement = sa.delete(api_keys).where(api_keys.c.key_id == key_id)
        removed = await self._storage.run(lambda connection: connection.execute(statement).rowcount)
        self._deletions += 1
        if not removed:
            raise errors.NotFoundError(f"no key {key_id[:80]!r}", detail={"field": "key_id"})
        self._cache = {digest: entry for digest, entry in self._cache.items() if entry[1].key_id != key_id}


def _unknown_key() -> errors.UnauthorizedError:
    return errors.UnauthorizedError(
        "the API key is not known",
        remedy="check OPENDSEC_API_KEY; unset, the key of this machine's own platform is used",
    )


def _find_key(connection: sa.Connection, digest: str) -> Principal | None:
    row = connection.execute(sa.select(api_keys).where(api_keys.c.key_hash == digest)).one_or_none()
    return None if row is None else Principal(key_id=row.key_id, project=row.project, role=Role(row.role))


def insert_project(connection: sa.Connection, name: str) -> bool:
    """False when it is there already."""
    if connection.execute(sa.select(projects.c.name).where(projects.c.name == name)).first() is not None:
        return False
    connection.execute(sa.insert(projects).values(name=name, created_at=time.time()))
    return True


def insert_key(connection: sa.Connection, *, project: str, role: Role, title: str) -> NewKey:
    """Raises NotFoundError for a project that does not exist."""
    if connection.execute(sa.select(projects.c.name).where(projects.c.name == project)).first() is None:
        raise errors.NotFoundError(f"no project {project}", detail={"field": "project"})
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    record = KeyRecord(key_id=f"key-{new_token()}", project=project, role=role, title=title, created_at=time.time())
    connection.execute(
        sa.insert(api_keys).values(
            key_id=record.key_id,
            key_hash=hash_key(key),
            project=project,
            role=role.value,
            title=title,
            created_at=record.created_at,
        )
    )
    return NewKey(key=key, record=record)
