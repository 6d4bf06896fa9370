"""Make a layer of what a sandbox has written: walk its writable layer once, decide what stays, write it.

What is packed is the upper directory of an overlay as it is: whiteouts, opaque directories, links, devices, owners,
attributes. What the patterns match (`opendsec.store.scrub`) is left out, with these exceptions, because leaving it out
would show something that the sandbox had deleted:

* a whiteout stays, wherever it is, and so do the directories above it;
* a directory that hides one below it stays, empty.

A path that is left out shows the source image's older version again, if there is one: the selection names it. A
directory that is emptied so, and is as the one below it, is left out too. When nothing but directories as they are
below remains, there is nothing to pack.

It refuses a tree with what an overlay of ours never makes (redirects, metadata copies), a path too long to take, and
more content than any disk limit allows: sparse files are read as they are long.
"""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.model.image import Image, Layer, LayerRole
from opendsec.store.below import Below
from opendsec.store.erofs import NAME_BYTES, TreeFacts, is_moved
from opendsec.store.exclusion import Exclusion, exclude
from opendsec.store.following import can_follow
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.layers import make_layer
from opendsec.store.marks import ELSEWHERE, OPAQUE, attributes, is_whiteout
from opendsec.store.merge import merged
from opendsec.store.mounts import open_erofs
from opendsec.store.progress import OnProgress, quietly
from opendsec.store.scrub import LOOK_INTO_BYTES, Scrub, Verdict, homes_of

FIRST_PATHS = 100
"""Of paths left out, so many are named."""
MAX_CONTENT_BYTES = 256 << 30
"""Of all regular files; reading more would keep a sandbox still for longer than anybody waits."""
MAX_ENTRIES = 2_000_000
"""Of the writable layer; a node keeps about 850 bytes of each while it decides."""
_PASSWD_BYTES = 1 << 20


