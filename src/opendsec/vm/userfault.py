"""The process that gives restored machines their memory, page by page, as they touch it (userfaultfd(2)).

    python -m opendsec.vm.userfault [READ_S]    with a listening control socket as descriptor 3

One for each edge, not one for each machine: a Python process costs 10 MiB and 50 ms, a thread of it next to nothing.
It is a process of its own because a machine must not lose its memory when the edge is started again. Each machine has
one thread, so a slow source delays that machine only.

What it promises: a page is what was saved, or the machine is ended. A source that cannot be read, ends early, does not
match its checksums or does not answer within `READ_S` gets its machine killed, with the reason in the file `lost`
beside it; never zeros instead, and never a guest that waits for ever. Should this process die, the edge ends its
machines (`vm.userfault_client`); it ends itself when nobody has needed it for `IDLE_S`, or, once it was told that its
edge closes, with its last machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from opendsec.linux.libc import address_of
from opendsec.vm.page_source import CHUNK, PageSource, SourceError
from opendsec.vm.sparse import PAGE

CONTROL: Final = 3
IDLE_S: Final = 60.0
READ_S: Final = 60.0
"""What a read of the source may take, unless told otherwise."""
HANDSHAKE_S: Final = 30.0
WATCH_S: Final = 1.0
CLOSING_S: Final = 0.05
MAX_FDS: Final = 8
LOST: Final = "lost"

_EVENT_PAGEFAULT, _EVENT_REMOVE, _EVENT_UNMAP = 0x12, 0x15, 0x16
_UFFDIO_WAKE, _UFFDIO_COPY, _UFFDIO_ZEROPAGE = 0x8010AA02, 0xC028AA03, 0xC020AA04
"""linux/userfaultfd.h"""
_MESSAGE: Final = struct.Struct("=B7xQQQ")
_COPY: Final = struct.Struct("=QQQQq")
_ZERO: Final = struct.Struct("=QQQq")


class EndedError(Exception):
    """The machine is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory of the guest that is one piece in its VMM: `size` bytes at `address`, from `offset` of the file on."""

    address: int
    size: int
    offset: int


@dataclass(slots=True, eq=False)
class Served:
    """One machine."""

    pidfd: int
    listener: socket.socket
    source: PageSource
    directory: int
    """Where `lost` is written."""
    reading_since: float | None = None
    lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, why: str) -> None:
        """Kill the machine, for this reason (the first one counts)."""
        with self.lock:
            if self.lost:
                return
            self.lost = True
        with contextlib.suppress(OSError):
            fd = os.open(LOST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.directory)
            with os.fdopen(fd, "w") as file:
                file.write(why)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of everything of it."""
        self.listener.close()
        self.source.close()
        os.close(self.directory)
        os.close(self.pidfd)


class Filler:
    """Answers the faults of one machine until it has ended."""

    def __init__(self, served: Served, uffd: int, regions: list[Region]) -> None:
        self._served = served
        self._uffd = uffd
        self._regions = regions
        self._faults: deque[int] = deque()
        self._freed: set[int] = set()
        """Pages the guest gave back: they are zero, not what was saved."""
        self._buffer = bytearray(CHUNK)

    def run(self) -> None:
        """Raises SourceError, OSError; EndedError when the machine has ended."""
        poll = select.poll()
        poll.register(self._uffd, select.POLLIN)
        poll.register(self._served.pidfd, select.POLLIN)
        while True:
            ready = dict(poll.poll(None if not self._faults else 0))
            if self._served.pidfd in ready:
                raise EndedError
            if self._uffd in ready:
                if ready[self._uffd] & (select.POLLERR | select.POLLHUP):
                    raise EndedError
                self._take_events()
            if self._faults:
                self._fill(self._faults.popleft())

    def _take_events(self) -> None:
        try:
            events = os.read(self._uffd, 64 * _MESSAGE.size)
        except BlockingIOError:
            return
        for kind, first, second, _ in _MESSAGE.iter_unpack(events):
            if kind == _EVENT_PAGEFAULT:
                self._faults.append(second & ~(PAGE - 1))
            elif kind == _EVENT_REMOVE:
                self._freed.update(range(first, second, PAGE))
            elif kind != _EVENT_UNMAP:
                raise OSError(errno.EPROTO, f"userfaultfd reports event {kind:#x}, which nothing here asked for")

    def _region(self, address: int) -> Region:
        for region in self._regions:
            if region.address <= address < region.address + region.size:
                return region
        raise OSError(errno.EFAULT, "a fault outside of the guest's memory")

    def _fill(self, address: int) -> None:
        if address in self._freed:
            if self._install(_UFFDIO_ZEROPAGE, _ZERO, (address, PAGE, 0, 0)):
                self._freed.discard(address)
            else:
                self._faults.append(address)
            return
        region = self._region(address)
        offset = region.offset + address - region.address
        start = max(offset - offset % CHUNK, region.offset)
        stop = min(offset - offset % CHUNK + CHUNK, region.offset + region.size)
        self._served.reading_since = time.monotonic()
        content = self._served.source.read(start, stop - start)
        self._served.reading_since = None
        self._buffer[: len(content)] = content
        if not self._copy(region.address + start - region.offset, stop - start):
            self._faults.append(address)

    def _copy(self, address: int, length: int) -> bool:
        """Give the pages of the buffer that are still missing. False: events must be read first."""
        source, done = address_of(self._buffer), 0
        while done < length:
            run = self._run_of_saved(address + done, length - done)
            if run == 0:
                done += PAGE
                continue
            request = bytearray(_COPY.pack(address + done, source + done, run, 0, 0))
            try:
                fcntl.ioctl(self._uffd, _UFFDIO_COPY, request)
                done += run
            except OSError as error:
                copied = _COPY.unpack(request)[4]
                if copied > 0:
                    done += copied
                elif error.errno == errno.EEXIST:
                    self._wake(address + done)
                    done += PAGE
                elif error.errno == errno.EAGAIN:
                    return False
                else:
                    self._check_alive(error)
        return True

    def _run_of_saved(self, address: int, most: int) -> int:
        """Bytes from there on up to the next page the guest has given back."""
        if not self._freed:
            return most
        run = 0
        while run < most and address + run not in self._freed:
            run += PAGE
        return run

    def _install(self, call: int, form: struct.Struct, values: tuple[int, ...]) -> bool:
        try:
            fcntl.ioctl(self._uffd, call, bytearray(form.pack(*values)))
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return False
            if error.errno != errno.EEXIST:
                self._check_alive(error)
        return True

    def _wake(self, address: int) -> None:
        fcntl.ioctl(self._uffd, _UFFDIO_WAKE, struct.pack("=QQ", address, PAGE))

    def _check_alive(self, error: OSError) -> None:
        if error.errno in (errno.ESRCH, errno.ENOENT):  # its memory is gone, or this part of it
            raise EndedError from error
        raise error


