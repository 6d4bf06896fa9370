"""Collect what nobody needs: neither a name, nor what a name's manifest names by digest, nor a node that has it
mounted, nor a publisher at work; and not before it has been so for a grace period.

Since when is taken from records, never from the age of files (a publisher may use an old one again): the time a
manifest last lost a name or was claimed, else the time of the first collection that saw the content unneeded. All
times are the file system's own.

Marking takes no lock and may take long. What happens meanwhile cannot be missed: a publisher leaves a claim before it
looks for content, a node its lease before it looks for a layer. Deleting goes in short turns under the store's lock:
look at claims and leases, move a batch to `condemned`, look again and put back what was claimed in between, delete the
rest. The second look is for file systems whose locks end at the node. Whoever dies in between leaves files in
`condemned`, which the next collection puts back before it marks.

It refuses to collect anything while it cannot know what a name or a node needs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import ConflictError, DiskFullError, ImageInvalidError
from opendsec.store.durable import FULL, disk_full_named, rename_onto, write_synced
from opendsec.store.images import ImageStore
from opendsec.store.layout import CONTENT, MANIFESTS, Layout, digest_of_file, is_content
from opendsec.store.leases import LEASE_S, Lease, read_leases
from opendsec.store.loading.profiles import forget_profiles
from opendsec.store.manifest import decode_manifest, hex_of
from opendsec.store.names import list_anew
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.references import Needed, needed_by_snapshots, needed_by_tags
from opendsec.store.staging import SILENT_S, file_system_time, locked

GRACE_S = 3600.0
"""How long content without a name is kept: longer than a publisher lies between looking a layer up and using it."""

CLAIM_S = 600.0
"""A claim from before the collection protects for so long, or for the grace period if that is shorter: where the lock
does not reach, its publisher may still be at work."""

_BATCH = 500
_FORGOTTEN = 30
"""A lease is deleted after so many times the silence that makes it void."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known before anything is decided. Files are paths relative to the root, times Unix seconds."""

    content: Mapping[str, int]
    """Size in bytes of every file of content."""
    needed: AbstractSet[str]
    nameless: Mapping[str, AbstractSet[str]]
    """What each manifest needs that nothing needs, itself included."""
    lost_at: Mapping[str, float]
    """When such a manifest last lost a name or was claimed, where that is recorded."""
    seen_at: Mapping[str, float]
    """Since when an earlier collection knew the file unneeded."""
    now: float


