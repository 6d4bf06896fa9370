"""What the guardian of the fanotify loader does when nobody fills files."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from opendsec.host import fanotify_loader
from opendsec.host.fanotify_loader import Guardian
from opendsec.linux import libc
from opendsec.linux.process import spawn
from opendsec.store.loading.fanotify_group import Place
from opendsec.store.loading.fanotify_journal import Journal

_EVENT = struct.Struct("=IBBHQii")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(run=tmp_path / "run", files=tmp_path / "files")
    place.make()
    return place


def test_reads_that_wait_are_refused_and_those_the_kernel_refused_itself_are_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanotify_loader, "SLOTS", 2)
    ours, kernel = socket.socketpair()
    with ours, kernel:
        ours.setblocking(False)
        waits = os.open(os.devnull, os.O_RDONLY)
        events = [_EVENT.pack(_EVENT.size, 3, 0, _EVENT.size, libc.FAN_PRE_ACCESS, fd, 1) for fd in (-1, waits)]
        kernel.sendall(b"".join(events))
        journal = Journal(place.run / "journal")
        Guardian(place, ours.fileno(), journal, 1.0).refuse_all()
        journal.close()
        answers = [fd for fd, _ in struct.iter_unpack("=iI", kernel.recv(4096))]
        assert answers == [0, 1, waits]
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(waits)


def test_a_keeper_that_died_leaves_neither_a_descriptor_nor_a_zombie(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def keep(*_: object) -> int:
        pid, pidfd = spawn(Path("/bin/true"), argv=[], fds={})
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        begun.append(pid)
        return pidfd

    monkeypatch.setattr(fanotify_loader, "keep", keep)
    guardian = Guardian(place, -1, Journal(place.run / "journal"), 1.0)
    guardian.keep_all()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        guardian.keep_all()
    assert set(os.listdir("/proc/self/fd")) == before
    assert [pid for pid in begun if Path(f"/proc/{pid}").exists()] == begun[-2:]
    for name in list(guardian.keepers):
        guardian._forget(name)
