"""The filling process: answers the kernel's questions about reads of sparse files once their chunks are there.

    read of an attached layer ── event ── chunks fetched, checked, written into the file ── answer ── the read goes on

What was checked once by this process is answered at once; what an earlier one wrote is checked first. A read that
cannot be served in time gets EIO, never a hole's zeros. A file that is complete is checked as a whole, synced, and
asked about no more: it is a plain file from then on.

The files are read through their own page cache (no `directio`), for a read around it would wait until the disk has
taken what was just written, 0.3 ms each on a fast one; every few seconds those pages are given back.

Everything it does not know is answered with EIO: files of a group that was lost (see `fanotify_group`), and numbers of
events an earlier process had read and had no time to write down.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.linux import fanotify
from opendsec.linux.fanotify import Request
from opendsec.model.image import Layer
from opendsec.store.chunks import CHUNK_BYTES, chunk_count
from opendsec.store.loading.daemon import Daemon, Served
from opendsec.store.loading.fanotify_group import LOST, Place
from opendsec.store.loading.fanotify_journal import SLOTS, Journal, Taken

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Of one read at a time: mmap(2) of a file asks for all of it at once."""
BEAT_S = 0.25
DROP_S = 5.0
"""How often pages of the files are given back: what was read is in the page cache of the layer as well."""
_OWN_READS = 8
_PAUSE_S = 0.01
"""When this process has no descriptor left."""


@dataclass(slots=True, kw_only=True)
class _Filled:
    """One served file."""

    served: Served
    path: Path
    right: set[int] = field(default_factory=set)
    """Chunks this process has seen to be right."""
    asks_itself: bool
    """Our own descriptor was opened while the file was armed, so our own reads of it are events too."""
    is_whole: bool
    is_checking: bool = False


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One question, piece by piece; it is the `Answer` its reader completes."""

    front: Front
    filled: _Filled
    number: int
    is_open: bool
    """Whether the event's descriptor is ours: not when an earlier process had read it."""
    offset: int
    end: int
    piece_end: int = 0

    def step(self) -> None:
        """Ask for the next piece."""
        self.piece_end = min(self.offset + PIECE_BYTES, self.end)
        self.filled.served.reader.read(self.offset, self.piece_end - self.offset, self)

    def give(self, *parts: bytes | memoryview) -> bool:
        """These bytes are in the file."""
        self.filled.right.update(_numbers(self.offset, self.piece_end))
        self.offset = self.piece_end
        if self.offset < self.end:
            self.front.later(self.step)  # not from here: there may be thousands of pieces
            return True
        return self.front.answer(fanotify.allow(self.number), self.number, is_open=self.is_open)

    def fail(self, number: int) -> bool:
        """They cannot be had."""
        return self.front.answer(fanotify.deny(self.number, number), self.number, is_open=self.is_open)


