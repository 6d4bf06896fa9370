"""Check a whole store: every name, manifest, blob, table and byte of data, and that they lead to each other.

    damaged     bytes that are not what the file's name says
    missing     what an image needs and the store has not got
    dangling    a reference that leads to no image, or a composition that cannot be made
    unreadable  the file system gave an error: nothing is known about the bytes
    unknown     a file that is none of the store's; said, and no fault

Repairing takes damaged files out of the way (to `damaged/`), so that publishing the same content again brings good
ones, and writes tables again that follow from good data. It deletes nothing, and never touches what it does not know.
A quick check reads no bytes of layers: presence and sizes only.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from opendsec.errors import ImageError, ImageInvalidError, InvalidSpecError, NotFoundError, SnapshotInvalidError
from opendsec.store.chunks import DIGEST_BYTES, chunk_count, make_table, table_digest
from opendsec.store.compose import split_reference
from opendsec.store.durable import link_into, sync_directory, write_synced
from opendsec.store.gc import keeping
from opendsec.store.images import ImageStore
from opendsec.store.layout import (
    BLOBS,
    CONTENT,
    DATA,
    HINTS,
    MANIFESTS,
    TABLES,
    Layout,
    digest_of_file,
    files_of_layers,
    is_content,
    manifest_file,
)
from opendsec.store.manifest import Manifest, decode_manifest, decode_tag, digest_of, hex_of, name_of_tag_file
from opendsec.store.progress import OnProgress, Progress, quietly
from opendsec.store.references import tag_files
from opendsec.store.snapshots import snapshots_of
from opendsec.store.staging import locked

_THREADS = min(8, (os.cpu_count() or 1) + 1)
_READ_BYTES = 1 << 20


class _OverError(Exception):
    """The check was interrupted: what reads stops at its next piece."""


class Fault(StrEnum):
    """What is wrong with a file or a name; see above."""

    DAMAGED = "damaged"
    MISSING = "missing"
    DANGLING = "dangling"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"


class Repair(StrEnum):
    """What was done about it."""

    NONE = ""
    SET_ASIDE = "set aside"
    """Moved to `damaged/`."""
    REBUILT = "rebuilt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    fault: Fault
    file: str
    """Relative to the root; the image's name where it is about a reference."""
    sentence: str
    images: tuple[str, ...] = ()
    """Names that cannot be relied on because of it."""
    repair: Repair = Repair.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found."""

    quick: bool
    images: int
    files: int
    size_bytes: int
    """Of the content that was looked at."""
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether every image can be relied on (after a quick check: as far as that can tell)."""
        return all(one.fault is Fault.UNKNOWN or one.repair is Repair.REBUILT for one in self.findings)


def check(
    store: ImageStore, *, quick: bool = False, repair: bool = False, on_progress: OnProgress = quietly
) -> Checked:
    """Check the store. Others may use it meanwhile; ConflictError while another process collects or checks."""
    with keeping(store):
        run = _Check(store, quick=quick, on_progress=on_progress)
        findings = run.findings()
        if repair:
            findings = [_repaired(store, one) for one in findings]
        return Checked(
            quick=quick,
            images=len(run.names),
            files=len(run.sizes),
            size_bytes=sum(run.sizes.values()),
            findings=tuple(findings),
        )


