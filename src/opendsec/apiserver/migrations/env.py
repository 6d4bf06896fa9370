"""Runs migrations on the connection the store hands over; Alembic imports this file by its place.

There is no offline mode and no alembic.ini: the database is always the one an apiserver is about to use.
"""

from __future__ import annotations

from alembic import context

from opendsec.apiserver.schema import metadata


def run() -> None:
    """Bring the database to the newest version, inside the caller's transaction."""
    context.configure(
        connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
    )
    context.run_migrations()


run()
