"""An edge as ours in everything but one thing: layers are fetched as tar.gz and unpacked, as container engines pull.

    BURST_TARS      directory on the store: <hex of the layer's digest>.tar.gz
    BURST_UNPACKED  directory of this node's disk

Each layer is fetched and unpacked once, by whoever needs it first; the others wait; it is kept for the next. The stream
is unpacked as it comes, without a copy of the archive on the disk: engines that keep one write more than this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

from opendsec.edge import __main__ as edge
from opendsec.edge.settings import read_settings
from opendsec.model.image import Image, Layer
from opendsec.server import logs
from opendsec.server.runner import run
from opendsec.store.manifest import hex_of
from opendsec.store.mounts import LayerMounts

TIMEOUT_S = 600


class UnpackedLayers(LayerMounts):
    """Directories instead of mounts."""

    _tars = Path(os.environ.get("BURST_TARS", ""))
    _unpacked = Path(os.environ.get("BURST_UNPACKED", ""))
    _turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
    _directories: dict[str, int] = {}

    def acquire(self, image: Image) -> tuple[int, ...]:
        """Topmost first."""
        return tuple(self._unpacked_layer(layer) for layer in reversed(image.layers))

    def acquired(self, image: Image) -> tuple[int, ...] | None:
        """Without waiting."""
        found = tuple(self._directories.get(layer.digest, -1) for layer in reversed(image.layers))
        return None if -1 in found else found

    def _unpacked_layer(self, layer: Layer) -> int:
        with self._turns[layer.digest]:
            if layer.digest not in self._directories:
                name = hex_of(layer.digest)
                partial, target = self._unpacked / f"{name}.part", self._unpacked / name
                partial.mkdir(parents=True)
                command = ("tar", "--numeric-owner", "-xpzf", str(self._tars / f"{name}.tar.gz"), "-C", str(partial))
                subprocess.run(command, check=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
                partial.rename(target)
                self._directories[layer.digest] = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._directories[layer.digest]


if __name__ == "__main__":
    vars(edge)["LayerMounts"] = UnpackedLayers
    chosen = read_settings(os.environ)
    logs.configure(chosen.log_level)
    sys.exit(run(edge.main(chosen)))