@dataclass(slots=True)
class Entry:
    """One entry of the writable layer."""

    path: str
    """As inside, from `/`."""
    status: os.stat_result
    parent: int
    """Index of its directory in the list; -1 for the root."""
    kept: bool
    """A pattern of `keep` names it or a directory above it."""
    matched: bool
    """The patterns leave it out, or a directory above it."""
    opaque: bool
    stays: bool = True

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What goes into a layer, and what does not."""

    facts: TreeFacts
    changed: bool
    """Whether anything stays that is not as it is below."""
    files: int
    """Entries that stay."""
    exclusion: Exclusion
    left_out: int
    """Entries the patterns kept out."""
    left_out_paths: tuple[str, ...]
    """The first of them; a directory stands for all below it."""
    fell_back: int
    fell_back_paths: tuple[str, ...]
    """Paths that show an older version again."""


def homes_in(tree: Path, below: Below, *, more: Sequence[str] = ()) -> tuple[str, ...]:
    """What `~` stands for in patterns, by the sandbox's own /etc/passwd, and `more` (values of HOME); each as it is
    named, and where it lies if a link leads there."""
    directory = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # a link the sandbox put at /etc must not lead to this host's
        shown = below.under(directory)
        content = shown.read(shown.real("/etc/passwd") or "/", most=_PASSWD_BYTES)
        named = homes_of(content.decode("utf-8", "surrogateescape"))
        homes = dict.fromkeys((*named, *(posixpath.normpath(home) for home in more if home.startswith("/"))))
        homes.update(dict.fromkeys([shown.real(home) for home in homes]))
    finally:
        os.close(directory)
    return tuple(home for home in homes if home.strip("/"))


def select(tree: Path, scrub: Scrub, below: Below, *, on_look: Callable[[], None] = lambda: None) -> Selection:
    """Walk the tree and decide. Nothing may change it meanwhile.

    `on_look` is called before each directory; what it raises ends the walk.
    Raises ImageInvalidError naming the entry, InvalidSpecError when more is left out one by one than can be, OSError.
    """
    with _long_paths_named(str(tree)):
        entries = _walk(tree, scrub, on_look)
    _settle(entries, str(tree), below)
    told = sorted(one.path for one in entries if one.matched and not one.stays and _is_first(one, entries))
    back = [path for path in told if below.find(path) is not None]
    return Selection(
        facts=_facts(tree, entries),
        changed=any(one.stays and not _is_as_below(one, str(tree), below) for one in entries),
        files=sum(one.stays for one in entries),
        exclusion=exclude(
            [one.path[1:] for one in entries if not one.stays and (one.parent < 0 or entries[one.parent].stays)],
            [one.path[1:] for one in entries if one.stays],
        ),
        left_out=sum(one.matched and not one.stays for one in entries),
        left_out_paths=tuple(told[:FIRST_PATHS]),
        fell_back=len(back),
        fell_back_paths=tuple(back[:FIRST_PATHS]),
    )


def pack_layer(
    store: ImageStore,
    work: Path,
    tree: Path,
    selection: Selection,
    *,
    role: LayerRole,
    on_progress: OnProgress = quietly,
    on_read: Callable[[], None],
) -> StagedLayer:
    """The selected part of the tree as a staged layer in `work`; see `make_layer`, whose errors it raises.

    The tree stands still until `on_read` is called. So a layer for a store on another machine is written on this one
    first, and brought there afterwards.
    """
    with ExitStack() as stack:
        place = work if can_follow(work) else stack.enter_context(store.scratch())
        layer = make_layer(
            store,
            place,
            tree,
            role=role,
            facts=selection.facts,
            leave_out=selection.exclusion.paths,
            leave_out_regexes=selection.exclusion.regexes,
            on_progress=on_progress,
            on_read=on_read,
        )
        return layer if place is work else brought(store, work, layer)


def brought(store: ImageStore, work: Path, layer: StagedLayer) -> StagedLayer:
    """The same layer in `work`; what has arrived there is hashed anew. DigestMismatchError when it is another."""
    shutil.copyfile(layer.meta, work / layer.meta.name)
    data = None if layer.data is None else Path(shutil.copyfile(layer.data, work / layer.data.name))
    arrived = store.stage_layer(work / layer.meta.name, data, role=layer.layer.role)
    if arrived.layer != layer.layer:
        raise DigestMismatchError(
            f"layer {layer.layer.digest} did not arrive in the store as it was made",
            detail={"layer": layer.layer.digest},
            remedy="try again; if it stays so, check the store's file system",
        )
    return arrived


def on_top(
    store: ImageStore,
    work: Path,
    image: Image,
    below: Sequence[int],
    layer: StagedLayer,
    *,
    on_progress: OnProgress = quietly,
) -> list[Layer | StagedLayer]:
    """The layers of an image with a new one on top, merged when the chain has become long (`opendsec.store.merge`).

    `below`: descriptors of the image's own layers, topmost first. Raises what `merged` does.
    """
    places = dict(zip((one.digest for one in reversed(image.layers)), below, strict=True))

    def open_layer(one: Layer | StagedLayer) -> int:
        if isinstance(one, StagedLayer):
            return open_erofs(one.meta.resolve(), data=one.data.resolve() if one.data is not None else None)
        return os.dup(places[one.digest])

    return merged(store, work, [*image.layers, layer], open_layer, on_progress=on_progress)


def _walk(tree: Path, scrub: Scrub, on_look: Callable[[], None]) -> list[Entry]:
    """Everything below the tree, a directory before what is in it."""
    root = str(tree)
    entries: list[Entry] = []
    todo = [(root, -1)]
    while todo:
        directory, parent = todo.pop()
        on_look()
        for found in _listed(directory):
            path = found.path[len(root) :]
            status = found.stat(follow_symlinks=False)
            entry = Entry(path, status, parent, kept=False, matched=False, opaque=False)
            _check(found, path, entry)
            _judge(entry, entries[parent] if parent >= 0 else None, found.path, scrub)
            if entry.is_directory:
                todo.append((found.path, len(entries)))
            entries.append(entry)
        if len(entries) > MAX_ENTRIES:
            raise ImageInvalidError(
                f"it has more than {MAX_ENTRIES} entries: those are too many to be packed",
                detail={"entry": entries[-1].path},
                remedy="remove some, or keep them in one archive",
            )
    return entries


def _listed(directory: str) -> list[os.DirEntry[str]]:
    """In one order whatever the file system says, so that the same tree gives the same bytes and the same words."""
    with os.scandir(directory) as found:
        return sorted(found, key=lambda one: one.name)


@contextmanager
def _long_paths_named(root: str) -> Iterator[None]:
    """The way to the writable layer is longer than the way inside, and paths have to fit into PATH_MAX (4096 bytes)."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG or not isinstance(error.filename, str):
            raise
        path = error.filename[len(root) :]
        raise ImageInvalidError(
            f"entry {path[:200]!r}…: a path of {len(os.fsencode(path))} bytes is too long to be packed",
            detail={"entry": path[:200]},
            remedy="remove it, or shorten its names",
        ) from error


