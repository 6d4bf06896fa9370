"""What a start reads of a layer is read before anybody asks, through the mounted layer itself: then it is in the page
cache, where readers find it with nobody in between, whatever loads the layer.

    layer mounted here for the first time ── has a profile ── its parts of files are read, some threads at once
                                          └─ has none ────── some seconds after the first start one is recorded

A create waits for that, at most `wait_s`, and not where it would not help: see `Patience`. Reading goes on after it.

A profile may be wrong, old or hostile. Paths are only followed below the layer's root, through no link and to no other
file system; what is no regular file is not opened; what cannot be read is left to whoever needs it. So all it costs is
the time and the bytes of reads, which `profiles` bounds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opendsec.errors import OpenDSecError
from opendsec.linux import libc
from opendsec.model.image import Layer
from opendsec.store.loading.base import LayerFiles
from opendsec.store.loading.profiles import FileRead, Profile, read_profile
from opendsec.store.loading.recording import RECORD_S, found_in_memory, keep_profile, profile_of
from opendsec.store.loading.sources import DirectoryFiles, StoreFiles

log = logging.getLogger(__name__)

READERS = 12
"""Threads of a node that read for starts."""
MOST_WAITING = 8
"""Creates that wait at once: half of those a node starts at once, so that others go on. More are ready at once."""
LOOKERS = 4
"""Threads that ask the store for profiles."""
_AHEAD_BYTES = 128 << 10
"""The kernel begins to read no more than that at once."""
_PIECE_BYTES = 1 << 20
_RECORDER_S = 5.0
"""So long the end waits for a recording under way: it may hang in a store."""
_WAYS = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS | libc.RESOLVE_NO_XDEV


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a create waits for what it is going to read. Pure."""

    wait_s: float
    """At most, from the mount on; 0: not at all."""
    look_s: float = 0.25
    """Part of that after which it is looked at how much is there."""
    least: float = 0.125
    """Of the bytes, there by then: with less the wait would end with half of them missing, so it ends at once."""

    def until(self, *, waited_s: float, done: float) -> float:
        """How much longer to wait, in seconds, before asking again; 0: no longer."""
        look_s = self.wait_s * self.look_s
        if done >= 1 or waited_s >= self.wait_s:
            return 0.0
        if waited_s < look_s:
            return look_s - waited_s
        return self.wait_s - waited_s if done >= self.least else 0.0


