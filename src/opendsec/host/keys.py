"""The key SDK and CLI of this machine use:

an admin key of the project `default`, made when the one in local.json does not work any more.
"""

from __future__ import annotations

import contextlib

import msgspec
import sqlalchemy as sa

from opendsec.apiserver.database import open_database
from opendsec.apiserver.iam import hash_key, insert_key, insert_project
from opendsec.apiserver.schema import api_keys
from opendsec.host.local import Local
from opendsec.model.access import Role

PROJECT = "default"
_TITLE = "this machine (opendsec up)"


def ensure_local_key(local: Local) -> str:
    """The secret; project and key are made when they are missing, keys of earlier starts are removed."""
    engine = open_database(local.database_url)
    try:
        with engine.begin() as connection:
            insert_project(connection, PROJECT)
            present = _present_key(local)
            works = sa.select(api_keys.c.key_id).where(api_keys.c.key_hash == hash_key(present))
            if present and connection.execute(works).first() is not None:
                return present
            connection.execute(sa.delete(api_keys).where(api_keys.c.title == _TITLE, api_keys.c.project == PROJECT))
            return insert_key(connection, project=PROJECT, role=Role.ADMIN, title=_TITLE).key
    finally:
        engine.dispose()


def _present_key(local: Local) -> str:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(local.local_json.read_bytes(), type=dict[str, str]).get("api_key", "")
    return ""