@dataclass(slots=True)
class _Check:
    """One run; `keeping` is held."""

    store: ImageStore
    quick: bool
    on_progress: OnProgress
    names: dict[str, str] = field(default_factory=dict)
    """What each name means: a manifest's digest."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of each file of content."""

    def findings(self) -> list[Finding]:
        layout = self.store.layout
        # Names first: what one means was there before it, and nobody collects meanwhile.
        found = [*_unknown_files(layout), *self._read_tags(), *self._list_content(), *self._read_manifests()]
        found += self._check_bytes()
        found += self._check_snapshots()
        found += self._missing()
        found += self._dangling()
        users = self._users()
        return [replace(one, images=one.images or tuple(users.get(one.file, ()))) for one in found]

    def _list_content(self) -> Iterator[Finding]:
        for kind in CONTENT:
            for path in sorted(self.store.layout.content(kind).iterdir()):
                file = f"{kind}/{path.name}"
                if is_content(file):
                    self.sizes[file] = path.stat().st_size
                elif not path.name.startswith(".nfs"):
                    yield Finding(fault=Fault.UNKNOWN, file=file, sentence="no content of a store has such a name")

    def _read_tags(self) -> Iterator[Finding]:
        for path in tag_files(self.store.layout):
            name = name_of_tag_file(path.name)
            try:
                self.names[name] = decode_tag(path.read_bytes(), name=name).digest
            except FileNotFoundError:
                continue  # removed meanwhile
            except ImageInvalidError as error:
                yield Finding(fault=Fault.DAMAGED, file=f"tags/{path.name}", sentence=error.message, images=(name,))
            except OSError as error:
                yield replace(_unreadable(f"tags/{path.name}", error), images=(name,))

    def _read_manifests(self) -> Iterator[Finding]:
        for file in self.sizes:
            if not file.startswith(f"{MANIFESTS}/"):
                continue
            try:
                content = self.store.layout.content(file).read_bytes()
            except OSError as error:
                yield _unreadable(file, error)
                continue
            if digest_of(content) != digest_of_file(file):
                yield Finding(fault=Fault.DAMAGED, file=file, sentence="its bytes do not have the digest in its name")
                continue
            try:
                self.manifests[digest_of_file(file)] = decode_manifest(content)
            except ImageInvalidError as error:
                yield Finding(fault=Fault.DAMAGED, file=file, sentence=error.message)

    def _check_bytes(self) -> list[Finding]:
        """Every file of a layer, several at once."""
        expected = _expected_sizes(self.manifests.values())
        files = [file for file in self.sizes if not file.startswith(f"{MANIFESTS}/")]
        total = max(1, sum(self.sizes[file] for file in files))
        done = 0

        def count(more: int) -> None:
            nonlocal done
            if over:
                raise _OverError
            done += more

        over = False
        with ThreadPoolExecutor(_THREADS) as pool:
            left: set[Future[Finding | None]] = {
                pool.submit(_check_file, self.store.layout, file, expected.get(file), self.quick, count)
                for file in files
            }
            found: list[Finding] = []
            try:
                while left:
                    checked, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
                    found += [one for one in (future.result() for future in checked) if one is not None]
                    self.on_progress(Progress(phase="checking layers", done=min(done, total), total=total))
            except BaseException:  # an interrupt does not wait for all the rest to be read
                over = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return sorted(found, key=lambda one: one.file)

    def _check_snapshots(self) -> Iterator[Finding]:
        """Saved sandboxes: their files, and the layers they need."""
        snapshots = snapshots_of(self.store)
        for project, name in snapshots.everything():
            file = f"snapshots/{project}/{name}"
            try:
                if not self.quick:
                    snapshots.verify(project, name, on_progress=self.on_progress)
                lacking = files_of_layers(snapshots.get(project, name).image_layers) - self.sizes.keys()
            except NotFoundError:
                continue  # removed meanwhile
            except SnapshotInvalidError as error:
                yield Finding(fault=Fault.DAMAGED, file=file, sentence=error.message)
            except OSError as error:
                yield _unreadable(file, error)
            else:
                for one in sorted(lacking):
                    yield Finding(fault=Fault.MISSING, file=one, sentence=f"the snapshot {file} needs it")

    def _missing(self) -> list[Finding]:
        """What images that have a name, or are named by digest by such, lack."""
        found: dict[str, Finding] = {}
        for name in self.names:
            for digest in self._reach(name):
                manifest = self.manifests.get(digest)
                wanted = {manifest_file(digest)} if manifest is None else files_of_layers(manifest.layers)
                for file in wanted - self.sizes.keys():
                    found[file] = Finding(fault=Fault.MISSING, file=file, sentence="images need it")
        return [found[file] for file in sorted(found)]

    def _dangling(self) -> Iterator[Finding]:
        for name, digest in self.names.items():
            manifest = self.manifests.get(digest)
            if manifest is None:
                continue  # said already
            try:
                self.store.compose(name)
            except (ImageError, InvalidSpecError) as error:
                if self._is_a_part(manifest) or self._means_another(name, digest):
                    continue
                yield Finding(fault=Fault.DANGLING, file=name, sentence=error.message, images=(name,))
            except OSError as error:  # of what it refers to
                yield replace(_unreadable(name, error), images=(name,))

    def _means_another(self, name: str, digest: str) -> bool:
        """Whether somebody has removed the name or given it a new meaning since the check began."""
        try:
            return decode_tag(self.store.layout.tag(name).read_bytes(), name=name).digest != digest
        except FileNotFoundError:
            return True
        except (ImageInvalidError, OSError):
            return False

    def _is_a_part(self, manifest: Manifest) -> bool:
        """A workspace or toolkit without a base of its own: nobody starts it alone."""
        return not manifest.base and bool(manifest.layers) and manifest.layers[0].role.value != "base"

    def _reach(self, name: str) -> list[str]:
        """Digests of the manifests an image is made of: its own, and those its references lead to."""
        seen: list[str] = []
        left = [self.names[name]]
        while left:
            digest = left.pop()
            if digest in seen:
                continue
            seen.append(digest)
            manifest = self.manifests.get(digest)
            if manifest is not None:
                named = (split_reference(one) for one in (manifest.base, *manifest.toolkits) if one)
                left += [pin or self.names.get(other, "") for other, pin in named]
        return [digest for digest in seen if digest]

    def _users(self) -> Mapping[str, list[str]]:
        """Names by the file they need."""
        users: dict[str, list[str]] = {}
        for name in sorted(self.names):
            for digest in self._reach(name):
                manifest = self.manifests.get(digest)
                files = files_of_layers(manifest.layers) if manifest is not None else set()
                for file in (manifest_file(digest), *files):
                    users.setdefault(file, []).append(name)
        return users