class Front:
    """Between the kernel and a Daemon: a thread that reads events, and what they are about."""

    def __init__(self, group: int, place: Place, journal: Journal) -> None:
        self._group = group
        self._place = place
        self._journal = journal
        self._by_inode: dict[int, _Filled] = {}
        self._own_pid = os.getpid()
        self._parked: list[tuple[int, Taken]] | None = []
        self._lock = threading.Lock()
        self._serving = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._held: set[int] = set()
        self.armed_before = frozenset(path.stem for path in place.attached.glob("*.json"))
        """Files about which the kernel asks since an earlier process, our own descriptors included."""
        self._readings = ThreadPoolExecutor(_OWN_READS, thread_name_prefix="readings")

    def serve(self, served: Served) -> None:
        """From now on opening that file makes the kernel ask. Idempotent. Raises OSError where it cannot."""
        cached = served.reader.cached
        inode = os.fstat(cached.fd).st_ino
        with self._serving:
            if inode in self._by_inode:
                return
            filled = _Filled(
                served=served,
                path=cached.path,
                asks_itself=cached.name in self.armed_before,
                is_whole=self._place.is_whole(cached.name, inode) and cached.present_bytes >= cached.size_bytes,
            )
            if not filled.is_whole:
                fanotify.arm(self._group, filled.path)
            with self._lock:
                self._by_inode[inode] = filled

    def begin(self) -> None:
        """Take over what an earlier process owed, then read events. What is not served yet waits for `ready`.

        Call it before anything else is opened: no number an earlier process owes an answer to may be taken.
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (SLOTS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        owed = list(self._journal.unanswered())
        self._refuse_unknown({taken.number for taken in owed})
        self._hold(taken.number for taken in owed)
        assert self._parked is not None
        self._parked.extend((-1, taken) for taken in owed)
        for path in self._place.files.glob(f"{LOST}*"):
            fanotify.arm(self._group, path)
        self._thread.start()

    def ready(self) -> None:
        """All that was served before is served again."""
        with self._lock:
            parked, self._parked = self._parked or [], None
        for fd, taken in parked:
            self._begin_reading(fd, taken)

    def close(self) -> None:
        """Read no more events. What is not answered stays written down for the next process."""
        self._ended.set()
        self._thread.join()

    def answer(self, response: bytes, number: int, *, is_open: bool) -> bool:
        """Let a read go on, or fail. The number is another event's only after this."""
        waited = fanotify.answer(self._group, response)
        self._journal.clear(number)
        if is_open:
            os.close(number)
        elif number in self._held:
            self._held.discard(number)
            os.close(number)
        return waited

    def later(self, work: Callable[[], None]) -> None:
        """In a thread for reads of our own."""
        self._readings.submit(work)

    # the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._group, select.POLLIN)
        looked_at = dropped_at = time.monotonic()
        while not self._ended.is_set():
            self._journal.beat()
            if poll.poll(BEAT_S * 1000):
                self._read_events()
            now = time.monotonic()
            if now - looked_at > BEAT_S:
                looked_at = now
                self._look_for_whole()
            if now - dropped_at > DROP_S:
                dropped_at = now
                self.later(self._drop_pages)

    def _read_events(self) -> None:
        try:
            content = os.read(self._group, fanotify.READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._ended.wait(_PAUSE_S)  # the kernel has refused that read
            return
        for request in fanotify.parse(content):
            self._take(request)

    def _take(self, request: Request) -> None:
        if request.fd < 0:
            return
        if request.pid == self._own_pid:  # we check what an earlier process wrote, or write
            fanotify.answer(self._group, fanotify.allow(request.fd))
            os.close(request.fd)
            return
        inode = os.fstat(request.fd).st_ino
        taken = Taken(number=request.fd, inode=inode, offset=request.offset, count=request.count)
        self._journal.put(taken)
        with self._lock:
            if self._parked is not None and inode not in self._by_inode:
                self._parked.append((request.fd, taken))
                return
        self._begin_reading(request.fd, taken)

    def _begin_reading(self, fd: int, taken: Taken) -> None:
        is_open = fd >= 0
        filled = self._by_inode.get(taken.inode)
        if filled is None:
            log.warning("unknown_file", extra={"fields": {"inode": taken.inode}})
            self.answer(fanotify.deny(taken.number), taken.number, is_open=is_open)
            return
        size = filled.served.file.size_bytes
        end = min(taken.offset + taken.count, size) if taken.count else size
        if taken.offset >= end or filled.right.issuperset(_numbers(taken.offset, end)):
            filled.served.reader.asked_bytes += max(0, end - taken.offset)
            self.answer(fanotify.allow(taken.number), taken.number, is_open=is_open)
            return
        reading = _Reading(
            front=self, filled=filled, number=taken.number, is_open=is_open, offset=taken.offset, end=end
        )
        if filled.asks_itself:
            self.later(reading.step)  # this thread answers what it asks
        else:
            reading.step()

    # files that are complete

    def _look_for_whole(self) -> None:
        for filled in tuple(self._by_inode.values()):
            cached = filled.served.reader.cached
            if not (filled.is_whole or filled.is_checking) and cached.present_bytes >= cached.size_bytes:
                filled.is_checking = True
                threading.Thread(target=self._make_whole, args=(filled,), name="whole", daemon=True).start()

    def _drop_pages(self) -> None:
        """Those that are on the disk; others begin to be written, and go the next time."""
        for filled in tuple(self._by_inode.values()):
            os.posix_fadvise(filled.served.reader.cached.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _make_whole(self, filled: _Filled) -> None:
        """Ask no more about a file all of which was checked and is on the disk."""
        cached = filled.served.reader.cached
        try:
            right = cached.check_all()
            filled.right &= right  # what the disk has spoilt since is fetched again before it is read again
            if len(right) != chunk_count(cached.size_bytes):
                return
            os.fdatasync(cached.fd)
            self._place.set_whole(filled.path.name, os.fstat(cached.fd).st_ino)
            fanotify.disarm(self._group, filled.path)
            filled.is_whole = True
            log.info("whole", extra={"fields": {"data": filled.path.name}})
        except OSError as error:
            log.warning("not_made_whole", extra={"fields": {"data": filled.path.name, "why": str(error)}})
        finally:
            filled.is_checking = False

    # what an earlier process left

    def _refuse_unknown(self, owed: set[int]) -> None:
        """It may have read an event and died before it was written down."""
        for number in range(SLOTS):
            if number not in owed and fanotify.answer(self._group, fanotify.deny(number)):
                log.warning("read_refused", extra={"fields": {"number": number, "why": "the loader was killed"}})

    def _hold(self, numbers: Iterable[int]) -> None:
        """Keep these numbers from being those of new events, until they are answered."""
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number in numbers:
            if number == null:  # dup2(2) refuses to make a descriptor its own copy
                self._held.add(number)
            elif not Path(f"/proc/self/fd/{number}").exists():  # else it is open for good already
                os.dup2(null, number, inheritable=False)
                self._held.add(number)
        if null not in self._held:
            os.close(null)


class FillingDaemon(Daemon):
    """A Daemon whose files the kernel reads itself."""

    front: Front

    def attach(self, layer: Layer) -> Served:
        served = super().attach(layer)
        self.front.serve(served)
        return served

    def close(self) -> None:
        """Reads that wait are left to the next process."""
        self._ended.set()
        self._ticking.join()


def _numbers(offset: int, end: int) -> range:
    return range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))
