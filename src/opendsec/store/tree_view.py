"""The tree a composition gives a sandbox, read from its layers without starting one and without mounting an overlay.

The rules are overlayfs' own: the highest layer that has a name decides; a character device 0:0 (a whiteout) hides the
name in the layers below; directories of one path are merged down to the first that is opaque or no directory. Read from
the layers themselves, every entry is known by the layer it comes from, so two trees that share layers are compared
without reading what they share (`diff`).

It refuses to follow symbolic links, and nothing else: layers are read-only, so nothing can change under it. Descriptors
are open for one directory at a time, however deep and wide the tree is.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from opendsec.errors import InvalidSpecError, NotFoundError
from opendsec.model.file import FileKind
from opendsec.model.image_view import TreeEntry
from opendsec.store.marks import attributes, is_opaque, is_whiteout

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STEP_BYTES = 2048
"""A path is opened in steps of at most so much: one system call takes less than 4096."""
_KINDS = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.DIRECTORY,
    stat.S_IFLNK: FileKind.SYMLINK,
    stat.S_IFCHR: FileKind.CHAR_DEVICE,
    stat.S_IFBLK: FileKind.BLOCK_DEVICE,
    stat.S_IFIFO: FileKind.FIFO,
    stat.S_IFSOCK: FileKind.SOCKET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTree:
    """One layer, readable below a directory descriptor, which stays the caller's."""

    digest: str
    fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One visible name: where it is, and the layers that make it up."""

    path: bytes
    """Relative to the root, without a slash at either end; b"" is the root."""
    mode: int
    """st_mode of the highest."""
    layers: tuple[LayerTree, ...]
    """Highest first; several only for a merged directory."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def same_as(self, other: Self) -> bool:
        """Made of the very same files of the same layers, with all below: nothing has to be compared."""
        return self.path == other.path and _digests(self) == _digests(other)


def _digests(node: Node) -> list[str]:
    return [layer.digest for layer in node.layers]


class ComposedTree:
    """`layers`: highest first, as `LayerMounts.acquire` gives them."""

    def __init__(self, layers: Sequence[LayerTree]) -> None:
        self._layers = tuple(layers)

    def root(self) -> Node:
        """The top directory."""
        return _merged(b"", self._layers)

    def find(self, path: str) -> Node:
        """What an absolute path names. Raises InvalidSpecError (no path), NotFoundError, also behind a symbolic link,
        with where that leads."""
        if not path.startswith("/") or "\0" in path:
            raise InvalidSpecError(f"path: {path[:80]!r} is not an absolute path", detail={"field": "path"})
        names = [name for name in os.fsencode(path).split(b"/") if name not in (b"", b".")]
        if b".." in names:
            raise InvalidSpecError("path: has `..`, which is not followed here", detail={"field": "path"})
        node = self.root()
        for name in names:
            node = self._child(node, name, path)
        return node

    def children(self, directory: Node) -> list[Node]:
        """The names in a directory, sorted by their bytes."""
        found: dict[bytes, list[LayerTree]] = {}
        modes: dict[bytes, int] = {}
        settled: set[bytes] = set()
        for layer in directory.layers:
            fd = _open_below(layer.fd, directory.path, _DIRECTORY)
            try:
                _add_names(layer, fd, found, modes, settled)
            finally:
                os.close(fd)
        prefix = directory.path + b"/" if directory.path else b""
        return [_merged(prefix + name, found[name], mode=modes[name]) for name in sorted(found)]

    def walk(self, node: Node, *, depth: int | None = None) -> Iterator[Node]:
        """The node and all below it, directories before what is in them. `depth` 0 is the node alone; None: all."""
        todo = [(node, 0)]
        while todo:
            one, level = todo.pop()
            yield one
            if one.is_directory and (depth is None or level < depth):
                todo.extend((child, level + 1) for child in reversed(self.children(one)))

    def entry(self, node: Node) -> TreeEntry:
        """All that is known of a name."""
        top = node.layers[0]
        parent, _, name = node.path.rpartition(b"/")
        fd = _open_below(top.fd, parent, _DIRECTORY)
        try:
            return _entry(node, top, fd, name or b".")
        finally:
            os.close(fd)

    def open_file(self, node: Node) -> int:
        """A descriptor of a regular file, which is the caller's."""
        return _open_below(node.layers[0].fd, node.path, _FILE)

    def _child(self, node: Node, name: bytes, path: str) -> Node:
        if stat.S_ISLNK(node.mode):
            target = self.entry(node).target
            link = "/" + os.fsdecode(node.path)
            raise NotFoundError(
                f"no {path[:200]!r} in the image: {link!r} is a symbolic link to {target!r}",
                detail={"field": "path", "path": path[:200], "link": link, "target": target},
                remedy="ask for the path it leads to",
            )
        found = (
            [one for one in self.children(node) if one.path.rpartition(b"/")[2] == name] if node.is_directory else []
        )
        if not found:
            raise NotFoundError(f"no {path[:200]!r} in the image", detail={"field": "path", "path": path[:200]})
        return found[0]


def _add_names(
    layer: LayerTree, fd: int, found: dict[bytes, list[LayerTree]], modes: dict[bytes, int], settled: set[bytes]
) -> None:
    """Add what one layer has in a directory to what higher ones have. `settled`: names lower layers add nothing to."""
    with os.scandir(fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if name in settled:
                continue
            if entry.is_dir(follow_symlinks=False):
                if name not in modes:
                    modes[name] = entry.stat(follow_symlinks=False).st_mode
                found.setdefault(name, []).append(layer)
                if is_opaque(f"/proc/self/fd/{fd}/{entry.name}"):
                    settled.add(name)
                continue
            settled.add(name)
            if name in found:
                continue  # a directory is above it
            status = entry.stat(follow_symlinks=False)
            if not is_whiteout(status):
                modes[name] = status.st_mode
                found[name] = [layer]


def _merged(path: bytes, layers: Sequence[LayerTree], *, mode: int = stat.S_IFDIR) -> Node:
    return Node(path=path, mode=mode, layers=tuple(layers))


def _open_below(fd: int, path: bytes, flags: int) -> int:
    """openat(2), in steps where the path is long. Symbolic links are not followed."""
    at = os.dup(fd)
    try:
        while len(path) > _STEP_BYTES:
            cut = path.rindex(b"/", 0, _STEP_BYTES)
            following = os.open(path[:cut], _DIRECTORY, dir_fd=at)
            os.close(at)
            at, path = following, path[cut + 1 :]
        return os.open(path or b".", flags, dir_fd=at)
    finally:
        os.close(at)


def _entry(node: Node, layer: LayerTree, parent_fd: int, name: bytes) -> TreeEntry:
    status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    is_device = kind in (FileKind.CHAR_DEVICE, FileKind.BLOCK_DEVICE)
    place = b"/proc/self/fd/%d/%s" % (parent_fd, name)
    return TreeEntry(
        path="/" + os.fsdecode(node.path),
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        size_bytes=status.st_size if kind is FileKind.FILE else 0,
        mtime_ns=status.st_mtime_ns,
        target=os.fsdecode(os.readlink(name, dir_fd=parent_fd)) if kind is FileKind.SYMLINK else "",
        device=(os.major(status.st_rdev), os.minor(status.st_rdev)) if is_device else None,
        xattrs=_xattrs(place),
        layer=layer.digest,
    )


def _xattrs(place: bytes) -> dict[str, str]:
    return {name: base64.b64encode(value).decode("ascii") for name, value in attributes(place).items()}
