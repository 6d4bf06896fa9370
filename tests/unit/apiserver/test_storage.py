"""The store: the migrations make the schema the code uses, claims are exact, keys are kept as hashes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from opendsec import errors
from opendsec.apiserver.creations import Claim, Creations, check_key
from opendsec.apiserver.database import HEAD, open_database
from opendsec.apiserver.iam import Iam, Principal, check_project_name, insert_project, require_admin
from opendsec.apiserver.schema import api_keys, metadata
from opendsec.apiserver.storage import Storage
from opendsec.model.access import Role
from opendsec.model.ids import new_sandbox_id
from opendsec.wire.contracts import OWN_KEY_PREFIX

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database on the newest schema, to be copied."""
    path = tmp_path_factory.mktemp("db") / "iam.sqlite3"
    open_database(f"sqlite:///{path}").dispose()
    return path


@pytest.fixture
def storage(migrated: Path, tmp_path: Path) -> Iterator[Storage]:
    path = tmp_path / "iam.sqlite3"
    path.write_bytes(migrated.read_bytes())
    storage = Storage(open_database(f"sqlite:///{path}"))
    yield storage
    storage.close()


def test_migrations_and_tables_agree(migrated: Path) -> None:
    engine = open_database(f"sqlite:///{migrated}")
    with engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one() == HEAD
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar_one() == "wal"
    engine.dispose()


async def test_a_full_disk_and_other_failures_have_a_type(storage: Storage) -> None:
    def fill(connection: sa.Connection) -> None:
        pages = connection.execute(sa.text("PRAGMA page_count")).scalar_one()
        connection.execute(sa.text(f"PRAGMA max_page_count = {pages}"))
        connection.execute(sa.text("CREATE TABLE large (x BLOB)"))
        connection.execute(sa.text("INSERT INTO large VALUES (zeroblob(1000000))"))

    with pytest.raises(errors.DiskFullError):
        await storage.run(fill)
    with pytest.raises(errors.NodeError, match="no such table"):
        await storage.run(lambda connection: connection.execute(sa.text("SELECT * FROM nowhere")))


@pytest.mark.parametrize("url", ["", "nonsense", "mysql+nothing://x", "sqlite3:///x"])
def test_an_unusable_url_is_named(url: str) -> None:
    with pytest.raises(errors.InvalidSpecError) as caught:
        open_database(url)
    assert caught.value.detail["field"] == "database_url"


async def test_a_key_works_is_not_stored_and_can_be_deleted(storage: Storage) -> None:
    now = 0.0
    iam, elsewhere = Iam(storage, clock=lambda: now), Iam(storage, clock=lambda: now)
    await iam.create_project("team-1")
    made = await iam.create_key(project="team-1", role=Role.MEMBER, title="ci")
    expected = Principal(key_id=made.record.key_id, project="team-1", role=Role.MEMBER)
    assert await iam.verify(made.key) == await elsewhere.verify(made.key) == expected
    rows = await storage.run(lambda connection: connection.execute(sa.select(api_keys)).all())
    assert made.key not in str(rows)
    assert made.key.removeprefix("odk_") not in str(rows)
    await iam.delete_key(made.record.key_id)
    with pytest.raises(errors.UnauthorizedError):
        await iam.verify(made.key)
    assert await elsewhere.verify(made.key) == expected  # its memory is CACHE_S old at most
    now = 6.0
    with pytest.raises(errors.UnauthorizedError):
        await elsewhere.verify(made.key)


