"""What a store asks of the file system it lies on, tried out in a directory of it.

Needed: atomic rename(2) over a file that is there, fsync(2) of files and directories, flock(2) of files opened for
writing, and times that go with this machine's clock. Without hard links names are given by rename(2) instead; without
mounting EROFS files from it, a loader that reads through a file of its own is. Whether locks reach other nodes, and
how soon they see new names (close-to-open), cannot be seen from one node: `docs/reference/image-store.md` says which
mount options decide it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import HostCapabilityError
from opendsec.store.durable import remove_tree, sync_directory, write_synced
from opendsec.store.staging import file_system_time, locked

CLOCKS_APART_S = 30.0
"""More than this between the file system's clock and ours, and ages of leases and staging mislead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing a file system offers or lacks."""

    name: str
    ok: bool
    needed: bool
    sentence: str


def probe_directory(directory: Path) -> list[Offer]:
    """Try everything in a private directory below this one. OSError when not even that can be made.

    One that is left by a kill goes as what older versions left in `staging` does, if it lies there.
    """
    work = Path(tempfile.mkdtemp(prefix="probe-", dir=directory))
    try:
        return [_tried(probe, work) for probe in (_rename, _sync, _lock, _clock, _links)]
    finally:
        remove_tree(work)


def _tried(probe: Callable[[Path], Offer], work: Path) -> Offer:
    try:
        return probe(work)
    except OSError as error:
        name = probe.__name__.strip("_")
        sentence = f"{name} does not work there: {error.strerror}"
        return Offer(name=name, ok=False, needed=True, sentence=sentence)


def _rename(work: Path) -> Offer:
    write_synced(work / "old", b"old")
    write_synced(work / "new", b"new")
    with (work / "old").open("rb") as reader:
        (work / "new").rename(work / "old")
        kept = reader.read() == b"old"
    ok = kept and (work / "old").read_bytes() == b"new" and not (work / "new").exists()
    sentence = "rename replaces a file in one step" if ok else "rename does not replace a file that is there and open"
    return Offer(name="rename", ok=ok, needed=True, sentence=sentence)


def _sync(work: Path) -> Offer:
    write_synced(work / "synced", b"bytes")
    sync_directory(work)
    return Offer(name="fsync", ok=True, needed=True, sentence="fsync takes files and directories")


def _lock(work: Path) -> Offer:
    """The second descriptor must not get what the first one has."""
    try:
        with locked(work / "lock"):
            fd = os.open(work / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Offer(name="locks", ok=True, needed=True, sentence="flock excludes others on this node")
            finally:
                os.close(fd)
    except HostCapabilityError as error:
        return Offer(name="locks", ok=False, needed=True, sentence=error.message)
    return Offer(name="locks", ok=False, needed=True, sentence="flock grants one lock twice")


def _clock(work: Path) -> Offer:
    apart = abs(file_system_time(work / "time") - time.time())
    ok = apart < CLOCKS_APART_S
    sentence = f"its clock and this machine's are {apart:.0f} s apart" + ("" if ok else ": run NTP on both")
    return Offer(name="clock", ok=ok, needed=True, sentence=sentence)


def _links(work: Path) -> Offer:
    write_synced(work / "one", b"bytes")
    try:
        os.link(work / "one", work / "two")
    except OSError as error:
        words = errno.errorcode.get(error.errno or 0, "?")
        sentence = f"no hard links ({words}): names are given by rename instead"
        return Offer(name="links", ok=False, needed=False, sentence=sentence)
    return Offer(name="links", ok=True, needed=False, sentence="hard links work")
