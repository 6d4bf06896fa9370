"""Snapshots of sandboxes in the store: memory, devices and disk of one moment, from which further sandboxes start.

    <root>/snapshots/<project>/<name>/manifest.json    what it is of, size and digest of every file; then its own digest
    <root>/snapshots/<project>/<name>/files/…          the backend's own, read in place by every node that has the store
    <root>/snapshots/<project>/<name>/users/<sandbox>  one empty file for each live sandbox that was started from it

Memory holds secrets, so a snapshot belongs to the project of its source and no other sees it; on the host only root
does. It appears by one rename of a directory whose bytes are on the disk, never changes, and goes whole: what is
half-written or half-removed lies in the staging area and is never seen. While a sandbox lives that was started from it
(its VMM may read memory and disk from these files to its end) it is not removed unless that is forced; a user leaves
its file first and then looks whether the snapshot is there, a removal moves it away first and then looks for users, so
one of them sees the other. The layers its source was started from are needed by it as by an image (`references`).

Refuses links and devices among the files, and names that are no snapshot's.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from opendsec.errors import ConflictError, ImageInvalidError, NotFoundError, SnapshotInvalidError
from opendsec.model.ids import SandboxId
from opendsec.model.image import ImageConfig, ImagePart, Layer
from opendsec.model.snapshot import SnapshotSummary
from opendsec.model.spec import BackendKind, SandboxSpec, check_snapshot_name
from opendsec.store.chunks import make_table, table_digest
from opendsec.store.durable import disk_full_named, sync_directory, sync_file, write_synced
from opendsec.store.images import ImageStore
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.sparse import copy_sparse
from opendsec.wire import codec

MANIFEST, FILES, USERS = "manifest.json", "files", "users"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One file of a snapshot."""

    size_bytes: int
    digest: str
    """`sha256:<hex>` of the table of its chunks (`opendsec.store.chunks`), so that holes need not be read; "" where
    nobody but this node, and nobody for long, reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The manifest."""

    version: int = VERSION
    name: str
    project: str
    backend: BackendKind
    spec: SandboxSpec
    """Of the source: image, resources, network."""
    source: SandboxId
    binding: str = ""
    """What can read it, in the backend's words (`BackendReport.binding`)."""
    image_digest: str
    image_config: ImageConfig
    image_layers: tuple[Layer, ...]
    image_parts: tuple[ImagePart, ...]
    next_command: int = 1
    """Numbers below are of commands of the source, which the saved guest agent may know."""
    sessions: tuple[str, ...] = ()
    """Names of the source's sessions, whose shells may be among what was saved."""
    files: Mapping[str, SnapshotFile]
    """By path below `files/`."""
    created_at: float
    """Unix time, seconds."""

    @property
    def size_bytes(self) -> int:
        """Of all files as they are read."""
        return sum(file.size_bytes for file in self.files.values())