def _check(found: os.DirEntry[str], path: str, entry: Entry) -> None:
    """Refuse what cannot be packed; notice an opaque directory, since its attributes are at hand."""
    if len(os.fsencode(found.name)) > NAME_BYTES:
        raise ImageInvalidError(f"entry {path!r}: its name has 255 bytes, a layer takes 254", detail={"entry": path})
    if is_moved(entry.status.st_mtime_ns):
        raise ImageInvalidError(
            f"entry {path!r}: its time is in the last two seconds before 1970",
            detail={"entry": path},
            remedy="touch it",
        )
    for name in os.listxattr(found.path, follow_symlinks=False):
        if name in ELSEWHERE:
            raise ImageInvalidError(
                f"entry {path!r} has the attribute {name}: the overlay refers to another path",
                detail={"entry": path},
                remedy="mount the overlay without redirect_dir and metacopy",
            )
        if name == OPAQUE and entry.is_directory:
            entry.opaque = os.getxattr(found.path, name, follow_symlinks=False) == b"y"


def _judge(entry: Entry, above: Entry | None, place: str, scrub: Scrub) -> None:
    """What the patterns say of one entry."""
    entry.kept = (above is not None and above.kept) or scrub.keeps(entry.path)
    if entry.kept:
        return
    if above is not None and above.matched:
        entry.matched = True
        return
    verdict = scrub.verdict(entry.path)
    if verdict is Verdict.LOOK:
        entry.matched = _is_small_file(entry.status) and scrub.holds_secret(entry.path, Path(place).read_bytes())
    else:
        entry.matched = verdict is Verdict.LEAVE_OUT


def _is_small_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= LOOK_INTO_BYTES


def _settle(entries: list[Entry], root: str, below: Below) -> None:
    """Decide what stays, from the leaves up."""
    holds_something = [False] * len(entries)
    emptied = [False] * len(entries)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if not entry.is_directory:
            entry.stays = not entry.matched or is_whiteout(entry.status)
        elif not holds_something[index]:
            if entry.matched:
                entry.stays = entry.opaque and below.find(entry.path) is not None
            else:
                entry.stays = not (emptied[index] and _is_as_below(entry, root, below))
        if entry.parent >= 0:
            (holds_something if entry.stays else emptied)[entry.parent] = True


def _is_as_below(entry: Entry, root: str, below: Below) -> bool:
    """Whether it is a directory that shows nothing of its own but its times."""
    if not entry.is_directory:
        return False
    under = below.find(entry.path)
    if under is None or entry.opaque:
        return False
    here = entry.status
    same = (here.st_mode, here.st_uid, here.st_gid) == (under.st_mode, under.st_uid, under.st_gid)
    return same and attributes(f"{root}{entry.path}") == below.attributes(entry.path)


def _is_first(entry: Entry, entries: list[Entry]) -> bool:
    """Whether no directory above it that is left out stands for it."""
    if entry.parent < 0:
        return True
    above = entries[entry.parent]
    return above.stays or not above.matched


def _facts(tree: Path, entries: list[Entry]) -> TreeFacts:
    newest, total = int(os.lstat(tree).st_mtime), 0
    oldest = newest
    for status in _contents(entries):
        total += status.st_size
    for one in entries:
        if one.stays:
            newest = max(newest, int(one.status.st_mtime))
            oldest = min(oldest, one.status.st_mtime_ns // 10**9)
    if total > MAX_CONTENT_BYTES:
        largest = max((one for one in entries if one.stays), key=lambda one: one.status.st_size)
        raise ImageInvalidError(
            f"its files are {total} bytes long, at most {MAX_CONTENT_BYTES} can be packed; see {largest.path!r}",
            detail={"entry": largest.path},
            remedy="remove it, or leave it out",
        )
    return TreeFacts(size_bytes=total, newest_mtime_s=max(0, newest), before_1970=oldest < 0)


def _contents(entries: list[Entry]) -> Iterator[os.stat_result]:
    """The regular files that stay, each once."""
    seen: set[int] = set()
    for one in entries:
        if one.stays and stat.S_ISREG(one.status.st_mode) and one.status.st_ino not in seen:
            if one.status.st_nlink > 1:
                seen.add(one.status.st_ino)
            yield one.status
