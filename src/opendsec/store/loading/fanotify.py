"""Read layers from sparse files of this node that are filled when the kernel is about to read them (Linux 6.14).

Once a range is in the page cache nothing of ours is between it and its readers, and a complete file is a plain file.
Metadata is copied whole, because reads of it do not ask. Who fills the files is `fanotify_filling`; this side asks it
for layers, and knows by the group's token whether what was mounted before was asked about all the time since.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from opendsec.errors import NodeError
from opendsec.model.image import Layer
from opendsec.store.loading.base import LayerFiles, Loader, LoaderKind
from opendsec.store.loading.control import ask
from opendsec.store.loading.fanotify_group import Place, place_of, token_of
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import ATTACH_S, RETURNS_S, SOCKET, fetched_metadata, with_metadata
from opendsec.store.manifest import hex_of

_POLL_S = 0.05


class FanotifyLoader(Loader):
    """`run_dir` and `state_dir` are the platform's; `source` the store's files."""

    kind = LoaderKind.FANOTIFY

    def __init__(self, source: ChunkSource, run_dir: Path, state_dir: Path, *, returns_s: float = RETURNS_S) -> None:
        self._source = source
        self._socket = run_dir / SOCKET
        self._copies = state_dir / "cache" / "metadata"
        self._place: Place = place_of(run_dir, state_dir)
        self._returns_s = returns_s

    @property
    def generation(self) -> str:
        """Of the group: it outlives the processes one by one, not all at once."""
        return token_of(self._place)

    def attach(self, layer: Layer) -> LayerFiles:
        if layer.data is None:
            return LayerFiles(meta=fetched_metadata(self._source, layer, self._copies))
        meta, generation = with_metadata(self._source, layer, self._copies, self._attached)
        data = self._place.files / hex_of(layer.data.digest)
        return LayerFiles(meta=meta, data=data, generation=generation, is_filled_late=True, is_far=True)

    def close(self) -> None:
        self._source.close()

    def _attached(self, layer: Layer) -> str:
        generation = self._wait_for_process()
        ask(self._socket, "attach", timeout_s=ATTACH_S, layer=msgspec.to_builtins(layer))
        return generation

    def _wait_for_process(self) -> str:
        waited = threading.Event()
        for _ in range(max(1, int(self._returns_s / _POLL_S))):
            generation = self.generation
            if generation and self._socket.exists():
                return generation
            waited.wait(_POLL_S)
        raise NodeError(
            "no loader runs on this node, so layers cannot be read",
            detail={"path": str(self._place.run)},
            remedy="`opendsec up` starts it; without, run `python -m opendsec.host.loader`",
            retryable=True,
        )