async def test_a_key_that_is_deleted_while_it_is_looked_up_works_no_longer(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, go = asyncio.Event(), asyncio.Event()
    iam, run = Iam(storage), storage.run
    await iam.create_project("team-1")
    made = await iam.create_key(project="team-1", role=Role.MEMBER)

    async def slow(work: Callable[[sa.Connection], Any]) -> Any:
        found = await run(work)
        if not read.is_set():
            read.set()
            await go.wait()
        return found

    monkeypatch.setattr(storage, "run", slow)
    looking = asyncio.ensure_future(iam.verify(made.key))
    await read.wait()
    await iam.delete_key(made.record.key_id)
    go.set()
    for answer in (looking, iam.verify(made.key)):
        with pytest.raises(errors.UnauthorizedError):
            await answer


async def test_projects_and_roles(storage: Storage) -> None:
    iam = Iam(storage)
    await iam.create_project("p")
    with pytest.raises(errors.ConflictError):
        await iam.create_project("p")
    with pytest.raises(errors.NotFoundError):
        await iam.create_key(project="q", role=Role.ADMIN)
    for bad in ("", "A", "-a", "a-", "a" * 64, "a/b", "ü"):
        with pytest.raises(errors.InvalidSpecError):
            check_project_name(bad)
    with pytest.raises(errors.ForbiddenError):
        require_admin(Principal(key_id="k", project="p", role=Role.MEMBER))


async def claim(
    creations: Creations, *, digest: str = "d", key: str = "k", project: str = "p", timeout_s: float = 0.0
) -> Claim:
    ids = (new_sandbox_id("local"),)
    return await creations.claim(project=project, key=key, body_digest=digest, sandbox_ids=ids, timeout_s=timeout_s)


async def test_a_claim_is_the_first_one_for_everybody(storage: Storage) -> None:
    creations, elsewhere = Creations(storage), Creations(storage)
    claims = await asyncio.gather(*(claim(creations if turn % 2 else elsewhere) for turn in range(10)))
    assert len({one.sandbox_ids for one in claims}) == 1
    assert (await claim(creations, project="q")).sandbox_ids != claims[0].sandbox_ids
    with pytest.raises(errors.ConflictError):
        await claim(creations, digest="other")


async def test_moving_completing_and_forgetting_only_touch_what_still_holds(storage: Storage) -> None:
    creations = Creations(storage)
    first = await claim(creations)
    moved = await creations.move(first, (new_sandbox_id("b"),))
    late = await creations.move(first, (new_sandbox_id("c"),))
    assert late.sandbox_ids == moved.sandbox_ids
    assert not await creations.complete(first)
    await creations.forget(first)
    assert await creations.complete(moved)
    assert (await claim(creations)).completed
    await creations.forget(moved)
    assert (await claim(creations)).sandbox_ids == moved.sandbox_ids
    fresh = await claim(creations, key="k2")
    await creations.forget(fresh)
    assert (await claim(creations, key="k2")).sandbox_ids != fresh.sandbox_ids


async def test_what_was_started_is_kept_with_the_key(storage: Storage) -> None:
    creations = Creations(storage)
    first = await claim(creations)
    for indexes in ({0, 7, 8}, {32_767}, {8, 9}):
        await creations.mark_started(first, indexes)
    assert (await claim(creations)).started == {0, 7, 8, 9, 32_767}
    assert await creations.find("p", "k") == await claim(creations)
    with pytest.raises(errors.NotFoundError):
        await creations.find("p", "other")


async def test_a_key_is_forgotten_when_its_time_is_over(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("opendsec.apiserver.creations.time", SimpleNamespace(time=lambda: now))
    creations, own = Creations(storage), f"{OWN_KEY_PREFIX}1"
    first = {key: (await claim(creations, key=key, timeout_s=7000)).sandbox_ids for key in (own, "mine")}
    for passed, same in ((10_000, (True, True)), (12_000, (False, True)), (25.5 * 3600, (False, True))):
        now = 1_000_000.0 + passed
        again = [(await claim(creations, key=key)).sandbox_ids == first[key] for key in (own, "mine")]
        assert tuple(again) == same
    now = 1_000_000.0 + 24 * 3600 + 7100
    assert (await claim(creations, key="mine")).sandbox_ids != first["mine"]


async def test_requests_with_one_key_take_turns(storage: Storage) -> None:
    creations = Creations(storage)
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with creations.alone("p", "k"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    assert most == 1
    assert creations._locks == {}


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256, "\n"])
def test_an_idempotency_key_is_visible_ascii(key: str) -> None:
    with pytest.raises(errors.InvalidSpecError):
        check_key(key)


async def test_a_transaction_that_fails_leaves_nothing(storage: Storage) -> None:
    def work(connection: sa.Connection) -> None:
        insert_project(connection, "half")
        raise errors.ConflictError("no")

    with pytest.raises(errors.ConflictError):
        await storage.run(work)
    assert await Iam(storage).list_projects() == ()
