"""What a node has mounted, written down in the store, so that nobody collects it there.

    <root>/nodes/<kernel>-<mount root>.json    the layers, and the host's name for people; its time is the heartbeat

Deleting a file that another node has open breaks its readers on most network file systems. So a lease is written
before a layer is looked for, and read by whoever collects after a file was moved away and before it is deleted.

One file per mount root and boot: mounts end with the kernel. It is touched every minute; after `LEASE_S` of silence the
node counts as dead. Processes of one node change it under the lock of their mount root.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from opendsec.model.image import Layer
from opendsec.store.durable import appearing, disk_full_named
from opendsec.store.layout import Layout, is_content, layer_files
from opendsec.store.staging import beating, kernel_id

LEASE_S = 86_400.0
"""Seconds of silence after which what a node had mounted may be collected. A day: only space is lost by waiting."""

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One node's, as it was read."""

    file: Path
    host: str
    layers: Mapping[str, tuple[str, ...]]
    """Files of each mounted layer, by its digest."""
    beat_at: float
    """Unix time by the file system's clock, seconds."""

    @property
    def files(self) -> set[str]:
        """All of them."""
        return {file for files in self.layers.values() for file in files}


class Leases:
    """This node's lease on the layers below one mount root. The caller holds that root's lock to change it."""

    def __init__(self, layout: Layout, mount_root: Path) -> None:
        place = hashlib.sha256(os.fsencode(mount_root.resolve())).hexdigest()[:8]
        self._root = layout.root
        self.file = layout.nodes / f"{kernel_id()}-{place}.json"

    def take(self, layer: Layer) -> None:
        """Nobody may collect this layer from now on. Raises DiskFullError, OSError."""
        layers = self._layers()
        if layer.digest not in layers:
            self._write({**layers, layer.digest: layer_files(layer)})

    def drop(self, digest: str) -> None:
        """The layer of that digest is mounted no more."""
        layers = self._layers()
        if layers.pop(digest, None) is not None:
            self._write(layers)

    def keep_only(self, mounted: Iterable[str]) -> None:
        """Drop all but the layers of these digests: what a process that died had still to mount."""
        layers, kept = self._layers(), set(mounted)
        if layers.keys() - kept:
            self._write({digest: files for digest, files in layers.items() if digest in kept})

    def drop_all(self) -> None:
        """Nothing is mounted any more."""
        self.file.unlink(missing_ok=True)

    def beating(self) -> AbstractContextManager[None]:
        """Say every minute that this node is alive, while the body runs."""
        with suppress(FileNotFoundError):
            os.utime(self.file)
        return beating(self.file)

    def _layers(self) -> dict[str, tuple[str, ...]]:
        found = read_lease(self.file)
        return dict(found.layers) if found is not None else {}

    def _write(self, layers: Mapping[str, tuple[str, ...]]) -> None:
        """Not synced: a lease means nothing after a crash of the machine."""
        content = json.dumps({"schema": _SCHEMA, "host": socket.gethostname(), "layers": layers})
        with disk_full_named(self._root), appearing(self.file) as partial:
            partial.write_text(content, encoding="utf-8")


def read_lease(file: Path) -> Lease | None:
    """None when there is none. ValueError when it is none of ours."""
    try:
        with file.open("rb") as opened:
            fields, beat_at = json.loads(opened.read()), os.fstat(opened.fileno()).st_mtime
    except FileNotFoundError:
        return None
    if not isinstance(fields, dict) or fields.get("schema") != _SCHEMA:
        raise ValueError(f"{file} is no lease")
    layers = {digest: tuple(one for one in files if is_content(one)) for digest, files in fields["layers"].items()}
    return Lease(file=file, host=str(fields["host"]), layers=layers, beat_at=beat_at)


def read_leases(layout: Layout) -> list[Lease]:
    """Those of all nodes. ValueError for one that cannot be read: it may need anything."""
    found = (read_lease(path) for path in sorted(layout.nodes.iterdir()) if not path.name.startswith("."))
    return [lease for lease in found if lease is not None]
