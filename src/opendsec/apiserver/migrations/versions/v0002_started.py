"""Which sandboxes of a key have been told about: a repeat never starts those again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rows that are only added, because a row of `creations` is large."""
    op.create_table(
        "started",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=False),
        sa.Column("indexes", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
    op.create_index("ix_started_of", "started", ["project", "idempotency_key"])
    op.create_index("ix_started_expires_at", "started", ["expires_at"])


def downgrade() -> None:
    """Without it."""
    op.drop_table("started")
