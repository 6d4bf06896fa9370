"""Which of several platforms on one kernel this is: a small number, and what follows from it.

Sandboxes take user ids, network addresses, link names and control groups that the whole machine shares. Two platforms
with different state directories must not meet there, so each claims a number first:

    <cgroup v2>/opendsec.<number>/   the claim: locked while its edge runs, marked with owner and control group

The number stays the owner's as long as its edge runs or a sandbox of it lives, also while its edge is down; after a
reboot there are no claims. Kernel failures are OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from opendsec.linux.slots import SLOTS

NUMBERS = range(14)
_CLAIM = "opendsec.{}"
_OWNER = "trusted.opendsec.owner"
_ROOT = "trusted.opendsec.root"
_OWN_PATIENCE_S = 5.0
"""So long the process that had our own claim may take to disappear."""


@dataclass(frozen=True, slots=True)
class NodeNumber:
    """A claimed number; `close` keeps the claim for the sandboxes that live on, `release` gives it up."""

    number: int
    root: str
    """Name of the control groups' top directory."""
    unified: Path
    fd: int

    @property
    def first_slot(self) -> int:
        """The machine's slot of this platform's slot 0."""
        return self.number * SLOTS

    @property
    def links(self) -> str:
        """How host interface names begin."""
        return f"ods{self.number or ''}-"

    @property
    def table(self) -> str:
        """The nftables table."""
        return f"opendsec{self.number or ''}"

    @property
    def prefix(self) -> IPv4Network:
        """Addresses of sandboxes and of the host's ends."""
        return IPv4Network(f"10.{209 + self.number}.0.0/16")

    def close(self) -> None:
        """The edge ends; its sandboxes may live on."""
        os.close(self.fd)

    def release(self) -> None:
        """Nothing is left of this platform."""
        with _alone(self.unified):
            (self.unified / _CLAIM.format(self.number)).rmdir()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_root(number: int) -> str:
    """Control group name unless another was asked for."""
    return f"opendsec-{number}" if number else "opendsec"


async def claim(unified: Path | None, *, owner: str, root: str | None = None) -> NodeNumber:
    """The number `owner` (its state directory) has already, or the lowest nobody uses.

    `root`: name of its control groups, None for the number's own. Raises OSError: EUSERS when all are in use, EAGAIN
    while another process of the same owner runs, ENOTSUP without a cgroup v2 tree.
    """
    if unified is None:
        raise OSError(errno.ENOTSUP, "no cgroup v2 tree is mounted")
    until = time.monotonic() + _OWN_PATIENCE_S
    while True:
        try:
            return _claim(unified, owner, root)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(0.02)


def _claim(unified: Path, owner: str, root: str | None) -> NodeNumber:
    with _alone(unified):
        own = [number for number in NUMBERS if _mark(unified / _CLAIM.format(number), _OWNER) == owner]
        for number in own or NUMBERS:
            fd = _try(unified, number, owner)
            if fd is not None:
                chosen = root or default_root(number)
                os.setxattr(fd, _OWNER, os.fsencode(owner))
                os.setxattr(fd, _ROOT, os.fsencode(chosen))
                return NodeNumber(number, chosen, unified, fd)
    if own:
        raise BlockingIOError(errno.EAGAIN, f"another process runs the sandboxes of {owner}")
    raise OSError(errno.EUSERS, f"{len(NUMBERS)} platforms use this kernel already")


@contextlib.contextmanager
def _alone(unified: Path) -> Iterator[None]:
    """No other process claims or releases meanwhile."""
    fd = os.open(unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _try(unified: Path, number: int, owner: str) -> int | None:
    path = unified / _CLAIM.format(number)
    path.mkdir(mode=0o700, exist_ok=True)
    holder, root = _mark(path, _OWNER), _mark(path, _ROOT)
    if holder not in ("", owner) and _has_sandboxes(unified / root):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _mark(path: Path, name: str) -> str:
    try:
        return os.fsdecode(os.getxattr(path, name))
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOENT):
            raise
        return ""


def _has_sandboxes(root: Path) -> bool:
    return any(child.is_dir() for kind in root.glob("*/") for child in kind.iterdir())