def _serve(served: Served, all_served: set[Served]) -> None:
    uffd = -1
    try:
        uffd, regions = _handshake(served)
        Filler(served, uffd, regions).run()
    except EndedError:
        pass
    except SourceError as error:
        served.end(f"its saved memory cannot be given to it: {error}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        served.end(f"its memory could not be served: {error}")
    finally:
        all_served.discard(served)
        if uffd >= 0:
            os.close(uffd)
        served.close()


def _handshake(served: Served) -> tuple[int, list[Region]]:
    """What Firecracker sends when it has loaded a machine: a description of its memory, and the descriptor."""
    poll = select.poll()
    poll.register(served.listener, select.POLLIN)
    poll.register(served.pidfd, select.POLLIN)
    deadline = time.monotonic() + HANDSHAKE_S
    while True:
        ready = dict(poll.poll(max(0, (deadline - time.monotonic()) * 1000)))
        if served.listener.fileno() in ready:
            break
        if served.pidfd in ready or not ready:
            raise EndedError
    connection, _ = served.listener.accept()
    with connection:
        connection.settimeout(HANDSHAKE_S)
        content, fds, _, _ = socket.recv_fds(connection, 64 * 1024, 1)
    if len(fds) != 1:
        raise OSError(errno.EPROTO, "the VMM sent no descriptor of its memory")
    found = json.loads(content)
    regions = [Region(address=one["base_host_virt_addr"], size=one["size"], offset=one["offset"]) for one in found]
    os.set_blocking(fds[0], False)
    return fds[0], regions


def _watch(all_served: set[Served], read_s: float) -> None:
    """End machines whose source does not answer: their thread stands in the read."""
    now = time.monotonic()
    for served in list(all_served):
        since = served.reading_since
        if since is not None and now - since > read_s:
            served.end(f"its saved memory did not arrive within {read_s:g} seconds")


def _take(content: bytes, fds: list[int]) -> Served:
    """The descriptors of {"table": bool}: pidfd, listener, directory, (table), memory files."""
    try:
        with_table = bool(json.loads(content)["table"])
        pidfd, listener, directory, *files = fds
        table = files.pop(0) if with_table else None
        source = PageSource(tuple(files), table)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Served(pidfd, socket.socket(fileno=listener), source, directory)


def _answer(connection: socket.socket, all_served: set[Served]) -> bool | None:
    """One request: {"table": …}, answered by {"pid": our own}, or {}, answered by {"machines": how many}: whether it
    was the latter, which says that the edge closes. None: nothing was asked.
    """
    content, fds, _, _ = socket.recv_fds(connection, 4096, MAX_FDS)
    if not fds:
        if content != b"{}":
            return None
        connection.send(json.dumps({"machines": len(all_served)}).encode())
        return True
    try:
        served = _take(content, fds)
    except (OSError, ValueError, KeyError, SourceError) as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        return False
    all_served.add(served)
    threading.Thread(target=_serve, args=(served, all_served), daemon=True).start()
    connection.send(json.dumps({"pid": os.getpid()}).encode())
    return False


def main() -> None:
    """Serve until nobody has needed it for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_s = float(sys.argv[1]) if len(sys.argv) > 1 else READ_S
    all_served: set[Served] = set()
    needed_at = time.monotonic()
    idle_s, closing = IDLE_S, False
    with socket.socket(fileno=CONTROL) as control:
        while all_served or time.monotonic() - needed_at < idle_s:
            control.settimeout(CLOSING_S if closing else WATCH_S)
            _watch(all_served, read_s)  # also while others are started without a pause
            try:
                connection, _ = control.accept()
            except TimeoutError:
                if all_served:
                    needed_at = time.monotonic()
                continue
            needed_at = time.monotonic()
            with connection:
                connection.settimeout(HANDSHAKE_S)
                with contextlib.suppress(OSError):  # it went away: nothing was promised to it
                    said = _answer(connection, all_served)
                    closing = closing if said is None else said
                    idle_s = 0 if closing else IDLE_S


if __name__ == "__main__":
    main()
