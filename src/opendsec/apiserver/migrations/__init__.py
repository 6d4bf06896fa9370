"""Alembic's folder: `env` runs the versions, `versions` holds them in order."""
