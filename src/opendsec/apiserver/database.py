"""Opens the control plane's database and brings it to the newest schema.

SQLite runs in WAL mode with synchronous=NORMAL: a committed row survives kill -9 of the process, and a power cut can
lose the last moments but never corrupts. Concurrent starts on one database are safe: the migration runs inside one
write transaction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from opendsec.errors import InvalidSpecError

HEAD = "0002"
"""The newest migration; compared first, because importing Alembic costs a fifth of a second at every start."""


def open_database(url: str) -> sa.Engine:
    """An engine on the newest schema.

    Raises InvalidSpecError for an unusable URL, sqlalchemy's OperationalError otherwise.
    """
    try:
        parsed = sa.make_url(url)
        engine = sa.create_engine(parsed, pool_pre_ping=not parsed.drivername.startswith("sqlite"))
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as exc:
        raise InvalidSpecError(
            f"database_url: {exc}",
            detail={"field": "database_url"},
            remedy="use sqlite:////absolute/path or postgresql+psycopg://user@host/name (with its driver installed)",
        ) from exc
    if parsed.drivername.startswith("sqlite"):
        _prepare_sqlite(engine, parsed.database)
    _migrate(engine)
    return engine


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.absolute()}"


def _prepare_sqlite(engine: sa.Engine, file: str | None) -> None:
    if file and file != ":memory:":
        folder = Path(file).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        # Transactions are begun by us (below), not by the driver's guess.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=10000"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # IMMEDIATE: a transaction that reads first and writes later must not find that somebody else wrote in between.
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _migrate(engine: sa.Engine) -> None:
    if _version(engine) == HEAD:
        return
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _version(engine: sa.Engine) -> str:
    with engine.begin() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return ""
        return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none() or "")
