"""The client's commands of `opendsec image …`: importing a module of commands registers them with the group."""

from __future__ import annotations

from opendsec.cli import building as _building  # noqa: F401
from opendsec.cli import images as _images  # noqa: F401
from opendsec.cli import packing as _packing  # noqa: F401
from opendsec.cli.image_group import app

__all__ = ["app"]
