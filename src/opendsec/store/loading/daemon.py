"""The loader process: data of layers as files that read themselves from the store when they are read.

    <run>/data/<hex>             one file for each attached blob; EROFS mounts use them as devices
    <run>/loader.sock            who wants a layer attached or prefetched asks here (`control`)
    <run>/loader/<hex>.json      what is attached, for the process that comes after this one
    <cache>/data, tables         chunks, packs and tables
    <cache>/profiles             profiles a read-only store would not take

It only knows layers it was asked to attach, and gives out no byte that is not in its table. What it was asked to serve
stays served: an unmounted layer may still be in use by a sandbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from opendsec.errors import DigestMismatchError, ImageInvalidError, OpenDSecError, RequestError
from opendsec.linux.fuse import File, Reply
from opendsec.model.image import Blob, Layer
from opendsec.store.chunks import DIGEST_BYTES, check_table, chunk_count
from opendsec.store.loading.cache import ChunkCache
from opendsec.store.loading.early import EarlyReads
from opendsec.store.loading.engine import Engine
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.packed import kept_pack, open_pack
from opendsec.store.loading.profiles import Profile, read_profile
from opendsec.store.loading.reading import BlobReader
from opendsec.store.loading.sources import DirectoryFiles, table_name
from opendsec.store.manifest import hex_of

log = logging.getLogger(__name__)

_HEX_OF_NUMBER = 15
"""Digits of the digest that number a file: the process after this one gives it the same number."""
KNOWS_S = 0.5
"""So long at most who attaches a layer waits until it is known what of it is to be loaded first: later reads of just
that would each fetch it by itself."""
FIRST_AGAIN_S, LONGEST_AGAIN_S = 0.5, 10.0
"""Between two attempts to attach what was attached before."""
_TICK_S = 0.2


@dataclass(slots=True, kw_only=True)
class Served:
    """One attached layer."""

    layer: Layer
    file: File
    reader: BlobReader
    loading: tuple[Future[Any], ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    looked_up: threading.Event = field(default_factory=threading.Event)
    """Whether there is a profile is known."""

    def follow(self, futures: Iterable[Future[Any]]) -> None:
        """Something is loaded, beside what still is; threads may come with it at once."""
        with self.lock:
            self.loading = (*(one for one in self.loading if not one.done()), *futures)


class Daemon:
    """Serves layers of one store; see the head of this file. It is `Files` for `linux.fuse.serve`."""

    def __init__(
        self,
        source: ChunkSource,
        cache: ChunkCache,
        *,
        local: Path,
        attached: Path,
        patience_s: float,
        kernel_reads_cache: bool = False,
    ) -> None:
        """`local`: a directory of this node for tables and profiles; `attached`: one that a reboot empties.

        `kernel_reads_cache`: a read is answered once its chunks are in the cached file, from where they never go.
        """
        self._source = source
        self._cache = cache
        self._local = DirectoryFiles(local)
        self._attached = attached
        self._kernel_reads_cache = kernel_reads_cache
        self._engine = Engine(source, patience_s=patience_s)
        self._served: dict[int, Served] = {}
        self._early = EarlyReads(patience_s)
        self._turns: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="early", daemon=True)
        self._ticking.start()
        attached.mkdir(mode=0o700, parents=True, exist_ok=True)

    # what the kernel sees

    def by_name(self, name: str) -> File | None:
        return next((file for file in self.all() if file.name == name), None)

    def by_number(self, number: int) -> File | None:
        served = self._served.get(number)
        return served.file if served else self._early.file(number)

    def all(self) -> Iterable[File]:
        return [*(one.file for one in tuple(self._served.values())), *self._early.all()]

    def read(self, file: File, offset: int, size: int, reply: Reply) -> None:
        if file.number in self._served or not self._early.keep(file, offset, size, reply):
            self._served[file.number].reader.read(offset, size, reply)

    # what others on this node ask

    def answer(self, what: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """One question of `control`. Raises OpenDSecError."""
        if what == "status":
            return self.status()
        if what not in ("attach", "prefetch"):
            raise RequestError(f"the loader knows no {what!r}")
        try:
            layer = msgspec.convert(fields["layer"], Layer)
        except (KeyError, msgspec.ValidationError) as error:
            raise RequestError(f"layer: {error}", detail={"field": "layer"}) from error
        served = self.attach(layer)
        if what == "prefetch":
            return self._prefetch(served, everything=bool(fields.get("everything")))
        served.looked_up.wait(KNOWS_S)
        return {"file": served.file.name}

    def attach(self, layer: Layer) -> Served:
        """Serve a layer's data from now on. Idempotent.

        Raises ImageInvalidError, DigestMismatchError, NodeError (the store cannot be reached), DiskFullError.
        """
        if layer.data is None:
            raise ImageInvalidError(f"layer {layer.digest} has no data to be loaded", detail={"layer": layer.digest})
        file = _file_of(layer.data)
        with self._lock:
            turn = self._turns.setdefault(file.name, threading.Lock())
        with turn:
            served = self._served.get(file.number)
            if served is None:
                served = self._serve(layer, layer.data, file)
                (self._attached / f"{file.name}.json").write_bytes(msgspec.json.encode(layer))
                self._served[file.number] = served
                self._early.served(file.number, served.reader.read)
        return served

    def attach_again(self) -> None:
        """What the process before this one served: at once where this node has the table, so that nobody waits for
        the store; the others in the background, for as long as it takes.
        """
        for path in sorted(self._attached.glob("*.json")):
            try:
                layer = msgspec.json.decode(path.read_bytes(), type=Layer)
            except msgspec.DecodeError as error:  # cut off by the end of a process that had promised nothing yet
                log.warning("not_attached_again", extra={"fields": {"file": path.name, "why": str(error)}})
                continue
            if layer.data is None or self._kept_table(layer.data) is not None:
                self._attach_once_more(layer)
            else:
                self._early.expect(_file_of(layer.data))
                threading.Thread(target=self._keep_attaching, args=(layer,), name="again", daemon=True).start()

    def _attach_once_more(self, layer: Layer) -> bool:
        try:
            self.attach(layer)
        except (OpenDSecError, OSError) as error:
            log.warning("not_attached_again", extra={"fields": {"layer": layer.digest, "why": str(error)}})
            return False
        return True

    def _keep_attaching(self, layer: Layer) -> None:
        pause = FIRST_AGAIN_S
        while not (self._attach_once_more(layer) or self._ended.wait(pause)):
            pause = min(pause * 2, LONGEST_AGAIN_S)

    def status(self) -> Mapping[str, Any]:
        """Counts since this process started; layers as they are."""
        layers = {
            one.layer.digest: {
                "size_bytes": one.file.size_bytes,
                "present_bytes": one.reader.present_bytes,
                "asked_bytes": one.reader.asked_bytes,
                "failures": one.reader.failures,
                **_progress(one),
            }
            for one in tuple(self._served.values())
        }
        counts = self._source.counts
        store = {"address": self._source.files.address, "requests": counts.requests}
        return {
            "layers": layers,
            "store": {**store, "bytes_read": counts.bytes_read, "failures": counts.failures},
            "cache": {
                "used_bytes": self._cache.used_bytes,
                "limit_bytes": self._cache.limit_bytes,
                "hits": self._cache.counts.hits,
                "damaged": self._cache.counts.damaged,
                "evicted_bytes": self._cache.counts.evicted_bytes,
                "refused": self._cache.counts.refused,
            },
        }

    def close(self) -> None:
        """Reads that wait get EIO."""
        self._ended.set()
        self._ticking.join()
        self._early.end_overdue(float("inf"))
        self._engine.close()
        self._local.close()

    def _serve(self, layer: Layer, data: Blob, file: File) -> Served:
        table = self._table(data)
        cached = self._cache.open(data, table, evictable=not self._kernel_reads_cache)
        reader = BlobReader(self._engine, data, table, cached, must_keep=self._kernel_reads_cache)
        if not self._kernel_reads_cache:
            reader.packed = kept_pack(self._source, layer, table, self._cache)
        served = Served(layer=layer, file=file, reader=reader)
        served.follow([self._engine.ahead.submit(self._load_start, served)])
        return served

    def _table(self, data: Blob) -> bytes:
        """From this node when it is here and right, else from the store."""
        table = self._kept_table(data)
        if table is None:
            table = self._source.table(data)
            try:
                self._local.write(table_name(data.digest), table)
            except OSError as error:  # a full disk: it is fetched again next time
                log.warning("table_not_kept", extra={"fields": {"data": data.digest, "why": str(error)}})
        return table

    def _kept_table(self, data: Blob) -> bytes | None:
        """From this node; None when it is not here, or damaged."""
        try:
            table = self._local.read_whole(table_name(data.digest), most=chunk_count(data.size_bytes) * DIGEST_BYTES)
            check_table(table, data.digest, data.size_bytes)
        except (OSError, DigestMismatchError):
            return None
        return table

    def _load_start(self, served: Served) -> int:
        """Begin to load what a start reads, as far as anybody has recorded it; how many chunks that is."""
        reader, cache = served.reader, None if self._kernel_reads_cache else self._cache
        try:
            packed = reader.packed or open_pack(self._source, served.layer, reader.table, cache)
            if packed is not None:
                works = packed.all()
                served.follow(reader.load_packed(packed))
                return sum(len(numbers) for numbers, _ in works)
            profile = self._profile(served.layer)
            if profile is not None:
                served.follow(reader.load(profile.chunks))
                return len(profile.chunks)
            return 0
        finally:
            served.looked_up.set()

    def _profile(self, layer: Layer) -> Profile | None:
        return read_profile(self._source.files, layer) or read_profile(self._local, layer)

    def _prefetch(self, served: Served, *, everything: bool) -> Mapping[str, Any]:
        """Begins; `status` tells how far it is."""
        if everything:
            count = chunk_count(served.file.size_bytes)
            served.follow(served.reader.load(range(count)))
        else:
            count = self._load_start(served)
        return {"chunks": count, "has_profile": count > 0 and not everything}

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            self._early.end_overdue(time.monotonic())


def _file_of(data: Blob) -> File:
    name = hex_of(data.digest)
    return File(number=int(name[:_HEX_OF_NUMBER], 16) + 2, name=name, size_bytes=data.size_bytes)


def _progress(served: Served) -> Mapping[str, Any]:
    """Whether chunks are being loaded before anybody asks, and why that ended early, if it did."""
    states = Counter(one.done() for one in served.loading)
    failed = [str(one.exception()) for one in served.loading if one.done() and not one.cancelled() and one.exception()]
    return {"loading": states[False], "problem": failed[0] if failed else ""}
