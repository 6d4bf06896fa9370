"""Work in progress: what a live owner has stays, on this node and on others; what a dead one left goes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError, NodeError
from opendsec.store import staging
from opendsec.store.durable import remove_tree
from opendsec.store.staging import SILENT_S, beating, file_system_time, locked, reap_staging, staged


def _own(parent: Path, ready: Connection) -> None:
    with staged(parent, parent.parent / "lock") as work:
        (work / "half").write_text("")
        ready.send(work.name)
        signal.pause()


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    (tmp_path / "staging").mkdir()
    return tmp_path / "staging"


def reap(parent: Path) -> int:
    return reap_staging(parent, parent.parent / "lock")


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_alive_then_killed(parent: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_own, args=(parent, theirs))
    process.start()
    assert ours.poll(10)
    token = ours.recv()
    assert reap(parent) == 0
    assert names(parent) == {token, f"{token}.lock"}
    process.kill()
    process.join()
    assert reap(parent) == 1
    assert names(parent) == set()


def test_another_nodes_is_only_reaped_after_long_silence(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that end at the node look free from here."""
    with staged(parent, parent.parent / "lock") as work:
        lock = work.with_name(f"{work.name}.lock")
        monkeypatch.setattr(staging, "_flock", lambda *_arguments, **_more: None)
        monkeypatch.setattr(staging, "kernel_id", lambda: "0" * 16)
        assert reap(parent) == 0
        assert work.exists()
        now = file_system_time(parent.parent / "clock")
        os.utime(lock, (now - SILENT_S - 60, now - SILENT_S - 60))
        assert reap(parent) == 1
        assert names(parent) == set()


def test_what_an_older_version_left_goes_by_its_age(parent: Path) -> None:
    (parent / "0123456789abcdef").mkdir()
    (parent / "0123456789abcdef/file").touch()
    assert reap(parent) == 0
    os.utime(parent / "0123456789abcdef", (1e9, 1e9))
    assert reap(parent) == 1


def test_a_lock_without_its_directory_goes(parent: Path) -> None:
    (parent / f"{staging.kernel_id()}-0123456789abcdef.lock").touch()
    (parent / ".nfs000123").touch()
    assert reap(parent) == 1
    assert names(parent) == {".nfs000123"}


def test_others_begin_while_a_large_leftover_is_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = parent.parent / "lock"
    left = parent / f"{staging.kernel_id()}-0123456789abcdef"
    left.mkdir()
    left.with_name(f"{left.name}.lock").touch()
    begun = []

    def slowly(path: Path) -> None:
        if path == left:
            with locked(lock, wait=False):  # BlockingIOError if it were held
                begun.append(path)
            assert reap(parent) == 0  # and nobody else takes the same
        remove_tree(path)

    monkeypatch.setattr(staging, "remove_tree", slowly)
    assert reap(parent) == 1
    assert (begun, names(parent)) == ([left], set())


def test_nothing_is_left_when_the_directory_cannot_be_made(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.EMLINK, "too many")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match="too many"), staged(parent, parent.parent / "lock"):
        pass
    assert names(parent) == set()


def test_the_heart_beats_and_a_failed_beat_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (1e9, 1e9))
    with beating(file, every_s=0.01):
        until = time.monotonic() + 30
        while file.stat().st_mtime == 1e9:
            assert time.monotonic() < until
            time.sleep(0.005)
        file.unlink()
        time.sleep(0.03)
    assert not file.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(_fd: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(HostCapabilityError, match="knows no file locks"), locked(tmp_path / "lock"):
        pass


def test_a_lock_somebody_keeps_is_waited_for_and_then_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lock"
    monkeypatch.setattr(staging, "PATIENCE_S", 0.05)
    with locked(file):
        with pytest.raises(NodeError, match=r"has held .*lock for 0\.05 s") as told, locked(file):
            pass
        assert told.value.retryable
    monkeypatch.setattr(staging, "PATIENCE_S", 10.0)
    with ExitStack() as held:
        held.enter_context(locked(file))
        threading.Timer(0.1, held.pop_all().close).start()
        with locked(file):
            pass