@dataclass(slots=True, kw_only=True)
class _Start:
    """One layer that was mounted here for the first time."""

    layer: Layer
    files: LayerFiles
    fd: int
    """Of its root directory; ours."""
    begun: float
    over: Future[None] = field(default_factory=Future)
    """Everything was read that is going to be."""
    total_bytes: int = 0
    read_bytes: int = 0
    left: int = 0
    """Files."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_recorded: bool = False
    record_at: float = 0.0

    @property
    def done(self) -> float:
        """Which part of the bytes is there."""
        if self.over.done():
            return 1.0
        return self.read_bytes / self.total_bytes if self.total_bytes else 0.0

    def close(self) -> None:
        """Give the directory back; what is still to be read is not. Idempotent."""
        with self.lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Crew:
    """A few threads that do what is put in their queue, in its order. Daemons: some may hang in a store for good."""

    def __init__(self, count: int, name: str) -> None:
        self._works: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def do(self, works: Iterable[Callable[[], object]]) -> None:
        """Begin soon. What one raises is logged."""
        with self._lock:
            while len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        for work in works:
            self._works.put(work)

    def close(self) -> None:
        """Begin nothing any more. Waits for nothing."""
        with self._lock:
            while not self._works.empty():
                try:
                    self._works.get_nowait()
                except queue.Empty:
                    break
            for _ in self._threads:
                self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                work()
            except (OSError, OpenDSecError) as error:
                log.info("start_not_read", extra={"fields": {"why": str(error)}})


class Starts:
    """Reads what starts read, and records what nobody has recorded yet. Threads may share it. `close` it.

    `store` and `local`: where profiles are; the latter for stores that take no writes. `record_s`: from the first start
    of a layer until what was read of it is looked for; None: never.
    """

    def __init__(self, store: StoreFiles, local: Path, *, wait_s: float, record_s: float | None = RECORD_S) -> None:
        self._store = store
        self._local = DirectoryFiles(local)
        self._patience = Patience(wait_s=wait_s)
        self._record_s = record_s
        self._readers = Crew(READERS, "starts")
        self._lookers = Crew(LOOKERS, "profiles")
        self._recorder = threading.Thread(target=self._record_due, name="recorder", daemon=True)
        self._starts: dict[str, _Start] = {}
        self._expected: dict[str, Future[Profile | None]] = {}
        self._lock = threading.Lock()
        self._due = threading.Condition()
        self._ended = False
        self._waiting = 0

    def expect(self, layer: Layer) -> None:
        """That layer is about to be mounted: look its profile up meanwhile."""
        with self._lock:
            under_way = self._expected.get(layer.digest)
            if layer.data is None or (under_way is not None and not under_way.done()):
                return
            looked_up = self._expected[layer.digest] = Future()
        self._lookers.do([partial(self._look_up, layer, looked_up)])

    def begin(self, layer: Layer, files: LayerFiles, directory_fd: int) -> None:
        """It is mounted now, and nobody had it mounted before. `directory_fd` is not kept. Waits for nothing."""
        with self._lock:
            expected = self._expected.pop(layer.digest, None)
        if layer.data is None or not files.is_far:
            return
        fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
        start = _Start(layer=layer, files=files, fd=fd, begun=time.monotonic())
        with self._lock:
            before = self._starts.get(layer.digest)
            self._starts[layer.digest] = start
        if before is not None:
            before.close()
        if expected is None:
            expected = Future()
            self._lookers.do([partial(self._look_up, layer, expected)])
        expected.add_done_callback(lambda found: self._read(start, found.result()))

    async def ready(self, layers: Sequence[Layer]) -> None:
        """Wait until it is time to say that a sandbox on these layers is ready; record those nobody has recorded."""
        for layer in layers:
            start = self._starts.get(layer.digest)
            if start is not None:
                await self._wait(start)
                self._record_soon(start)

    async def _wait(self, start: _Start) -> None:
        """Unless so many wait that creates which need not would have to."""
        if self._waiting >= MOST_WAITING:
            return
        self._waiting += 1
        try:
            while (left_s := self._left_s(start)) > 0:
                await asyncio.wait([asyncio.wrap_future(start.over)], timeout=left_s)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Begin nothing any more; nothing is waited for."""
        with self._due:
            self._ended = True
            self._due.notify_all()
        self._readers.close()
        self._lookers.close()
        if self._recorder.is_alive():
            self._recorder.join(_RECORDER_S)
        with self._lock:
            starts, self._starts = list(self._starts.values()), {}
        for start in starts:
            start.close()

    # reading

    def _left_s(self, start: _Start) -> float:
        return self._patience.until(waited_s=time.monotonic() - start.begun, done=start.done)

    def _look_up(self, layer: Layer, looked_up: Future[Profile | None]) -> None:
        profile = None
        try:
            profile = read_profile(self._store, layer) or read_profile(self._local, layer)
        finally:
            looked_up.set_result(profile)

    def _read(self, start: _Start, profile: Profile | None) -> None:
        reads = profile.reads if profile is not None else ()
        start.is_recorded = bool(reads)
        start.total_bytes = sum(read.size_bytes for read in reads)
        start.left = len(reads)
        if reads:
            self._readers.do([partial(self._read_file, start, read) for read in reads])
        else:
            self._end(start)

    def _read_file(self, start: _Start, read: FileRead) -> None:
        try:
            with start.lock:  # it may just be given back
                fd = _open_below(start.fd, read.path)
            if fd is not None:
                try:
                    _bring(fd, read.parts)
                finally:
                    os.close(fd)
        finally:
            with start.lock:
                start.read_bytes += read.size_bytes
                start.left -= 1
                is_over = not start.left
            if is_over:
                self._end(start)

    def _end(self, start: _Start) -> None:
        start.over.set_result(None)
        if start.is_recorded or self._record_s is None:
            start.close()

    # recording

    def _record_soon(self, start: _Start) -> None:
        if self._record_s is None or start.is_recorded or start.record_at:
            return
        with self._due:
            start.record_at = time.monotonic() + self._record_s
            if not self._recorder.is_alive() and not self._ended:
                self._recorder.start()
            self._due.notify_all()

    def _record_due(self) -> None:
        """The thread that records, one layer after the other."""
        while True:
            with self._due:
                if self._ended:
                    return
                with self._lock:
                    waiting = [one for one in self._starts.values() if one.record_at and not one.is_recorded]
                now = time.monotonic()
                start = min(waiting, key=lambda one: one.record_at, default=None)
                if start is None or start.record_at > now:
                    self._due.wait(None if start is None else start.record_at - now)
                    continue
            self._record(start)

    def _record(self, start: _Start) -> None:
        start.record_at = 0.0  # where nothing was read the next start is another try
        files = start.files
        try:
            with start.lock:
                fd = os.dup(start.fd)
            try:
                profile = profile_of(start.layer, found_in_memory(fd), now=time.time())
            finally:
                os.close(fd)
            if profile is None or files.data is None:
                return
            place = keep_profile(profile, start.layer, files.meta, files.data, store=self._store, local=self._local)
        except OSError as error:
            log.warning("not_recorded", extra={"fields": {"layer": start.layer.digest, "why": str(error)}})
        else:
            fields = {"layer": profile.layer, "chunks": len(profile.chunks), "store": place.address}
            log.info("recorded", extra={"fields": fields})
        start.is_recorded = True  # or cannot be
        start.close()


def _open_below(directory_fd: int, path: str) -> int | None:
    """A regular file of that layer to be read; None when there is none of that path, or it is something else."""
    try:
        place = libc.openat2(directory_fd, path, os.O_PATH, _WAYS)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return None
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _bring(fd: int, parts: Sequence[tuple[int, int]]) -> None:
    """Read these parts into the page cache, and not a page more. OSError."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for offset, length in parts:  # all begin, then they are waited for
        for piece in range(offset, offset + length, _AHEAD_BYTES):
            os.posix_fadvise(fd, piece, min(_AHEAD_BYTES, offset + length - piece), os.POSIX_FADV_WILLNEED)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, max(length for _, length in parts))))
    for offset, length in parts:
        for piece in range(offset, offset + length, _PIECE_BYTES):
            if not os.preadv(fd, [buffer[: min(_PIECE_BYTES, offset + length - piece)]], piece):
                return  # the file is shorter
