"""A directory, or an archive of files, as one layer.

Alone, the tree is packed as it is. Put on a base, or meant as a workspace or toolkit, it will lie on other layers, so
two things are minded: its root would hide the attributes of theirs and gets those of the base (root's, mode 0755, time
0 without one), and a directory of it where the base has a symbolic link (`lib` → `usr/lib`) would hide all behind the
link: an archive is therefore unpacked through the base's links, and such a directory tree is refused by name.

Refused too: character devices 0:0 and attributes of overlayfs, which would act instead of being there. A plain
archive has no lower layers, so names in it that look like whiteouts are files like any other.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from opendsec.errors import ImageInvalidError
from opendsec.model.image import LayerRole
from opendsec.store.images import StagedLayer
from opendsec.store.importers.background import Background, with_mounted
from opendsec.store.importers.convert import Work, add_below
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.stack import Stack
from opendsec.store.importers.tar import opened_archive, position
from opendsec.store.importers.unpack import OVERLAY_XATTRS, TreeWriter
from opendsec.store.layers import make_layer
from opendsec.store.progress import OnProgress, Progress
from opendsec.store.walk import walked


def unpack_tar(path: Path, tree: Path, *, limits: Limits, on_progress: OnProgress) -> None:
    """Unpack an archive of files to a directory, which may be there and be an overlay."""
    writer = TreeWriter(tree, limits=limits, whiteouts=False)
    total = path.stat().st_size
    with (
        path.open("rb") as file,
        opened_archive(file, label=path.name, limits=limits) as archive,
        writer.layer(path.name),
    ):
        for member in archive.entries():
            writer.apply(archive, member)
            on_progress(Progress(phase="unpacking", done=position(file), total=total, detail=member.name))


def layer_of_archive(work: Work, path: Path, unpacked: Path | None, *, role: LayerRole) -> StagedLayer:
    """The archive as a layer on `work.below`. `unpacked`: a tree it was unpacked to without looking at that."""
    if not work.below.layers:
        tree = unpacked or work.trees / "tree"
        if unpacked is None:
            unpack_tar(path, tree, limits=work.limits, on_progress=work.on_progress)
        return make_layer(work.store, work.directory, tree, role=role, on_progress=work.on_progress)
    with Stack(work.trees) as stack:
        add_below(work, stack)
        with stack.group("tree") as (shown, upper):
            unpack_tar(path, shown, limits=work.limits, on_progress=work.on_progress)
    return make_layer(work.store, work.directory, upper, role=role, on_progress=work.on_progress)


def layer_of_directory(work: Work, tree: Path, *, role: LayerRole) -> StagedLayer:
    """The directory as a layer on `work.below`; nothing in it is changed, and it must not change meanwhile."""
    if not work.below.layers and role is LayerRole.BASE:
        return make_layer(work.store, work.directory, tree, role=role, on_progress=work.on_progress)
    with Stack(work.trees) as stack, Stack(work.trees) as rooted:
        add_below(work, stack)
        with stack.shown() as below:
            if below is not None:
                _check_links(os.fsencode(tree), os.fsencode(below))
            rooted.add_tree(tree)
            with rooted.with_root_of(below) as mounted, Background() as background:
                return _packed(work, mounted, role, background)


def _packed(work: Work, mounted: int, role: LayerRole, background: Background) -> StagedLayer:
    """A layer of a detached mount: mkfs.erofs wants a path, and the path is nobody else's business."""
    place = work.trees / "shown"
    place.mkdir(mode=0o700)

    def tell(step: Progress) -> None:
        background.tell("pack", step.done, step.total)

    call = partial(make_layer, work.store, work.directory, place, role=role, on_progress=tell)
    task = background.submit("pack", partial(with_mounted, mounted, place, call))
    return background.finish([task], "writing the layer", work.on_progress)[0]


def check_tree(tree: Path) -> None:
    """ImageInvalidError for what overlayfs would take for its own."""
    for path in _walk(os.fsencode(tree)):
        status = os.lstat(path)
        why = ""
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            why = "the character device 0:0 would be a whiteout of overlayfs"
        for name in _attributes(path):
            if os.fsencode(name).startswith(OVERLAY_XATTRS):
                why = f"the attribute {name} is reserved for overlay file systems"
        if why:
            entry = os.fsdecode(os.path.relpath(path, os.fsencode(tree)))
            raise ImageInvalidError(f"entry {entry!r}: {why}", detail={"entry": entry})


def _attributes(path: bytes) -> list[str]:
    """Names; a file system that has none has none of these either."""
    try:
        return os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []
        raise


def _check_links(tree: bytes, below: bytes) -> None:
    """Refuse a directory in the place of a symbolic link of the base."""
    start = len(tree) + 1
    for top, names, _ in walked(tree):
        for name in names:
            path = (top + b"/" + name)[start:]
            if _is_link(below + b"/" + path):
                entry = os.fsdecode(path)
                raise ImageInvalidError(
                    f"entry {entry!r}: a directory, where the base has a symbolic link that it would hide",
                    detail={"entry": entry},
                    remedy="move its files to where the link leads, or import an archive of it: "
                    "tar --xattrs --xattrs-include='*' -C DIR -cf FILE .",
                )


def _is_link(path: bytes) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _walk(tree: bytes) -> Iterator[bytes]:
    yield tree
    for top, below, names in walked(tree):
        for name in (*below, *names):
            yield top + b"/" + name
