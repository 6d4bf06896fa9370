"""Read layers through the loader process of this node: portable, with a cache, from a directory, HTTP or S3.

The kernel reads data from files below <run>/data, which that process serves (`daemon`). This side copies metadata to
the node, checked, and asks for data to be attached. It knows by the process's descriptor, without asking, whether
what was mounted before can still be read: files of a process that is gone for good answer with I/O errors, and a
layer that is needed again is mounted anew from the process that came after it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from opendsec.errors import NodeError
from opendsec.linux.process import ProcessIdentity, has_ended, open_process
from opendsec.model.image import Layer
from opendsec.store.durable import appearing
from opendsec.store.loading.base import LayerFiles, Loader, LoaderKind
from opendsec.store.loading.control import NobodyAnswersError, ask
from opendsec.store.loading.copies import is_used, trim
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.manifest import hex_of

ATTACH_S = 45.0
RETURNS_S = 20.0
"""How long a start waits for a loader that died to be started again."""
SERVING = "loader/serving"
"""Pid, start time and token of the guardian that has mounted <run>/data."""
SOCKET = "loader.sock"
DATA = "data"


class FuseLoader(Loader):
    """`run_dir` is the platform's; `copies` a directory of this node for metadata; `source` the store's files."""

    kind = LoaderKind.FUSE

    def __init__(self, source: ChunkSource, copies: Path, run_dir: Path, *, returns_s: float = RETURNS_S) -> None:
        self._source = source
        self._copies = copies
        self._run_dir = run_dir
        self._returns_s = returns_s
        self._lock = threading.Lock()
        self._pidfd = -1
        self._token = ""

    @property
    def generation(self) -> str:
        """Differs whenever what was mounted before is lost; "" while no loader runs. Waits for nobody."""
        with self._lock:
            if self._pidfd >= 0 and has_ended(self._pidfd):
                os.close(self._pidfd)
                self._pidfd, self._token = -1, ""
            if self._pidfd < 0:
                self._find_process()
            return self._token

    def attach(self, layer: Layer) -> LayerFiles:
        if layer.data is None:
            return LayerFiles(meta=fetched_metadata(self._source, layer, self._copies))
        meta, generation = with_metadata(self._source, layer, self._copies, self._attached)
        data = self._run_dir / DATA / hex_of(layer.data.digest)
        return LayerFiles(meta=meta, data=data, generation=generation, is_far=True)

    def close(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd, self._token = -1, ""
        self._source.close()

    def _attached(self, layer: Layer) -> str:
        """The generation whose process serves the layer. One that is just being started again is waited for."""
        end = time.monotonic() + self._returns_s
        waited = threading.Event()
        while True:
            generation = self.generation
            try:
                if generation:
                    ask(self._run_dir / SOCKET, "attach", timeout_s=ATTACH_S, layer=msgspec.to_builtins(layer))
                    return generation
            except NobodyAnswersError:
                if time.monotonic() > end:
                    raise
            if time.monotonic() > end:
                raise NodeError(
                    "no loader runs on this node, so layers cannot be read",
                    detail={"path": str(self._run_dir / SERVING)},
                    remedy="`opendsec up` starts it; without, run `python -m opendsec.host.loader`",
                    retryable=True,
                )
            waited.wait(0.05)

    def _find_process(self) -> None:
        try:
            pid, ticks, token = (self._run_dir / SERVING).read_text(encoding="ascii").split()
        except (FileNotFoundError, ValueError):
            return  # there is none, or it is writing this at the moment
        pidfd = open_process(ProcessIdentity(int(pid), int(ticks)))
        if pidfd is not None:
            self._pidfd, self._token = pidfd, token


def with_metadata(source: ChunkSource, layer: Layer, copies: Path, attach: Callable[[Layer], str]) -> tuple[Path, str]:
    """`fetched_metadata`, and what `attach` gives: what a start reads is on its way while metadata still is."""
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(attach, layer)
        meta = fetched_metadata(source, layer, copies)
        return meta, attaching.result()


def fetched_metadata(source: ChunkSource, layer: Layer, copies: Path) -> Path:
    """Metadata as a file of this node: whole, checked, and there or not there.

    It is not synced: after a crash of the machine nothing is mounted, and the size is looked at.
    """
    copies.mkdir(mode=0o700, parents=True, exist_ok=True)
    blob = layer.mounted
    target = copies / hex_of(blob.digest)
    if not (is_used(target) and target.stat().st_size == blob.size_bytes):
        with appearing(target) as partial:
            source.metadata(layer, partial)
            partial.chmod(0o444)
        trim(copies, keep=target)
    return target.resolve()
