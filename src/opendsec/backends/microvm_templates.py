"""Machines that were booted once and are copied ever after: memory, devices and disk of a sandbox nobody has used yet.

    <root>/<key>/machine/   what `Vm.save` wrote
    <root>/<key>/disk.img   its writable disk at that moment (and data.img, a second one)
    <root>/.new-…           one that is being made; removed by the next `open`

The key names everything a restored machine depends on, so a template is never of another machine, only old. Its bytes
are on the disk before it has its name, for memory is believed by its size (`vm.saved`): a disk that changes bits later
is not found out. Who starts from one links its files into a directory of their own: a template that is removed
meanwhile costs nobody anything. Whoever asks first makes it and the others wait, also for its failure; one at a time
boots, for that takes a processor. The least recently used go when there are too many, or they take too much room.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from opendsec.errors import OpenDSecError
from opendsec.store.durable import remove_tree, sync_directory, sync_file

MACHINE = "machine"
MAX_TEMPLATES = 32
MAX_BYTES = 8 * 1024**3
_NEW = ".new-"

Maker = Callable[[Path], Awaitable[None]]
"""Fills an empty directory, or raises and leaves what it likes in it."""


class Templates:
    """Those of one backend. `most` and `most_bytes` bound what is kept; the one made last always is."""

    def __init__(self, root: Path, *, most: int = MAX_TEMPLATES, most_bytes: int = MAX_BYTES) -> None:
        self._root = root
        self._most = most
        self._most_bytes = most_bytes
        self._making: dict[str, asyncio.Future[None]] = {}
        self._booting = asyncio.Lock()

    def open(self) -> None:
        """Remove what an earlier process left half-made. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._root.iterdir():
            if path.name.startswith(_NEW):
                remove_tree(path)

    def names(self) -> list[str]:
        """Keys of those that are whole."""
        return sorted(path.name for path in self._root.iterdir() if not path.name.startswith("."))

    async def get(self, key: str, make: Maker) -> Path:
        """The template's directory, made by `make` if there is none. Raises what `make` does.

        It may be gone a moment later: link its files at once, and ask again when they are not there.
        """
        path = self._root / key
        while not path.is_dir():
            running = self._making.get(key)
            if running is None:
                await self._make_alone(key, make)
            else:
                await _waited(running)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return path

    async def discard(self, key: str) -> None:
        """It turned out to be of no use."""
        await asyncio.to_thread(_remove, self._root, key)

    async def _make_alone(self, key: str, make: Maker) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._making[key] = done
        try:
            async with self._booting:
                await self._make(key, make)
        except (OpenDSecError, OSError) as error:
            done.set_exception(error)
            done.exception()  # whether anybody waits for it or not
            raise
        finally:
            del self._making[key]
            if not done.done():  # made, or its maker was cancelled: who waits looks again
                done.set_result(None)

    async def _make(self, key: str, make: Maker) -> None:
        work = self._root / f"{_NEW}{secrets.token_hex(8)}"
        work.mkdir(mode=0o700)
        try:
            await make(work)
            await asyncio.to_thread(_sync, work)
            work.rename(self._root / key)
            await asyncio.to_thread(sync_directory, self._root)
        finally:
            await asyncio.to_thread(remove_tree, work)
        await asyncio.to_thread(self._evict, key)

    def _evict(self, newest: str) -> None:
        """Another may be discarded meanwhile: that fails nobody's start."""
        found: list[tuple[float, str]] = []
        for path in self._root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += [] if path.name[0] == "." else [(path.stat().st_mtime, path.name)]
        found.sort()
        sizes = {name: _bytes_of(self._root / name) for _, name in found}
        total = sum(sizes.values())
        left = len(found)
        for _, name in found:
            if name == newest or (left <= self._most and total <= self._most_bytes):
                continue
            _remove(self._root, name)
            left -= 1
            total -= sizes[name]


async def _waited(running: asyncio.Future[None]) -> None:
    """Each who waits gets an error of its own: they write the name of their sandbox on it."""
    try:
        await asyncio.shield(running)
    except OpenDSecError as error:
        raise copy.copy(error) from error


def _sync(directory: Path) -> None:
    """All below it: after a power cut memory would have its size, and be zeros."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync_file(path)
        else:
            sync_directory(path)
    sync_directory(directory)


def _remove(root: Path, key: str) -> None:
    """First out of sight, so that nobody starts from half of it."""
    gone = root / f"{_NEW}{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):
        (root / key).rename(gone)
        remove_tree(gone)


def _bytes_of(directory: Path) -> int:
    """On the disk, as far as it is still there."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in directory.rglob("*"):
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total
