"""What differs between two composed trees, path by path, exactly: kinds, bytes, modes, owners, attributes, times.

Both are walked side by side. What is made of the same files of the same layers is the same and is passed over with all
below it, so trees on one base are compared at the cost of what lies above it, and no data of the base is read. Files
from different layers are the same only if their bytes are: those are read, of files of one size.

Hard links are not compared, nor sizes of directories.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from opendsec.model.file import FileKind
from opendsec.model.image_view import Change, Difference, TreeEntry
from opendsec.store.tree_view import ComposedTree, Node

_PIECE_BYTES = 1 << 20


def differences(before: ComposedTree, after: ComposedTree, *, times: bool = True) -> Iterator[Difference]:
    """Every path that is not the same in both, in the order of the walk: directories before what is in them, names by
    their bytes. Of what was added or removed, all below it too. Without `times`, other times alone are no difference.
    """
    todo: list[tuple[Node | None, Node | None]] = [(before.root(), after.root())]
    while todo:
        old, new = todo.pop()
        if old is not None and new is not None and old.same_as(new):
            continue
        found = _compared(before, old, after, new, times=times)
        if found is not None:
            yield found
        todo.extend(reversed(_below(before, old, after, new)))


def _below(
    before: ComposedTree, old: Node | None, after: ComposedTree, new: Node | None
) -> list[tuple[Node | None, Node | None]]:
    """Pairs of what is in either directory under one name."""
    left = {node.path: node for node in before.children(old)} if old is not None and old.is_directory else {}
    right = {node.path: node for node in after.children(new)} if new is not None and new.is_directory else {}
    return [(left.get(path), right.get(path)) for path in sorted(left.keys() | right.keys())]


def _compared(
    before: ComposedTree, old: Node | None, after: ComposedTree, new: Node | None, *, times: bool
) -> Difference | None:
    was = before.entry(old) if old is not None else None
    now = after.entry(new) if new is not None else None
    if was is None or now is None:
        one = was or now
        assert one is not None
        return Difference(change=Change.ADDED if was is None else Change.REMOVED, path=one.path, before=was, after=now)
    what = _what(was, now, times=times)
    if was.kind is now.kind is FileKind.FILE and was.size_bytes == now.size_bytes and old and new:
        what += () if _same_bytes(before, old, after, new) else ("content",)
    return Difference(change=Change.CHANGED, path=was.path, what=what, before=was, after=now) if what else None


def _what(was: TreeEntry, now: TreeEntry, *, times: bool) -> tuple[str, ...]:
    """Which of its facts differ, but for the bytes of files of one size."""
    different = (
        ("kind", was.kind is not now.kind),
        ("mode", was.mode != now.mode),
        ("owner", (was.uid, was.gid) != (now.uid, now.gid)),
        ("size", was.size_bytes != now.size_bytes),
        ("content", was.kind is now.kind and was.size_bytes != now.size_bytes),
        ("target", was.target != now.target),
        ("device", was.device != now.device),
        ("xattrs", was.xattrs != now.xattrs),
        ("mtime", times and was.mtime_ns != now.mtime_ns),
    )
    return tuple(name for name, differs in different if differs)


def _same_bytes(before: ComposedTree, old: Node, after: ComposedTree, new: Node) -> bool:
    with os.fdopen(before.open_file(old), "rb", 0) as left, os.fdopen(after.open_file(new), "rb", 0) as right:
        while True:
            piece = _read(left.fileno())
            if piece != _read(right.fileno()):
                return False
            if not piece:
                return True


def _read(fd: int) -> bytes:
    """A full piece, or what is left: two files of one content may answer in different portions."""
    piece = b""
    while len(piece) < _PIECE_BYTES and (more := os.read(fd, _PIECE_BYTES - len(piece))):
        piece += more
    return piece
