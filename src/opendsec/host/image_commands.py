"""All commands of `opendsec image …`: importing a module of commands registers them with the group."""

from __future__ import annotations

from opendsec.host import desktop_building as _desktop  # noqa: F401
from opendsec.host import disk_building as _disk  # noqa: F401
from opendsec.host import image_exporting as _exporting  # noqa: F401
from opendsec.host import image_importing as _importing  # noqa: F401
from opendsec.host import image_keeping as _keeping  # noqa: F401
from opendsec.host import image_loading as _loading  # noqa: F401
from opendsec.host import images as _images  # noqa: F401
from opendsec.host.image_group import app

__all__ = ["app"]