def _expected_sizes(manifests: Iterable[Manifest]) -> dict[str, int]:
    """What manifests say about the sizes of files of layers."""
    found: dict[str, int] = {}
    for manifest in manifests:
        for layer in manifest.layers:
            found[f"{BLOBS}/{hex_of(layer.mounted.digest)}"] = layer.mounted.size_bytes
            if layer.data is not None:
                data = hex_of(layer.data.digest)
                found[f"{DATA}/{data}"] = layer.data.size_bytes
                found[f"{TABLES}/{data}"] = chunk_count(layer.data.size_bytes) * DIGEST_BYTES
    return found


def _check_file(
    layout: Layout, file: str, expected: int | None, quick: bool, count: Callable[[int], None]
) -> Finding | None:
    path = layout.content(file)
    try:
        size = path.stat().st_size
        if expected is not None and size != expected:
            sentence = f"it has {size} bytes, its image says {expected}"
            return Finding(fault=Fault.DAMAGED, file=file, sentence=sentence)
        if quick:
            return None
        match file.partition("/")[0]:
            case "blobs":
                return _check_blob(path, file, count)
            case "tables":
                return _check_table(path, file, count)
            case _:
                return _check_data(layout, path, file, count)
    except OSError as error:
        return _unreadable(file, error)


def _unreadable(file: str, error: OSError) -> Finding:
    return Finding(fault=Fault.UNREADABLE, file=file, sentence=f"it could not be read: {error.strerror}")


def _check_blob(path: Path, file: str, count: Callable[[int], None]) -> Finding | None:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as opened:
        while piece := opened.read(_READ_BYTES):
            digest.update(piece)
            count(len(piece))
    if f"sha256:{digest.hexdigest()}" == digest_of_file(file):
        return None
    return Finding(fault=Fault.DAMAGED, file=file, sentence="its bytes do not have the digest in its name")


def _check_table(path: Path, file: str, count: Callable[[int], None]) -> Finding | None:
    content = path.read_bytes()
    count(len(content))
    if table_digest(content) == digest_of_file(file):
        return None
    return Finding(fault=Fault.DAMAGED, file=file, sentence="its bytes do not have the digest in its name")


