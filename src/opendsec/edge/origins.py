"""The saved sandboxes others start from: published snapshots in the store, and the bases of forks on this node.

A base is what a fork starts from: saved once, read by the sandboxes of that fork, and gone with the last of them. It
lies on this node's state file system, has no name anybody could ask for, and is not hashed.

An origin is one text, journalled with each sandbox started from it (`snapshot:<name>`, `fork:<token>`); while the
sandbox lives it holds the origin's files. A published snapshot is read and checked byte by byte before its first use by
this process, so what a disk or a file system has spoiled is refused by name and never run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from opendsec.errors import ConflictError, NotFoundError, UnsupportedError
from opendsec.model.ids import SandboxId
from opendsec.model.snapshot import SnapshotSummary
from opendsec.store.durable import remove_tree
from opendsec.store.images import ImageStore
from opendsec.store.snapshots import MANIFEST, Snapshot, Snapshots, snapshots_of

log = logging.getLogger(__name__)

NO_STORE = "this edge has no image store that snapshots could lie in"
_FORK = "fork"
_Identity = tuple[tuple[int, int, int], ...]


class Origins:
    """All of one edge. `store` None: it has none that can be written to. `state_dir` is the edge's own."""

    def __init__(self, state_dir: Path, store: ImageStore | None) -> None:
        self._work = state_dir / "saving"
        self._published = None if store is None else snapshots_of(store)
        self._bases = Snapshots(state_dir / "forks", self._staging, digests=False)
        self._known_good: dict[tuple[str, str], _Identity] = {}
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def open(self) -> None:
        """Once, before anything else: remove what an edge that died was saving. Blocking."""
        remove_tree(self._work)
        for directory in (self._work, self._bases.root):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sweep(self, live: Iterable[SandboxId]) -> None:
        """Once all sandboxes are known: bases none of them needs go, whoever had died over them. Blocking."""
        living = set(live)
        for project, name in list(self._bases.everything()):
            if not living & set(self._bases.users(project, name)):
                self._bases.remove(project, name, force=True)

    @contextmanager
    def saving(self) -> Iterator[Path]:
        """An empty directory on the state file system for a backend to save into; gone afterwards."""
        directory = Path(tempfile.mkdtemp(dir=self._work))
        try:
            yield directory
        finally:
            remove_tree(directory)

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        with self.saving() as directory:
            yield directory

    # Published ones

    @property
    def published(self) -> Snapshots:
        """Raises UnsupportedError without a store."""
        if self._published is None:
            raise UnsupportedError(NO_STORE)
        return self._published

    async def find(self, project: str, name: str) -> Snapshot:
        """The snapshot, checked once by this process. Raises NotFoundError, SnapshotInvalidError, UnsupportedError."""
        turn = self._turns.setdefault((project, name), asyncio.Lock())
        async with turn:
            return await asyncio.to_thread(self._checked, project, name)

    def _checked(self, project: str, name: str) -> Snapshot:
        snapshot = self.published.get(project, name)
        found = _identity(self.published.path(project, name))
        if found is None or self._known_good.get((project, name)) != found:
            self._known_good.pop((project, name), None)
            self.published.verify(project, name)
            if found is not None:
                self._known_good[project, name] = found
        return snapshot

    def trust(self, project: str, name: str) -> None:
        """It was just made here. Blocking."""
        found = _identity(self.published.path(project, name))
        if found is not None:
            self._known_good[project, name] = found

    def summaries(self, project: str) -> list[SnapshotSummary]:
        """Those of a project; none without a store. Blocking."""
        return [] if self._published is None else self._published.summaries(project)

    # Of forks

    def publish_base(self, draft: Snapshot, made: Path) -> str:
        """Keep what was saved as the base of a fork; its token. Blocking."""
        return self._bases.publish(draft, made).name

    def base(self, project: str, token: str) -> Snapshot:
        """Raises NotFoundError."""
        return self._bases.get(project, token)

    def drop_base_if_unused(self, project: str, token: str) -> None:
        """Blocking."""
        try:
            self._bases.remove(project, token)
        except (ConflictError, NotFoundError) as exc:
            log.debug("base_stays", extra={"fields": {"base": token, "reason": str(exc)}})

    # While a sandbox lives

    def use(self, project: str, origin: str, sandbox_id: SandboxId) -> Path:
        """Where its files are; they stay until `release`. Blocking. Raises NotFoundError, DiskFullError."""
        kind, _, name = origin.partition(":")
        return (self._bases if kind == _FORK else self.published).use(project, name, sandbox_id)

    def release(self, project: str, origin: str, sandbox_id: SandboxId) -> None:
        """May be repeated. Blocking."""
        kind, _, name = origin.partition(":")
        if kind == _FORK:
            self._bases.release(project, name, sandbox_id)
            self.drop_base_if_unused(project, name)
        elif self._published is not None:
            self._published.release(project, name, sandbox_id)


def _identity(place: Path) -> _Identity | None:
    """Which directory it is (a number alone is given to another one as soon as it is free), and when which of its files
    was written last; links to them change no more than their times of change. None: it is gone.
    """
    try:
        found = place.stat()
        files = [path.stat() for path in sorted((place.parent / MANIFEST, *place.rglob("*")))]
    except OSError:
        return None
    written = ((one.st_ino, one.st_size, one.st_mtime_ns) for one in files)
    return ((found.st_dev, found.st_ino, found.st_ctime_ns), *written)


def of_snapshot(name: str) -> str:
    """The origin of a published snapshot."""
    return f"snapshot:{name}"


def of_base(token: str) -> str:
    """The origin of a fork."""
    return f"{_FORK}:{token}"


def new_token() -> str:
    """Names a base."""
    return secrets.token_hex(8)