def unneeded_since(facts: Facts) -> dict[str, float]:
    """Since when each file of content that is not needed has been so. Pure.

    A layer goes no earlier than the last nameless manifest that has it: a name can be given back until then.
    """
    since: dict[str, float] = {}
    for manifest, files in facts.nameless.items():
        at = min(facts.now, facts.lost_at.get(manifest, facts.seen_at.get(manifest, facts.now)))
        for file in files:
            since[file] = max(since.get(file, at), at)
    unneeded = facts.content.keys() - facts.needed
    return {file: since.get(file, min(facts.now, facts.seen_at.get(file, facts.now))) for file in unneeded}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did, or would do."""

    dry_run: bool
    files: tuple[str, ...]
    """Deleted, relative to the root."""
    size_bytes: int
    """Of those."""
    waiting: int
    """Files that will go when their grace period is over."""
    waiting_bytes: int
    next_in_s: float | None
    """Until the first of them may go; None without any."""
    kept: int
    """Files that are needed."""
    kept_bytes: int
    leased_bytes: int
    """Of those, what only nodes need that have it mounted."""


def collect(
    store: ImageStore,
    *,
    grace_s: float = GRACE_S,
    lease_s: float = LEASE_S,
    dry_run: bool = False,
    on_progress: OnProgress = quietly,
) -> Collected:
    """Delete what nobody has needed for `grace_s` seconds. Nodes silent for `lease_s` seconds count as dead.

    Raises ConflictError while another process collects or checks, ImageInvalidError when a name or a lease cannot be
    understood: then nothing is deleted.
    """
    with keeping(store):
        return _Collection(store, grace_s=grace_s, lease_s=lease_s, on_progress=on_progress).run(dry_run=dry_run)


@contextmanager
def keeping(store: ImageStore) -> Iterator[None]:
    """One process at a time collects or checks a store."""
    try:
        with locked(store.layout.keeping_lock, wait=False):
            yield
    except BlockingIOError as error:
        raise ConflictError(
            "another process is collecting or checking this store", remedy="wait until it has ended"
        ) from error


class _Collection:
    """One run; `keeping` is held."""

    def __init__(self, store: ImageStore, *, grace_s: float, lease_s: float, on_progress: OnProgress) -> None:
        self._store = store
        self._layout = store.layout
        self._grace_s = grace_s
        self._lease_s = lease_s
        self._on_progress = on_progress
        with locked(self._layout.lock):
            self._now = file_system_time(self._layout.keeping_lock)
            self._old_claims = _times(self._layout.claims)
            _put_back_all(self._layout)

    def run(self, *, dry_run: bool) -> Collected:
        leased = self._leased()
        facts, named = self._look(leased)
        since = unneeded_since(facts)
        due = {file for file, at in since.items() if self._now - at >= self._grace_s}
        victims = sorted(due, key=lambda file: (CONTENT.index(file.rpartition("/")[0]), file))
        waiting = {file: at for file, at in since.items() if file not in due}
        if not dry_run:
            victims = self._sweep(victims)
            self._remember(waiting)  # after that: on a full disk there is room now
            self._tidy()
        sizes = facts.content
        kept = [file for file in sizes if file in facts.needed]
        return Collected(
            dry_run=dry_run,
            files=tuple(victims),
            size_bytes=sum(sizes[file] for file in victims),
            waiting=len(waiting),
            waiting_bytes=sum(sizes[file] for file in waiting),
            next_in_s=min((at + self._grace_s - self._now for at in waiting.values()), default=None),
            kept=len(kept),
            kept_bytes=sum(sizes[file] for file in kept),
            leased_bytes=sum(sizes[file] for file in kept if file not in named),
        )

    def _look(self, leased: AbstractSet[str]) -> tuple[Facts, set[str]]:
        """The facts, and what names and claims need. Content is listed first: what comes later is no candidate."""
        self._on_progress(Progress(phase="looking at content"))
        content = _sizes(self._layout)
        self._on_progress(Progress(phase="reading manifests"))
        named = self._named() | self._claimed(self._half_done(content))
        needed = named | leased
        lost_at: dict[str, float] = {}
        for name, at in (*self._old_claims.items(), *_times(self._layout.removed).items()):
            lost_at[_manifest_of(name)] = max(at, lost_at.get(_manifest_of(name), 0.0))
        facts = Facts(
            content=content,
            needed=needed,
            nameless={file: self._files_of(file) for file in content if _is_manifest(file) and file not in needed},
            lost_at=lost_at,
            seen_at=_read_seen(self._layout),
            now=self._now,
        )
        return facts, named

    def _named(self) -> set[str]:
        return needed_by_tags(self._layout) | needed_by_snapshots(self._layout)

    def _files_of(self, manifest: str) -> set[str]:
        """What a nameless manifest needs: of a damaged one, itself."""
        needed = Needed(self._layout)
        with suppress(FileNotFoundError, ImageInvalidError):
            needed.add(digest_of_file(manifest))
        return needed.files | {manifest}

    def _half_done(self, content: Mapping[str, int]) -> list[str]:
        """Recent claims without their manifest: a publisher, where the lock does not reach, may be between the two.

        What a claim with its manifest needs is kept by the claim's time, as one of `lost_at`.
        """
        youngest = self._now - min(self._grace_s, CLAIM_S)
        recent = (name for name, at in self._old_claims.items() if at > youngest)
        return [name for name in recent if _manifest_of(name) not in content]

    def _new_claims(self) -> list[str]:
        """Made since this collection began."""
        return [path.name for path in self._layout.claims.iterdir() if path.name not in self._old_claims]

    def _claimed(self, claims: Collection[str]) -> set[str]:
        """What these claims need. One that lacks something will not be published; the rest is kept all the same."""
        needed = Needed(self._layout)
        for name in claims:
            with suppress(FileNotFoundError):
                manifest = decode_manifest((self._layout.claims / name).read_bytes())
                needed.files.add(_manifest_of(name))
                needed.add_content(manifest)
        return needed.files

    def _leased(self) -> set[str]:
        return {file for lease in self._leases() if self._is_alive(lease) for file in lease.files}

    def _leases(self) -> list[Lease]:
        try:
            return read_leases(self._layout)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImageInvalidError(
                f"a node's lease cannot be read: {error!r}; so nothing is collected",
                remedy=f"look at {self._layout.nodes}, and delete what is no lease",
            ) from error

    def _is_alive(self, lease: Lease) -> bool:
        return self._now - lease.beat_at < self._lease_s

    def _sweep(self, victims: Sequence[str]) -> list[str]:
        deleted: list[str] = []
        done = 0
        while done < len(victims):
            self._on_progress(Progress(phase="deleting", done=done, total=len(victims)))
            looked_at, moved = self._condemn(victims[done : done + _BATCH])
            for file in moved:
                self._layout.condemned_file(file).unlink()
            deleted += moved
            done += looked_at
        return deleted

    def _condemn(self, batch: Sequence[str]) -> tuple[int, list[str]]:
        """Move a batch away, but for what is claimed or leased by now; how many were looked at, and what was moved."""
        with locked(self._layout.lock):
            held = self._held()
            moved: list[str] = []
            looked_at = 0
            for file in batch:
                try:
                    if file not in held and _move_away(self._layout, file):
                        moved.append(file)
                except OSError as error:
                    if error.errno not in FULL or not moved:
                        raise
                    break  # not even room for a longer directory: there is, once these are deleted
                looked_at += 1
            held = self._held()
            for file in moved:
                if file in held:
                    _put_back(self._layout, file)
        return looked_at, [file for file in moved if file not in held]

    def _held(self) -> set[str]:
        return self._claimed(self._new_claims()) | self._leased() | needed_by_snapshots(self._layout)

    def _remember(self, waiting: Mapping[str, float]) -> None:
        """If this is lost, or the disk too full for it, grace periods of what has no other record begin anew."""
        if waiting == _read_seen(self._layout):
            return
        content = json.dumps({"schema": 1, "since": waiting}).encode("ascii")
        with suppress(DiskFullError), disk_full_named(self._store.root), self._store.staging() as work:
            write_synced(work / "unreferenced", content, mode=0o644)
            rename_onto(work / "unreferenced", self._layout.unreferenced)

    def _tidy(self) -> None:
        """Forget records that say nothing any more."""
        with locked(self._layout.lock):
            for name, at in self._old_claims.items():
                if self._now - at > CLAIM_S:
                    (self._layout.claims / name).unlink()
            for name in _times(self._layout.removed):
                if not self._layout.content(_manifest_of(name)).exists():
                    (self._layout.removed / name).unlink()
            for lease in self._leases():
                if self._now - lease.beat_at > _FORGOTTEN * self._lease_s:
                    lease.file.unlink(missing_ok=True)
            for path in self._layout.nodes.glob(".*"):  # half-written by a node that was killed
                with suppress(FileNotFoundError):
                    if self._now - path.stat().st_mtime > SILENT_S:
                        path.unlink()
            list_anew(self._layout)
        forget_profiles(self._store.root)


def _is_manifest(file: str) -> bool:
    return file.startswith(f"{MANIFESTS}/")


def _sizes(layout: Layout) -> dict[str, int]:
    """Size of every file of content. What is no content is not seen here: a check tells it."""
    found: dict[str, int] = {}
    for kind in CONTENT:
        for path in layout.content(kind).iterdir():
            file = f"{kind}/{path.name}"
            if is_content(file):
                with suppress(FileNotFoundError):
                    found[file] = path.stat().st_size
    return found


def _times(directory: Path) -> dict[str, float]:
    """When each record in a directory was made. Records begin with the hex part of a manifest's digest."""
    found: dict[str, float] = {}
    for path in directory.iterdir():
        with suppress(FileNotFoundError, ImageInvalidError):
            hex_of(f"sha256:{path.name.partition('.')[0]}")
            found[path.name] = path.stat().st_mtime
    return found


def _manifest_of(record: str) -> str:
    return f"{MANIFESTS}/{record.partition('.')[0]}.json"


def _read_seen(layout: Layout) -> dict[str, float]:
    """What the last collection remembered. Without it, or when it is damaged, grace periods begin anew."""
    try:
        since = json.loads(layout.unreferenced.read_bytes())["since"]
        return {str(file): float(at) for file, at in since.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _move_away(layout: Layout, file: str) -> bool:
    try:
        layout.content(file).rename(layout.condemned_file(file))
    except FileNotFoundError:
        return False
    return True


def _put_back(layout: Layout, file: str) -> None:
    """A publisher may have brought the same bytes meanwhile: then those stay."""
    if layout.content(file).exists():
        layout.condemned_file(file).unlink()
    else:
        layout.condemned_file(file).rename(layout.content(file))


def _put_back_all(layout: Layout) -> None:
    """What a collection that was killed had moved away."""
    for path in layout.condemned.iterdir():
        file = path.name.replace("+", "/")
        if is_content(file):
            _put_back(layout, file)
