"""Make one layer of several that lie on each other, offline, so that a chain of packed layers never grows too long.

The result shows what the group showed: the rules are overlayfs' own. A whiteout or an opaque directory is kept where
something may lie below the group, and goes where nothing can. A directory that comes after a whiteout, or after a file,
is opaque: it hid what the group's lower layers could not reach either. Hard links stay links within the layer they come
from, as overlayfs shows them.

Layers are read through descriptors of mounts that are attached nowhere; trees are written to the store's scratch place.
Only layers of one role become one, for the others are shared and replaced by themselves. It refuses layers with
attributes of overlays that say something else (redirects, metadata without content), by name.
"""

# Paths are bytes here, because names of files need not be text.
# ruff: noqa: PTH101, PTH102, PTH115, PTH123, PTH211

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import pairwise
from pathlib import Path

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import Image, Layer, LayerRole
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.layers import make_layer
from opendsec.store.loading.base import Loader
from opendsec.store.marks import ELSEWHERE, OPAQUE, WHITEOUT, attributes, is_whiteout
from opendsec.store.mounts import open_erofs
from opendsec.store.progress import OnProgress, Progress, quietly

MOST = 32
"""More layers of one image than this are merged: each costs every start a descriptor and every lookup a directory."""
AIM = 16
"""How many are left then: the next ones are packed without merging again."""

_STRANGE = frozenset({*ELSEWHERE, WHITEOUT})
_PIECE_BYTES = 1 << 24

OpenLayer = Callable[[Layer | StagedLayer], int]
"""A descriptor of a layer's root directory, which the caller closes."""


# Which layers


def groups(layers: Sequence[Layer], *, most: int = MOST, aim: int = AIM) -> list[range]:
    """Positions that become one layer each. Nothing is merged up to `most`; then down to `aim` where roles allow it.

    Neighbours that are smallest together go first, so large layers, which many images share, stay as they are. Pure.
    """
    found = [range(at, at + 1) for at in range(len(layers))]
    if len(layers) <= most:
        return found
    sizes = [layer.size_bytes for layer in layers]
    while len(found) > aim:
        near = [
            (sum(sizes[left.start : right.stop]), number)
            for number, (left, right) in enumerate(pairwise(found))
            if layers[left.start].role is layers[right.start].role
        ]
        if not near:
            break
        number = min(near)[1]
        found[number : number + 2] = [range(found[number].start, found[number + 1].stop)]
    return found


# What they show together


class Kind(Enum):
    """As far as merging is concerned."""

    DIRECTORY = "directory"
    WHITEOUT = "whiteout"
    OTHER = "other"


@dataclass(slots=True)
class Entry:
    """One name, and the layer it comes from: of a merged directory, the topmost."""

    layer: int
    path: bytes
    """Relative to the root; b"" is the root."""
    kind: Kind
    opaque: bool = False
    children: dict[bytes, Entry] = field(default_factory=dict)


def lay_over(low: Entry, high: Entry) -> Entry:
    """What two directories show, the second on the first. Both are used up. Pure."""
    left = [(low, high)]
    while left:
        below, above = left.pop()
        below.layer, below.path = above.layer, above.path
        if above.opaque:
            below.opaque, below.children = True, {}
        for name, entry in above.children.items():
            present = below.children.get(name)
            if entry.kind is Kind.DIRECTORY and present is not None and not entry.opaque:
                if present.kind is Kind.DIRECTORY:
                    left.append((present, entry))
                    continue
                entry.opaque = True
            below.children[name] = entry
    return low


def prune(root: Entry, *, hides: bool) -> Entry:
    """Without whiteouts and opaque marks that have nothing to hide; `hides`: something may lie below. Pure."""
    left = [(root, hides)]
    while left:
        entry, may_hide = left.pop()
        entry.opaque = entry.opaque and may_hide
        may_hide = may_hide and not entry.opaque
        if not may_hide:
            entry.children = {name: child for name, child in entry.children.items() if child.kind is not Kind.WHITEOUT}
        left += [(child, may_hide) for child in entry.children.values() if child.kind is Kind.DIRECTORY]
    return root


# Doing it


