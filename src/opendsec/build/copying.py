"""Copy files into a sandbox: from this machine, or from another sandbox. As COPY and ADD do it.

What is to be found out is found out first (where the target is, whose the files are to be), then each source is one
tree stream. It refuses to put a directory where something else is.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from opendsec.build.context import Source
from opendsec.build.items import (
    Changes,
    Item,
    Owner,
    archive_items,
    context_items,
    directory_item,
    inline_item,
    is_archive,
    stream,
)
from opendsec.build.owners import needs_accounts, resolve_owner
from opendsec.build.patterns import has_wildcard, names_matching
from opendsec.build.relay import Relay
from opendsec.build.steps import Copy, MakeDirectory
from opendsec.client._async.sandbox import Sandbox
from opendsec.client.concurrency import async_blocking
from opendsec.client.tree_format import END
from opendsec.errors import FileError, InvalidSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a COPY takes from this machine: found and hashed before it is decided whether to take the step."""

    digest: str = ""
    sources: tuple[Source, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


async def make_directory(sandbox: Sandbox, step: MakeDirectory, where: str) -> None:
    """The directory and what is missing above it, the user's at that place."""
    owner = await _owner(sandbox, step.owner, where) if step.owner else Owner()
    root, missing = await _reachable(sandbox, step.path)
    if missing:
        await _refuse_in_the_way(sandbox, root, missing[0])
    items = _directories(missing, owner or Owner())
    await sandbox.files.write_tree(root, partial(_chunks, items))


async def copy_context(sandbox: Sandbox, step: Copy, inputs: Inputs, where: str) -> None:
    """Files of this machine, and documents in place; of two that have the same name the later one stays."""
    changes = Changes(owner=await _owner(sandbox, step.owner, where), mode=step.mode)
    directories = await async_blocking(_has_directories, inputs, step)
    count = len(inputs.sources) + len(step.inline)
    target = await _Target.of(sandbox, step, count=count, directories=directories, where=where)
    for source in inputs.sources:
        items = await async_blocking(_items_of, source, step, target, changes, inputs)
        await sandbox.files.write_tree(target.root, partial(_chunks, items))
    for one in step.inline:
        items = [*target.parents(changes), inline_item(one.content, target.name_for(one.name), changes)]
        await sandbox.files.write_tree(target.root, partial(_chunks, items))


def _has_directories(inputs: Inputs, step: Copy) -> bool:
    return any(one.is_directory or (step.unpack and is_archive(one.entries[0].where)) for one in inputs.sources)


def _items_of(source: Source, step: Copy, target: _Target, changes: Changes, inputs: Inputs) -> list[Item]:
    first = source.entries[0]
    if source.is_directory:
        below = context_items(source, target.inside, changes, inputs.files, with_itself=False)
        return [*target.made(changes), *below]
    if step.unpack and is_archive(first.where):
        found = archive_items(first.where, changes, status=first.status)
        return [*target.made(changes), *(_below(item, target.inside) for item in found)]
    name = target.name_for(posixpath.basename(source.name))
    return [*target.parents(changes), *context_items(source, name, changes, inputs.files)]


async def copy_image(sandbox: Sandbox, other: Sandbox, step: Copy, where: str) -> None:
    """Files of another image, with their owners and attributes."""
    changes = Changes(owner=await _owner(sandbox, step.owner, where), mode=step.mode)
    names = [name for pattern in step.sources for name in await _named(other, pattern, where)]
    kinds = [await _is_directory(other, name) for name in names]
    target = await _Target.of(sandbox, step, count=len(names), directories=any(kinds), where=where)
    for name, is_directory in zip(names, kinds, strict=True):
        if is_directory:
            pieces = partial(_relayed, other, name, target.inside, target.made(changes), changes)
        else:
            items, inside = target.parents(changes), target.name_for(posixpath.basename(name))
            pieces = partial(_relayed, other, name, inside, items, changes)
        copied = await sandbox.files.write_tree(target.root, pieces)
        if not copied.files and not is_directory:
            raise InvalidSpecError(f"{where}: {name!r} is neither a file, a directory nor a link")


async def _relayed(other: Sandbox, name: str, inside: str, items: list[Item], changes: Changes) -> AsyncIterator[bytes]:
    """The directories that have to be made, then what `name` is in the other sandbox."""
    for piece in stream(items, end=False):
        yield piece
    async with aclosing(other.files.read_tree(name)) as chunks:
        async for piece in Relay(inside, changes).run(chunks):
            yield piece
    yield END


def _below(item: Item, directory: str) -> Item:
    return item.moved(directory) if directory else item


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where a COPY puts things, in a sandbox that is there."""

    root: str
    """The deepest directory on the way that exists already; names are relative to it."""
    missing: tuple[str, ...]
    """Directories that do not exist, relative to `root`, the shortest first. Without the last part of the target."""
    last: str
    """The last part of the target, relative to `root`; empty when the target itself exists as a directory."""
    is_directory: bool
    """Files go into it, under their own names."""

    @staticmethod
    async def of(sandbox: Sandbox, step: Copy, *, count: int, directories: bool, where: str) -> _Target:
        """Looks into the sandbox. `directories`: what is copied is one, or is unpacked into one."""
        if count > 1 and not step.into_directory:
            raise InvalidSpecError(
                f"{where}: several sources need a directory: let the target end with /",
                detail={"field": "dockerfile", "line": step.line},
            )
        root, missing = await _reachable(sandbox, step.target)
        if not missing:
            return _Target(root=root, missing=(), last="", is_directory=True)
        if len(missing) > 1 or step.into_directory or directories:
            await _refuse_in_the_way(sandbox, root, missing[0])
        return _Target(root=root, missing=missing[:-1], last=missing[-1], is_directory=step.into_directory)

    @property
    def inside(self) -> str:
        """The target as a directory."""
        return self.last

    def name_for(self, name: str) -> str:
        """Where a file of that name goes."""
        if not self.is_directory:
            return self.last
        return f"{self.last}/{name}" if self.last else name

    def parents(self, changes: Changes) -> list[Item]:
        """Directories a file needs."""
        names = [*self.missing, *([self.last] if self.is_directory and self.last else [])]
        return _directories(names, changes.owner or Owner())

    def made(self, changes: Changes) -> list[Item]:
        """The target as a directory. When it has to be made, it is like any other, whatever is copied into it."""
        names = [*self.missing, *([self.last] if self.last else [])]
        return _directories(names, changes.owner or Owner())


def _directories(names: tuple[str, ...] | list[str], owner: Owner) -> list[Item]:
    return [directory_item(name, owner, mtime_ns=time.time_ns()) for name in names]


async def _owner(sandbox: Sandbox, text: str, where: str) -> Owner | None:
    if not text:
        return None
    if not needs_accounts(text):
        return resolve_owner(text, passwd="", group="", where=where)
    passwd, group = [await _text(sandbox, path) for path in ("/etc/passwd", "/etc/group")]
    return resolve_owner(text, passwd=passwd, group=group, where=where)


async def _text(sandbox: Sandbox, path: str) -> str:
    try:
        return (await sandbox.files.read_bytes(path)).decode("utf-8", "surrogateescape")
    except FileError as error:
        if error.detail.get("errno") == "ENOENT":
            return ""
        raise


async def _is_directory(sandbox: Sandbox, path: str) -> bool:
    """Links followed."""
    try:
        await sandbox.files.stat(f"{path.rstrip('/')}/.")
    except FileError as error:
        if error.detail.get("errno") in {"ENOENT", "ENOTDIR", "ELOOP"}:
            return False
        raise
    return True


async def _reachable(sandbox: Sandbox, path: str) -> tuple[str, tuple[str, ...]]:
    """The deepest directory at or above `path` that is there, and what is missing below it, each relative to it."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        root = "/" + "/".join(parts[:depth])
        if await _is_directory(sandbox, root):
            below = parts[depth:]
            return root, tuple("/".join(below[: count + 1]) for count in range(len(below)))
    return "/", tuple(parts)


async def _refuse_in_the_way(sandbox: Sandbox, root: str, name: str) -> None:
    """A directory is to be made there: what is there must not be replaced by it."""
    path = posixpath.join(root, name)
    if await sandbox.files.exists(path):
        raise FileError(f"{path} is in the way: it is no directory", detail={"path": path, "errno": "ENOTDIR"})


async def _named(sandbox: Sandbox, pattern: str, where: str) -> list[str]:
    """What a source means in another image."""
    wanted = posixpath.normpath(f"/{pattern.lstrip('/')}")
    names = [""]
    for part in [one for one in wanted.split("/") if one]:
        if not has_wildcard(part):
            names = [f"{name}/{part}" for name in names]
            continue
        below: list[str] = []
        for name in names:
            if await _is_directory(sandbox, name or "/"):
                there = [posixpath.basename(one.path) for one in await sandbox.files.list(name or "/")]
                below += [f"{name}/{one}" for one in names_matching(part, there)]
        names = below
    found = [name or "/" for name in names if await sandbox.files.exists(name or "/")]
    if not found and not has_wildcard(wanted):
        raise InvalidSpecError(f"{where}: {pattern!r} is not in the image copied from", detail={"field": "source"})
    return found


async def _chunks(items: list[Item]) -> AsyncIterator[bytes]:
    pieces = stream(items)
    while piece := await async_blocking(_gathered, pieces):
        yield piece


def _gathered(pieces: Iterator[bytes]) -> bytes:
    """About half a MiB of them."""
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= 1 << 19:
            break
    return bytes(found)