def _check_data(layout: Layout, path: Path, file: str, count: Callable[[int], None]) -> Finding | None:
    """Against its own table; without a good one, by what its table would be."""
    digest = digest_of_file(file)
    found = make_table(path, on_bytes=count)
    if table_digest(found) == digest:
        return None
    sentence = "its bytes do not have the digest in its name"
    with suppress(FileNotFoundError):
        table = layout.content(_table_of(file)).read_bytes()
        if table_digest(table) == digest:
            sentence = f"{_chunks_that_differ(table, found)} of its {len(table) // DIGEST_BYTES} chunks are damaged"
    return Finding(fault=Fault.DAMAGED, file=file, sentence=sentence)


def _table_of(data_file: str) -> str:
    return f"{TABLES}/{data_file.rpartition('/')[2]}"


def _chunks_that_differ(table: bytes, found: bytes) -> int:
    starts = range(0, max(len(table), len(found)), DIGEST_BYTES)
    return sum(table[at : at + DIGEST_BYTES] != found[at : at + DIGEST_BYTES] for at in starts)


def _unknown_files(layout: Layout) -> Iterator[Finding]:
    """What lies beside the store's own directories and files."""
    ours = {path.relative_to(layout.root).parts[0] for path in layout.directories()}
    ours |= {path.name for path in (layout.staging, layout.damaged, layout.unreferenced, layout.snapshots)}
    ours |= {path.name for path in (layout.lock, layout.keeping_lock)} | set(HINTS)
    above = [layout.root, *(layout.content(kind).parent for kind in CONTENT)]
    for directory in above:
        known = ours if directory == layout.root else {"sha256"}
        for path in sorted(directory.iterdir()):
            if path.name not in known and not path.name.startswith(".nfs"):
                file = str(path.relative_to(layout.root))
                yield Finding(fault=Fault.UNKNOWN, file=file, sentence="nothing of a store has such a name")


def _repaired(store: ImageStore, finding: Finding) -> Finding:
    """The finding with what was done about it."""
    is_table = finding.file.startswith(f"{TABLES}/")
    if is_table and finding.fault in (Fault.DAMAGED, Fault.MISSING):
        return replace(finding, repair=_rebuild_table(store, finding))
    if finding.fault is Fault.DAMAGED:
        with locked(store.layout.lock):
            if finding.file.startswith("tags/") and not _is_damaged_tag(store.layout.root / finding.file):
                return replace(finding, repair=Repair.REBUILT)  # somebody else has given the name a meaning
            _set_aside(store.layout, finding.file)
        return replace(finding, repair=Repair.SET_ASIDE)
    return finding


def _is_damaged_tag(file: Path) -> bool:
    try:
        decode_tag(file.read_bytes(), name=name_of_tag_file(file.name))
    except ImageInvalidError:
        return True
    except FileNotFoundError:
        return False
    return False


def _rebuild_table(store: ImageStore, finding: Finding) -> Repair:
    """Write a table anew from data that has the digest it stands for; otherwise only a damaged one is set aside."""
    digest = digest_of_file(finding.file)
    data = store.data_path(digest)
    table = make_table(data) if data.exists() else b""
    good = data.exists() and table_digest(table) == digest
    with store.staging() as work:
        write_synced(work / "table", table)
        with locked(store.layout.lock):
            if finding.fault is Fault.DAMAGED:
                _set_aside(store.layout, finding.file)
            if good:
                link_into(work / "table", store.layout.content(finding.file))
                sync_directory(store.layout.content(TABLES))
    if good:
        return Repair.REBUILT
    return Repair.SET_ASIDE if finding.fault is Fault.DAMAGED else Repair.NONE


def _set_aside(layout: Layout, file: str) -> None:
    """Under a name nobody has, so that nothing set aside before is lost. The lock is held."""
    layout.damaged.mkdir(mode=0o700, exist_ok=True)
    source = layout.content(file)
    source.rename(layout.damaged / f"{file.replace('/', '+')}.{secrets.token_hex(4)}")
    sync_directory(layout.damaged)
    sync_directory(source.parent)
