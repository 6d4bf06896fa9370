"""The dummy backend's file tree: directories, files and symbolic links in memory.

Paths resolve as in Linux (symlinks stay inside, at most 40 of them). Failures are `OSError` with the kernel's
numbers. Users and permission bits are stored and reported but never checked: everyone is root here.
"""

from __future__ import annotations

import errno
import os
import time
from asyncio import Event
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from opendsec.guest.base import GuestStat

MAX_SYMLINKS = 40
NAME_MAX = 255


@dataclass(slots=True, kw_only=True)
class Node:
    """One inode."""

    kind: str
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)
    data: bytes = b""
    link: str = ""
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.data) if self.kind == "file" else len(self.link.encode("utf-8", "surrogateescape"))


@dataclass(slots=True)
class Watch:
    """Events below one directory, until dropped from `FileTree.watches`."""

    root: str
    recursive: bool
    events: deque[tuple[str, str]] = field(default_factory=deque)
    arrived: Event = field(default_factory=Event)


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


def _parts(path: str) -> list[str]:
    if not path.startswith("/") or "\x00" in path:
        raise _error(errno.EINVAL, path)
    return [part for part in path.split("/") if part not in ("", ".")]


class FileTree:
    """A rooted tree with a limit on the bytes of all files (None: no limit)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.root = Node(kind="directory", mode=0o755)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.watches: list[Watch] = []
        for name in ("/etc", "/root", "/tmp"):  # noqa: S108 a name in memory
            self.mkdir(name, mode=0o755, parents=False)

    def full(self) -> bool:
        """Fewer than 64 KiB are left."""
        return self.limit_bytes is not None and self.limit_bytes - self.used_bytes < 64 * 1024

    def locate(self, path: str, *, follow: bool = True) -> tuple[Node, str, Node | None]:
        """(directory, name, the node or None). The directory must exist; for `/` the name is empty."""
        todo = _parts(path)
        trail = [self.root]
        links = 0
        while todo:
            name = todo.pop(0)
            here = trail[-1]
            if here.kind != "directory":
                raise _error(errno.ENOTDIR, path)
            if len(name.encode("utf-8", "surrogateescape")) > NAME_MAX:
                raise _error(errno.ENAMETOOLONG, path)
            if name == "..":
                trail = trail[:-1] or [self.root]
                continue
            child = here.children.get(name)
            if child is not None and child.kind == "symlink" and (todo or follow):
                links += 1
                if links > MAX_SYMLINKS:
                    raise _error(errno.ELOOP, path)
                trail = [self.root] if child.link.startswith("/") else trail
                todo = [part for part in child.link.split("/") if part not in ("", ".")] + todo
                continue
            if not todo:
                return here, name, child
            if child is None:
                raise _error(errno.ENOENT, path)
            trail.append(child)
        parent = trail[-2] if len(trail) > 1 else self.root
        return parent, "", trail[-1]

    def node(self, path: str, *, follow: bool = True) -> Node:
        """Raises ENOENT."""
        found = self.locate(path, follow=follow)[2]
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def stat(self, path: str, *, follow: bool = False, name: str | None = None) -> GuestStat:
        """Fields of the path itself, never of what a symlink points at unless `follow`."""
        node = self.node(path, follow=follow)
        return self.fields(node, path if name is None else name)

    @staticmethod
    def fields(node: Node, name: str) -> GuestStat:
        return GuestStat(
            path=name,
            kind=node.kind,
            mode=node.mode,
            size=node.size,
            mtime_ns=node.mtime_ns,
            uid=0,
            gid=0,
            link=node.link if node.kind == "symlink" else None,
        )

    def directory(self, path: str) -> Node:
        """Raises ENOTDIR for anything else."""
        node = self.node(path)
        if node.kind != "directory":
            raise _error(errno.ENOTDIR, path)
        return node

    def list(self, path: str) -> list[GuestStat]:
        return [self.fields(node, name) for name, node in sorted(self.directory(path).children.items())]

    def mkdir(self, path: str, *, mode: int, parents: bool) -> None:
        if parents:
            prefix = ""
            for part in _parts(path)[:-1]:
                prefix += f"/{part}"
                if self.locate(prefix)[2] is None:
                    self.mkdir(prefix, mode=0o755, parents=False)
        parent, name, found = self.locate(path, follow=parents)
        if found is not None:
            if parents and found.kind == "directory":
                return
            raise _error(errno.EEXIST, path)
        self._put(parent, name, Node(kind="directory", mode=mode), path)

    def write(self, path: str, data: bytes, *, mode: int | None, parents: bool) -> Node:
        """Replace the file as a whole."""
        if parents:
            head = path.rstrip("/").rpartition("/")[0]
            if head:
                self.mkdir(head, mode=0o755, parents=True)
        parent, name, old = self.locate(path)
        if old is not None and old.kind != "file":
            raise _error(errno.EISDIR, path)
        before = len(old.data) if old else 0
        if self.limit_bytes is not None and self.used_bytes - before + len(data) > self.limit_bytes:
            raise _error(errno.ENOSPC, path)
        self.used_bytes += len(data) - before
        keep = old.mode if old else 0o644
        node = Node(kind="file", mode=keep if mode is None else mode, data=data)
        self._put(parent, name, node, path, event="created" if old is None else "modified")
        return node

    def symlink(self, path: str, target: str) -> None:
        parent, name, old = self.locate(path, follow=False)
        if old is not None and old.kind == "directory":
            raise _error(errno.EEXIST, path)
        self._put(parent, name, Node(kind="symlink", mode=0o777, link=target), path)

    def move(self, path: str, target: str, *, overwrite: bool) -> None:
        parent, name, node = self.locate(path, follow=False)
        new_parent, new_name, old = self.locate(target, follow=False)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not name or not new_name or self._holds(node, new_parent):
            raise _error(errno.EINVAL, path)
        if old is node and overwrite:
            return
        if old is not None:
            self._check_replace(node, old, target, overwrite=overwrite)
            self.used_bytes -= len(old.data)
        del parent.children[name]
        self._note("moved_from", path)
        self._put(new_parent, new_name, node, target, event="moved_to")

    @staticmethod
    def _check_replace(node: Node, old: Node, target: str, *, overwrite: bool) -> None:
        if not overwrite:
            raise _error(errno.EEXIST, target)
        if old.kind == "directory":
            if node.kind != "directory":
                raise _error(errno.EISDIR, target)
            if old.children:
                raise _error(errno.ENOTEMPTY, target)
        elif node.kind == "directory":
            raise _error(errno.ENOTDIR, target)

    @classmethod
    def _holds(cls, node: Node, other: Node) -> bool:
        return node is other or any(cls._holds(child, other) for child in node.children.values())

    def remove(self, path: str, *, recursive: bool) -> None:
        parent, name, node = self.locate(path, follow=False)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not name:
            raise _error(errno.EBUSY, path)
        if node.children and not recursive:
            raise _error(errno.ENOTEMPTY, path)
        self.used_bytes -= sum(len(below.data) for _, below in self.walk(node)) + len(node.data)
        del parent.children[name]
        self._note("removed", path)

    def walk(self, node: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Everything below, parents first, with relative names."""
        for name, child in sorted(node.children.items()):
            yield prefix + name, child
            yield from self.walk(child, f"{prefix}{name}/")

    def _put(self, parent: Node, name: str, node: Node, path: str, *, event: str = "created") -> None:
        if not name:
            raise _error(errno.EEXIST, path)
        if parent.kind != "directory":
            raise _error(errno.ENOTDIR, path)
        parent.children[name] = node
        parent.mtime_ns = time.time_ns()
        self._note(event, path)

    def _note(self, event: str, path: str) -> None:
        head = path.rstrip("/").rpartition("/")[0] or "/"
        for watch in self.watches:
            inside = head == watch.root or (watch.recursive and head.startswith(watch.root.rstrip("/") + "/"))
            if inside:
                watch.events.append((event, path))
                watch.arrived.set()