def opened_by(loader: Loader) -> OpenLayer:
    """Read layers of the store as this loader gives them, and new ones from where they were made."""

    def open_layer(one: Layer | StagedLayer) -> int:
        if isinstance(one, StagedLayer):
            return open_erofs(one.meta.resolve(), data=one.data.resolve() if one.data is not None else None)
        files = loader.attach(one)
        return open_erofs(files.meta, data=files.data)

    return open_layer


def merged(
    store: ImageStore,
    work: Path,
    layers: Sequence[Layer | StagedLayer],
    open_layer: OpenLayer,
    *,
    on_base: bool = False,
    most: int = MOST,
    aim: int = AIM,
    on_progress: OnProgress = quietly,
) -> list[Layer | StagedLayer]:
    """The layers to publish instead of these, lowest first; the same ones when they are few enough.

    `work` is a staging directory of the store, which gets the new files; `on_base`: other images lie below. Raises
    ImageInvalidError (by layer and entry), DiskFullError, HostCapabilityError, and what the loader raises.
    """
    values = [one.layer if isinstance(one, StagedLayer) else one for one in layers]
    plan = groups(values, most=most, aim=aim)
    result: list[Layer | StagedLayer] = []
    for number, group in enumerate(plan):
        step = Progress(phase="merging layers", done=number, total=len(plan))
        on_progress(step)
        if len(group) == 1:
            result.append(layers[group.start])
            continue
        role = values[group.start].role
        hides = on_base or group.start > 0 or role is not LayerRole.BASE
        chosen = [layers[at] for at in group]
        result.append(
            _merge(
                store,
                work,
                chosen,
                open_layer,
                name=f"merged-{number}",
                hides=hides,
                on_look=partial(on_progress, step),
                on_progress=on_progress,
            )
        )
    return result


def settle(
    store: ImageStore, name: str, open_layer: OpenLayer, *, most: int = MOST, on_progress: OnProgress = quietly
) -> Image:
    """Let a name mean the same tree in fewer layers, if it has more of its own than `most`; what it means then.

    Raises as `merged` and `ImageStore.publish` do; InvalidSpecError for a disk; ConflictError when the name was given
    another meaning meanwhile.
    """
    image = store.get(name)
    if len(image.layers) <= most:
        return image
    if any(layer.role is LayerRole.DISK for layer in image.layers):
        raise InvalidSpecError(
            f"image: {name!r} is a whole disk, whose chain is merged when a sandbox of it is packed",
            detail={"field": "image", "image": name},
        )
    with store.staging() as work:
        layers = merged(
            store,
            work,
            image.layers,
            open_layer,
            on_base=bool(image.base),
            most=most,
            aim=min(AIM, most),
            on_progress=on_progress,
        )
        return store.publish(
            name,
            layers=layers,
            config=image.config,
            base=image.base,
            toolkits=image.toolkits,
            source=image.source,
            instead_of=image.digest,
        )


def _merge(
    store: ImageStore,
    work: Path,
    layers: Sequence[Layer | StagedLayer],
    open_layer: OpenLayer,
    *,
    name: str,
    hides: bool,
    on_look: Callable[[], None],
    on_progress: OnProgress,
) -> StagedLayer:
    """`on_look` is called for each directory that is read and each piece that is copied; what it raises ends it."""
    values = [one.layer if isinstance(one, StagedLayer) else one for one in layers]
    with ExitStack() as stack, store.scratch() as trees:
        fds = [open_layer(one) for one in layers]
        for fd in fds:
            stack.callback(os.close, fd)
        roots = [b"/proc/self/fd/%d" % fd for fd in fds]
        whole = _read(roots[0], 0, values[0], on_look)
        for number, root in enumerate(roots[1:], 1):
            whole = lay_over(whole, _read(root, number, values[number], on_look))
        tree = trees / "tree"
        _Writer(roots, os.fsencode(tree), on_look).write(prune(whole, hides=hides))
        return make_layer(store, work, tree, name=name, role=values[0].role, on_progress=on_progress)