class Snapshots:
    """All snapshots below one directory. `staging` gives private directories on its file system. Blocking."""

    def __init__(
        self, root: Path, staging: Callable[[], AbstractContextManager[Path]], *, digests: bool = True
    ) -> None:
        self.root = root
        self._staging = staging
        self._digests = digests

    def publish(self, draft: Snapshot, made: Path, *, on_progress: OnProgress = quietly) -> Snapshot:
        """Take the files below `made` (which is empty afterwards, or a copy remains) and publish them under the draft's
        name; the manifest as it is then.

        Raises ConflictError for a taken name, DiskFullError, SnapshotInvalidError for what cannot be part of one.
        """
        place = self._place(draft.project, draft.name)
        with disk_full_named(self.root), self._staging() as work:
            if place.exists():
                raise _taken(draft.name)
            whole = work / "snapshot"
            whole.mkdir(mode=0o700)
            _take(made, whole / FILES, on_progress)
            (whole / USERS).mkdir(mode=0o700)
            snapshot = replace(draft, files=self._files(whole / FILES, on_progress))
            write_synced(whole / MANIFEST, _sealed(codec.encode(snapshot)))
            sync_directory(whole)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                whole.rename(place)
            except OSError as error:
                if place.exists():
                    raise _taken(draft.name) from error
                raise
            sync_directory(place.parent)
            sync_directory(self.root)
        return snapshot

    def get(self, project: str, name: str) -> Snapshot:
        """The manifest; every file is there and has its size. Raises NotFoundError, SnapshotInvalidError."""
        check_snapshot_name(name, field_name="snapshot")
        place = self._place(project, name)
        snapshot = self._read(place, name)
        for file, fact in snapshot.files.items():
            _check_size(place / FILES / file, file, fact, name)
        return snapshot

    def path(self, project: str, name: str) -> Path:
        """Where its files lie, whether or not they are there."""
        return self._place(project, name) / FILES

    def verify(self, project: str, name: str, *, on_progress: OnProgress = quietly) -> None:
        """Read every byte. Raises NotFoundError, SnapshotInvalidError naming the file."""
        snapshot = self.get(project, name)
        done = 0
        for file, fact in snapshot.files.items():
            on_progress(Progress(phase="checking the snapshot", done=done, total=snapshot.size_bytes))
            if fact.digest and _digest(self.path(project, name) / file) != fact.digest:
                raise _damaged(name, f"the bytes of {file} are not what was saved")
            done += fact.size_bytes

    def summary(self, project: str, name: str) -> SnapshotSummary:
        """One of them; if it cannot be read it says why. Raises NotFoundError."""
        check_snapshot_name(name)
        return self._summary(project, name)

    def summaries(self, project: str) -> list[SnapshotSummary]:
        """Those of a project, by name; one that cannot be read says why."""
        found = []
        for name in self.names(project):
            with suppress(NotFoundError):  # removed meanwhile
                found.append(self._summary(project, name))
        return found

    def names(self, project: str) -> list[str]:
        """Sorted."""
        return _names(self.root / project)

    def everything(self) -> Iterator[tuple[str, str]]:
        """Project and name of every snapshot."""
        for project in _names(self.root):
            for name in self.names(project):
                yield project, name

    def layers(self) -> Iterator[Layer]:
        """What the sources of all snapshots were started from. Raises ImageInvalidError when that cannot be known."""
        for project, name in self.everything():
            try:
                yield from self._read(self._place(project, name), name).image_layers
            except NotFoundError:
                continue  # removed meanwhile
            except SnapshotInvalidError as error:
                raise ImageInvalidError(
                    f"what snapshot {name!r} of project {project!r} needs cannot be known: {error.message}; "
                    "so nothing is collected",
                    detail={"snapshot": name, "project": project},
                    remedy="opendsec snapshot rm --force, with a key of that project",
                ) from error

    def use(self, project: str, name: str, user: SandboxId) -> Path:
        """From now on `user` needs it: where its files lie. May be repeated. Raises NotFoundError."""
        place = self._place(project, name)
        try:
            with disk_full_named(self.root):
                (place / USERS / user).touch(mode=0o600)
            if not (place / MANIFEST).exists():
                raise _missing(name)
        except FileNotFoundError:
            raise _missing(name) from None
        return place / FILES

    def release(self, project: str, name: str, user: SandboxId) -> None:
        """`user` needs it no more. May be repeated; one that is gone is fine."""
        (self._place(project, name) / USERS / user).unlink(missing_ok=True)

    def users(self, project: str, name: str) -> list[str]:
        """Sandboxes that need it, sorted; [] when it is gone."""
        return _names(self._place(project, name) / USERS)

    def remove(self, project: str, name: str, *, force: bool = False) -> SnapshotSummary:
        """Remove it; what it was. Raises NotFoundError, and ConflictError while sandboxes need it, unless `force`."""
        check_snapshot_name(name, field_name="snapshot")
        place = self._place(project, name)
        summary = self._summary(project, name)
        if not force:
            _refuse_used(name, self.users(project, name))
        with self._staging() as work:
            gone = work / "removed"
            try:
                place.rename(gone)
            except FileNotFoundError:
                raise _missing(name) from None
            users = _names(gone / USERS)
            if users and not force and not place.exists():
                gone.rename(place)
                _refuse_used(name, users)
            sync_directory(place.parent)
        return summary

    def _place(self, project: str, name: str) -> Path:
        return self.root / project / name

    def _summary(self, project: str, name: str) -> SnapshotSummary:
        try:
            snapshot = self.get(project, name)
        except SnapshotInvalidError as error:
            return SnapshotSummary(name=name, problem=error.message)
        files = self.path(project, name)
        disk = sum((files / file).stat().st_blocks * 512 for file in snapshot.files)
        return summary_of(snapshot, disk_bytes=disk, users=len(self.users(project, name)))

    def _read(self, place: Path, name: str) -> Snapshot:
        try:
            content = (place / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(name) from None
        try:
            snapshot: Snapshot = msgspec.convert(codec.parse(_unsealed(content, name)), Snapshot)
        except (msgspec.MsgspecError, ValueError) as error:
            raise _damaged(name, f"its manifest cannot be read: {error}") from error
        if snapshot.version > VERSION:
            raise SnapshotInvalidError(
                f"snapshot {name!r} has version {snapshot.version}, this OpenDSec reads up to {VERSION}",
                detail={"snapshot": name},
                remedy="upgrade, or make it anew",
            )
        return snapshot

    def _files(self, directory: Path, on_progress: OnProgress) -> dict[str, SnapshotFile]:
        """Every file below, synced."""
        found = {}
        files = sorted(path for path in directory.rglob("*") if not path.is_dir())
        total = sum(path.lstat().st_size for path in files)
        done = 0
        for path in files:
            on_progress(Progress(phase="writing the snapshot", done=done, total=total))
            path.chmod(0o444)
            size = path.stat().st_size
            if self._digests:
                sync_file(path)
            digest = _digest(path) if self._digests else ""
            found[str(path.relative_to(directory))] = SnapshotFile(size_bytes=size, digest=digest)
            done += size
        if self._digests:
            for path in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
                sync_directory(path)
        return found


def snapshots_of(store: ImageStore) -> Snapshots:
    """Those of an image store."""
    return Snapshots(store.layout.snapshots, store.staging)


def summary_of(snapshot: Snapshot, *, disk_bytes: int = 0, users: int = 0) -> SnapshotSummary:
    """As the API tells it."""
    return SnapshotSummary(
        name=snapshot.name,
        backend=snapshot.backend,
        spec=snapshot.spec,
        size_bytes=snapshot.size_bytes,
        disk_bytes=disk_bytes,
        created_at=snapshot.created_at,
        source=snapshot.source,
        binding=snapshot.binding,
        users=users,
    )


def layers_of_snapshots(root: Path) -> Iterator[Layer]:
    """The layers every snapshot below `root` needs. Raises ImageInvalidError when that cannot be known."""
    return Snapshots(root, _no_staging).layers()


def _no_staging() -> AbstractContextManager[Path]:
    raise NotImplementedError("these snapshots are read only")


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _take(made: Path, target: Path, on_progress: OnProgress) -> None:
    """Move a finished tree, or copy it where the store lies on another file system."""
    _check_kinds(made)
    target.mkdir(mode=0o700)
    for entry in sorted(made.iterdir()):
        if entry.stat().st_dev == target.stat().st_dev:
            entry.rename(target / entry.name)
        elif entry.is_dir():
            _take(entry, target / entry.name, on_progress)
        else:
            on_progress(Progress(phase="copying the snapshot"))
            copy_sparse(entry, target / entry.name)


def _check_kinds(directory: Path) -> None:
    for path in directory.rglob("*"):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise SnapshotInvalidError(
                f"{path.relative_to(directory)} is neither a file nor a directory, which no snapshot may hold"
            )


def _sealed(manifest: bytes) -> bytes:
    """With its digest in a line of its own: layers, labels and limits of a manifest are believed."""
    return manifest + b"\n" + _digest_of(manifest)


def _unsealed(content: bytes, name: str) -> bytes:
    manifest, line, digest = content.partition(b"\n")
    if not line:
        raise _damaged(name, "its manifest cannot be read: it has no digest")
    if digest != _digest_of(manifest):
        raise _damaged(name, "the bytes of its manifest are not what was saved")
    return manifest


def _digest_of(manifest: bytes) -> bytes:
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}".encode("ascii")


