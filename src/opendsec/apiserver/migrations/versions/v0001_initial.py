"""Projects, API keys, idempotency keys of creates, and sandboxes to reclaim."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The first tables."""
    op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column("key_hash", sa.String(64), nullable=False, unique=True),
        sa.Column("project", sa.String(63), sa.ForeignKey("projects.name"), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("title", sa.String(200), nullable=False, server_default=""),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("ix_api_keys_project", "api_keys", ["project"])
    op.create_table(
        "creations",
        sa.Column("project", sa.String(63), primary_key=True),
        sa.Column("idempotency_key", sa.String(255), primary_key=True),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("sandbox_ids", sa.Text, nullable=False),
        sa.Column("completed", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
    op.create_index("ix_creations_expires_at", "creations", ["expires_at"])
    op.create_table(
        "reclaims",
        sa.Column("sandbox_id", sa.String(80), primary_key=True),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Back to an empty database."""
    for table in ("reclaims", "creations", "api_keys", "projects"):
        op.drop_table(table)