def _read(root: bytes, number: int, layer: Layer, on_look: Callable[[], None]) -> Entry:
    """The whole tree of one layer."""
    top = Entry(layer=number, path=b"", kind=Kind.DIRECTORY, opaque=_is_opaque(root + b"/.", layer))
    left = [top]
    while left:
        directory = left.pop()
        on_look()
        try:
            with os.scandir(root + b"/" + directory.path) as found:
                for one in found:
                    path = directory.path + b"/" + one.name if directory.path else one.name
                    entry = Entry(layer=number, path=path, kind=_kind(one))
                    if entry.kind is Kind.DIRECTORY:
                        entry.opaque = _is_opaque(one.path, layer)
                        left.append(entry)
                    directory.children[one.name] = entry
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise _invalid(layer, directory.path, "its path is too long to be read") from error
    return top


def _kind(entry: os.DirEntry[bytes]) -> Kind:
    if entry.is_dir(follow_symlinks=False):
        return Kind.DIRECTORY
    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return Kind.OTHER
    return Kind.WHITEOUT if is_whiteout(entry.stat(follow_symlinks=False)) else Kind.OTHER


def _is_opaque(path: bytes, layer: Layer) -> bool:
    names = set(os.listxattr(path, follow_symlinks=False))
    strange = sorted(names & _STRANGE)
    if strange:
        raise _invalid(layer, path, f"the attribute {strange[0]} cannot be merged")
    if OPAQUE not in names:
        return False
    value = os.getxattr(path, OPAQUE, follow_symlinks=False)
    if value != b"y":
        raise _invalid(layer, path, f"the attribute {OPAQUE} is {value!r}")
    return True


def _invalid(layer: Layer, path: bytes, why: str) -> ImageInvalidError:
    entry = os.fsdecode(path)[-200:]
    return ImageInvalidError(
        f"layer {layer.digest}: entry {entry!r}: {why}", detail={"layer": layer.digest, "entry": entry}
    )


class _Writer:
    """Writes a merged tree, with everything a layer keeps."""

    def __init__(self, roots: Sequence[bytes], target: bytes, on_look: Callable[[], None]) -> None:
        self._roots = roots
        self._target = target
        self._on_look = on_look
        self._links: dict[tuple[int, int], bytes] = {}

    def write(self, root: Entry) -> None:
        directories = list(self._create(root))
        for entry, path in reversed(directories):  # last: new names change times, and inherit default ACLs
            self._attributes(entry, path, os.lstat(self._source(entry)))

    def _create(self, root: Entry) -> Iterator[tuple[Entry, bytes]]:
        """Make everything, parents first; yields the directories."""
        left = [(root, self._target)]
        while left:
            entry, path = left.pop()
            self._on_look()
            os.mkdir(path, 0o700)
            yield entry, path
            for name, child in sorted(entry.children.items()):
                below = path + b"/" + name
                if child.kind is Kind.DIRECTORY:
                    left.append((child, below))
                else:
                    self._file(child, below)

    def _source(self, entry: Entry) -> bytes:
        return self._roots[entry.layer] + b"/" + entry.path if entry.path else self._roots[entry.layer] + b"/."

    def _file(self, entry: Entry, path: bytes) -> None:
        source = self._source(entry)
        status = os.lstat(source)
        identity = (entry.layer, status.st_ino)
        if status.st_nlink > 1 and identity in self._links:
            os.link(self._links[identity], path, follow_symlinks=False)
            return
        if stat.S_ISREG(status.st_mode):
            _copy(source, path, self._on_look)
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), path)
        else:
            os.mknod(path, status.st_mode, status.st_rdev)
        self._attributes(entry, path, status)
        if status.st_nlink > 1:
            self._links[identity] = path

    def _attributes(self, entry: Entry, path: bytes, status: os.stat_result) -> None:
        """Owner first: changing it takes set-id bits and capabilities away."""
        os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(path, stat.S_IMODE(status.st_mode))
        for name, value in attributes(self._source(entry)).items():
            os.setxattr(path, name, value, follow_symlinks=False)
        if entry.opaque:
            os.setxattr(path, OPAQUE, b"y")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _copy(source: bytes, target: bytes, on_piece: Callable[[], None]) -> None:
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        size = os.fstat(reader.fileno()).st_size
        done = 0
        while done < size:
            on_piece()
            count = os.sendfile(writer.fileno(), reader.fileno(), done, min(_PIECE_BYTES, size - done))
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than its size", os.fsdecode(source))
            done += count
