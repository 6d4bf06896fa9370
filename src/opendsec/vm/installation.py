"""How kernels and VMMs get onto a node: put together out of sight, then there in one step.

Whoever looks meanwhile sees what was there before or what is there now, whole, never nothing. Whoever is killed leaves
a hidden directory `.new-…`, which the next one removes; a lock tells it from one that is being filled. It refuses file
systems that cannot exchange two names (ext4, XFS, btrfs and overlayfs can).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.errors import NodeError
from opendsec.linux import libc
from opendsec.store.durable import remove_tree, sync_directory


@contextmanager
def work_in(directory: Path) -> Iterator[Path]:
    """A hidden, empty directory in `directory`, which is made if need be; it goes with the end of the body, and what
    killed installations have left goes before.
    """
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for left in directory.glob(".new-*"):
        with _held(left) as is_ours:
            if is_ours:
                remove_tree(left)
    work = directory / f".new-{secrets.token_hex(6)}"
    with _made(work):
        yield work


@contextmanager
def _made(work: Path) -> Iterator[None]:
    work.mkdir(mode=0o700)
    try:
        with _held(work):
            yield
    finally:
        remove_tree(work)


@contextmanager
def _held(place: Path) -> Iterator[bool]:
    """Hold flock(2) on a directory; False: somebody does, or it is gone. The kernel drops it when its holder dies."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def put(new: Path, target: Path) -> None:
    """Give a synced directory its name. What had the name is in `new` afterwards, to be removed. Raises NodeError."""
    while True:
        try:
            libc.renameat2(new, target, libc.RENAME_NOREPLACE)
        except FileExistsError:
            pass
        except OSError as error:
            raise _cannot(target, error) from error
        else:
            break
        try:
            libc.renameat2(new, target, libc.RENAME_EXCHANGE)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            raise _cannot(target, error) from error
        break
    sync_directory(target.parent)


def _cannot(target: Path, error: OSError) -> OSError | NodeError:
    if error.errno != errno.EINVAL:
        return error
    return NodeError(
        f"the file system of {target.parent} cannot exchange two names",
        remedy="keep the platform's state directory on ext4, XFS or btrfs",
    )


def point(link: Path, name: str, work: Path) -> None:
    """Make the symbolic link `link` mean `name`, whatever it meant."""
    made = work / link.name
    made.symlink_to(name)
    made.rename(link)
    sync_directory(link.parent)
