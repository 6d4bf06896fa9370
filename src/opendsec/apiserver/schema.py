"""Tables of the control plane's only durable store. Changes come with a migration in `migrations/versions`.

Portable SQL only: SQLite on one machine, PostgreSQL for several apiservers. Times are Unix seconds.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("key_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("project", sa.String(63), sa.ForeignKey("projects.name"), nullable=False, index=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("title", sa.String(200), nullable=False, server_default=""),
    sa.Column("created_at", sa.Float, nullable=False),
)

creations = sa.Table(
    "creations",
    metadata,
    sa.Column("project", sa.String(63), primary_key=True),
    sa.Column("idempotency_key", sa.String(255), primary_key=True),
    sa.Column("body_digest", sa.String(64), nullable=False),
    sa.Column("sandbox_ids", sa.Text, nullable=False),
    sa.Column("completed", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("expires_at", sa.Float, nullable=False, index=True),
)
"""What an idempotency key stands for: written before an edge is asked, so a repeat asks for the same sandboxes."""

started = sa.Table(
    "started",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("project", sa.String(63), nullable=False),
    sa.Column("idempotency_key", sa.String(255), nullable=False),
    sa.Column("indexes", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False, index=True),
    sa.Index("ix_started_of", "project", "idempotency_key"),
)
"""Which indexes of a batch with a key were told about as started. Only added to: a row of `creations` is large."""

reclaims = sa.Table(
    "reclaims",
    metadata,
    sa.Column("sandbox_id", sa.String(80), primary_key=True),
    sa.Column("project", sa.String(63), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
"""Sandboxes nobody was told about, to be deleted as soon as their edge answers."""