def _digest(path: Path) -> str:
    return table_digest(make_table(path))


def _check_size(path: Path, file: str, fact: SnapshotFile, name: str) -> None:
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        if not path.parents[len(Path(file).parts)].exists():
            raise _missing(name) from None
        raise _damaged(name, f"{file} is missing") from None
    if size != fact.size_bytes:
        raise _damaged(name, f"{file} has {size} bytes, the manifest says {fact.size_bytes}")


def _refuse_used(name: str, users: list[str]) -> None:
    if users:
        shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
        raise ConflictError(
            f"snapshot {name!r} is needed by {shown}",
            detail={"snapshot": name, "needed_by": users[:100]},
            remedy="stop those first, or say --force: they may fail at any moment then",
        )


def _missing(name: str) -> NotFoundError:
    return NotFoundError(
        f"no snapshot {name!r} in this project",
        detail={"field": "snapshot", "snapshot": name},
        remedy="see `opendsec snapshot ls`",
    )


def _taken(name: str) -> ConflictError:
    return ConflictError(
        f"there is a snapshot {name!r} already",
        detail={"field": "name", "snapshot": name},
        remedy="choose another name, or remove it first",
    )


def _damaged(name: str, why: str) -> SnapshotInvalidError:
    return SnapshotInvalidError(
        f"snapshot {name!r} is damaged: {why}",
        detail={"snapshot": name},
        remedy="remove it with `opendsec snapshot rm`, and make it anew",
    )
