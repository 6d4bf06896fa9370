"""An edge as ours, but layers are mounted without `directio`: what that option saves is seen beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from opendsec.edge import __main__ as edge
from opendsec.edge.settings import read_settings
from opendsec.linux.mount import erofs
from opendsec.server import logs
from opendsec.server.runner import run
from opendsec.store import mounts


def buffered(image: Path, *, devices: Sequence[Path] = (), direct: bool = True) -> int:
    """Whatever was asked for."""
    del direct
    return erofs(image, devices=devices, direct=False)


if __name__ == "__main__":
    vars(mounts)["erofs"] = buffered
    chosen = read_settings(os.environ)
    logs.configure(chosen.log_level)
    sys.exit(run(edge.main(chosen)))
