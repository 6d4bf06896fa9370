"""A private directory inside the store in which an image is put together, gone afterwards whatever happens.

It lies on the store's own file system, because only there can a finished file be given its final name in one step.
Beside each `<token>/` lies `<token>.lock`: its owner holds flock(2) on it and touches it every minute; the token begins
with the kernel the owner runs on. So leftovers are recognised without process ids:

* on the owner's own kernel by the lock alone, which that kernel drops when the owner dies;
* on any other node by the lock and by silence: file systems exist whose locks end at the node, and there a lock
  that can be taken proves nothing.

Only files opened for writing are locked: network file systems lock neither directories nor files opened to read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from opendsec.errors import HostCapabilityError, NodeError
from opendsec.store.durable import disk_full_named, remove_tree

BEAT_S = 60.0
PATIENCE_S = 120.0
"""Locks are held for milliseconds; whoever waits so long waits for somebody who is gone."""
SILENT_S = 3600.0
"""After so long without a touch another node's work counts as abandoned: sixty beats, so no stalled server ends any."""

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_SUFFIX = ".lock"


@contextmanager
def locked(lock_file: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the exclusive flock(2) of a file; BlockingIOError when another has it and `wait` is False.

    Raises HostCapabilityError when the file system knows no locks, NodeError (retryable) when another has held it for
    PATIENCE_S: a shared file system may keep the lock of a node that died for as long as it thinks the node may return.
    """
    fd = _open_or_make(lock_file)
    try:
        if wait:
            _wait_for(fd, lock_file)
        else:
            _flock(fd, lock_file)
        yield
    finally:
        os.close(fd)


def kernel_id() -> str:
    """Names this kernel since it was booted, 16 hex digits: locks are certain among processes of one kernel only."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:16]


def file_system_time(file: Path) -> float:
    """Now by the clock that times of this file system's files come from; touches the file, which is made if need be."""
    fd = _open_or_make(file)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _open_or_make(file: Path) -> int:
    """When another node makes the file in the same moment, clients of network file systems say EEXIST, as if it had
    been asked for.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(file, flags | os.O_CREAT, 0o600)
    except FileExistsError:
        return os.open(file, flags)


@contextmanager
def beating(file: Path, *, every_s: float = BEAT_S) -> Iterator[None]:
    """Touch a file now and then while the body runs. A touch that fails is left out: silence is what it means."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
            with suppress(OSError):
                os.utime(file)

    thread = threading.Thread(target=beat, name=f"beat {file.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def staged(parent: Path, lock_file: Path) -> Iterator[Path]:
    """A fresh directory (mode 0700) below `parent`, removed on leaving. ENOSPC in the body becomes DiskFullError."""
    path = parent / f"{kernel_id()}-{secrets.token_hex(8)}"
    own_lock = path.with_name(f"{path.name}{_SUFFIX}")
    with disk_full_named(parent), locked(lock_file):
        fd = os.open(own_lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _wait_for(fd, own_lock)
            path.mkdir(mode=0o700)
        except BaseException:
            own_lock.unlink(missing_ok=True)
            os.close(fd)
            raise
    try:
        with beating(own_lock), disk_full_named(parent):
            yield path
    finally:
        try:
            remove_tree(path)
            own_lock.unlink(missing_ok=True)
        finally:
            os.close(fd)


def reap_staging(parent: Path, lock_file: Path) -> int:
    """Remove what dead owners left; how many they were. What a live owner has is never touched."""
    tokens = {path.name.removesuffix(_SUFFIX) for path in parent.iterdir() if not path.name.startswith(".")}
    if not tokens:
        return 0
    with ExitStack() as held:
        with locked(
            lock_file
        ):  # nobody begins anything meanwhile, so no owner is between making its lock and holding it
            now = file_system_time(lock_file)
            abandoned = [path for token in sorted(tokens) if _is_abandoned(path := parent / token, now, held)]
        return sum(_removed(path) for path in abandoned)  # as long as it takes: what is held meanwhile is ours alone


def _is_abandoned(path: Path, now: float, held: ExitStack) -> bool:
    """Whether a dead owner left it; then its lock, if it has one, is among what is held."""
    own_lock = path.with_name(f"{path.name}{_SUFFIX}")
    try:
        fd = os.open(own_lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _is_silent(path, now)
    with ExitStack() as opened:
        opened.callback(os.close, fd)
        try:
            _flock(fd, own_lock)
        except BlockingIOError:
            return False
        if not path.name.startswith(f"{kernel_id()}-") and now - os.fstat(fd).st_mtime < SILENT_S:
            return False
        held.push(opened.pop_all())
        return True


def _is_silent(path: Path, now: float) -> bool:
    """Without a lock: its owner has just finished, or what made it was an older version of this module."""
    try:
        return now - path.lstat().st_mtime >= SILENT_S
    except FileNotFoundError:
        return False


def _removed(path: Path) -> bool:
    """False when another is at it too, where locks end at the node."""
    try:
        remove_tree(path)
        path.with_name(f"{path.name}{_SUFFIX}").unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return True


def _wait_for(fd: int, file: Path) -> None:
    """Take the lock soon after it is free. Asked for again and again: waiting in the kernel has no end of its own."""
    deadline = time.monotonic() + PATIENCE_S
    pause_s = 0.001
    while True:
        try:
            return _flock(fd, file)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise NodeError(
                    f"another process has held {file} for {PATIENCE_S:g} s",
                    detail={"path": str(file)},
                    remedy="wait until the shared file system gives up the lock of a node that died, or see who has it",
                    retryable=True,
                ) from None
        threading.Event().wait(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _flock(fd: int, file: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise HostCapabilityError(
            f"the file system of {file} knows no file locks ({error.strerror})",
            detail={"probe": "flock", "path": str(file)},
            remedy="mount it with locks (NFS: without `nolock`), or put the store elsewhere",
        ) from error
