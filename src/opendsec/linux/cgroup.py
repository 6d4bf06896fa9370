"""Control groups of sandboxes, on hosts with cgroup v2 and on hosts with v1 controllers beside an empty v2 tree.

Layout, in every hierarchy used: `<mount>/<root>/{latency,batch}/<sandbox>`. The two classes are siblings, so a busy
batch class cannot slow the latency class (`cpu.idle` on the batch parent where the kernel has it). Two drivers:

* `UnifiedDriver`: everything in the v2 tree. Controllers are enabled in the parents only; a sandbox's own directory
  has none below it, so what its agent makes there is for killing and freezing only.
* `HybridDriver`: v1 `memory`, `pids` and `cpu`, plus one v2 directory per sandbox for freeze, kill and
  CLONE_INTO_CGROUP.

A v1 memory group is removed as it is, without `memory.force_empty`: that costs more CPU than the whole rest of a
removal, drops the cache of image files that other sandboxes read, and was not seen to save anything once the
sandbox's own files are deleted.

Limits are written before any process enters. It writes where the hierarchies are mounted, wherever this process itself
may sit. It starts and signals nothing; `kill` is the kernel's own `cgroup.kill`. Kernel failures are OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from opendsec.linux.cgroup_files import GroupFiles
from opendsec.linux.mount import MountEntry, mountinfo

CPU_PERIOD_US = 100_000
_RETRY_FIRST_S = 0.0005
_RETRY_MOST_S = 0.02
_DELEGATED = ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control")
CONTROLLERS = ("memory", "pids", "cpu")


class CgroupClass(StrEnum):
    """Who goes first when the CPUs are busy."""

    LATENCY = "latency"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimits:
    """None: no limit of its own. `memory_bytes` is memory and swap together."""

    memory_bytes: int | None = None
    pids: int | None = None
    cpu_cores: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupUsage:
    """Counters since the group was made; None where this host does not count."""

    memory_bytes: int | None = None
    oom_kills: int | None = None
    pids_denied: int | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class CgroupLeaf:
    """Descriptors a launch needs; they close with the `with` block, the group stays."""

    cgroup2: int
    """The sandbox's directory in the v2 tree."""
    procs: tuple[int, ...]
    """`cgroup.procs` of each v1 hierarchy, open for writing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.cgroup2, *self.procs):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class CgroupMounts:
    """Where the hierarchies are: the v2 mount, its controllers, and the v1 mount of each controller."""

    unified: Path | None
    unified_controllers: frozenset[str]
    legacy: Mapping[str, Path]


def sort_mounts(entries: Iterable[MountEntry]) -> tuple[Path | None, dict[str, Path]]:
    """(v2 mount point, controller → v1 mount point); the first mount of each counts."""
    unified: Path | None = None
    legacy: dict[str, Path] = {}
    for entry in entries:
        if entry.fstype == "cgroup2" and unified is None:
            unified = Path(entry.target)
        elif entry.fstype == "cgroup":
            for name in entry.super_options:
                if name in CONTROLLERS:
                    legacy.setdefault(name, Path(entry.target))
    return unified, legacy


def find_mounts() -> CgroupMounts:
    """What this host has now."""
    unified, legacy = sort_mounts(mountinfo())
    names: frozenset[str] = frozenset()
    if unified is not None:
        names = frozenset((unified / "cgroup.controllers").read_text(encoding="ascii").split())
    return CgroupMounts(unified, names, legacy)


def choose_driver(mounts: CgroupMounts, *, root: str = "opendsec") -> CgroupDriver:
    """The driver for these mounts. Raises OSError (ENOTSUP) without a v2 tree."""
    if mounts.unified is None:
        raise OSError(
            errno.ENOTSUP, "no cgroup v2 tree is mounted (mount one at /sys/fs/cgroup/unified or boot with it)"
        )
    if mounts.unified_controllers.intersection(CONTROLLERS) or not mounts.legacy:
        return UnifiedDriver(mounts.unified, root=root, controllers=mounts.unified_controllers)
    return HybridDriver(mounts.unified, mounts.legacy, root=root)


# ── small reads and writes ──────────────────────────────────────────────────────────────────────────────────────────


def _write(path: str, value: str, dir_fd: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(fd, value.encode("ascii"))
    finally:
        os.close(fd)


def _write_if_present(path: str, value: str, dir_fd: int) -> bool:
    try:
        _write(path, value, dir_fd)
    except FileNotFoundError:
        return False
    return True


def _read(path: str, dir_fd: int) -> str | None:
    """None: no such file, or its group is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    try:
        return os.read(fd, 8192).decode("ascii")
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    finally:
        os.close(fd)


def _read_number(path: str, dir_fd: int) -> int | None:
    text = _read(path, dir_fd)
    return None if text is None else int(text)


def _read_key(path: str, key: str, dir_fd: int) -> int | None:
    """One `key value` line of a flat keyed file."""
    for line in (_read(path, dir_fd) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def make_directory(name: str, dir_fd: int) -> None:
    """mkdir(2) of a group."""
    os.mkdir(name, 0o755, dir_fd=dir_fd)


# ── drivers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class CgroupDriver(ABC):
    """Groups of sandboxes by name. `open` before anything else, `close` at the end; groups stay.

    The v2 half (freeze, kill, nested groups, delegation) is here; where limits and counters live is the subclass's.
    """

    def __init__(self, unified: Path, *, root: str) -> None:
        self._unified = unified
        self._root = root
        self._parents: dict[tuple[str, CgroupClass], int] = {}
        """(hierarchy, class) → directory descriptor; the v2 tree is the hierarchy ``."""

    @property
    @abstractmethod
    def limits(self) -> frozenset[str]:
        """Controllers that can limit here: of memory, pids, cpu."""

    @abstractmethod
    def hierarchies(self) -> Mapping[str, Path]:
        """Name → mount point of every hierarchy groups are made in; the v2 tree is ``."""

    @abstractmethod
    def usage(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> CgroupUsage:
        """Counters now; all None when there is no such group."""

    @abstractmethod
    def _limit(self, name: str, limits: CgroupLimits, group_class: CgroupClass) -> None: ...

    def open(self) -> None:
        """Make `<root>/{latency,batch}` in each hierarchy and hold them. Idempotent."""
        for hierarchy, mount in self.hierarchies().items():
            self._prepare(mount, mount)
            top = mount / self._root
            top.mkdir(mode=0o755, exist_ok=True)
            self._prepare(mount, top)
            for group_class in CgroupClass:
                directory = top / group_class.value
                directory.mkdir(mode=0o755, exist_ok=True)
                self._prepare(mount, directory)
                if (hierarchy, group_class) not in self._parents:
                    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    self._parents[hierarchy, group_class] = fd
            _write_if_present("cpu.idle", "1", self._parents[hierarchy, CgroupClass.BATCH])

    def close(self) -> None:
        """Let go of the parents. Groups stay."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()

    def remove_root(self) -> None:
        """Remove the empty parents too, for tests and uninstalling. Raises OSError (EBUSY) while there are groups."""
        self.close()
        for mount in self.hierarchies().values():
            for directory in (*(mount / self._root / each.value for each in CgroupClass), mount / self._root):
                with contextlib.suppress(FileNotFoundError):
                    directory.rmdir()

    def create(
        self,
        name: str,
        limits: CgroupLimits,
        *,
        owner: int,
        group_class: CgroupClass = CgroupClass.LATENCY,
    ) -> CgroupLeaf:
        """Make the group with its limits; its v2 directory belongs to host user `owner`, who may make groups below.

        Raises OSError; FileExistsError when there is one of this name already. Nothing stays after an error.
        """
        made: list[str] = []
        fds: list[int] = []
        try:
            for hierarchy in self._wanted(limits):
                make_directory(name, self._parents[hierarchy, group_class])
                made.append(hierarchy)
            self._limit(name, limits, group_class)
            leaf = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._parents["", group_class])
            fds.append(leaf)
            os.chown(leaf, owner, owner)
            for file in _DELEGATED:
                os.chown(file, owner, owner, dir_fd=leaf)
            for hierarchy in made:
                if hierarchy:
                    parent = self._parents[hierarchy, group_class]
                    fds.append(os.open(f"{name}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=parent))
        except OSError:
            for fd in fds:
                os.close(fd)
            for hierarchy in made:
                os.rmdir(name, dir_fd=self._parents[hierarchy, group_class])
            raise
        return CgroupLeaf(fds[0], tuple(fds[1:]))

    def open_group(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> GroupFiles:
        """Its files, kept open until the caller closes them. Raises FileNotFoundError when there is no such group."""
        directories: dict[str, int] = {}
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            directories[""] = os.open(name, flags, dir_fd=self._parents["", group_class])
            for hierarchy in self.hierarchies():
                if hierarchy:
                    with contextlib.suppress(FileNotFoundError):
                        directories[hierarchy] = os.open(name, flags, dir_fd=self._parents[hierarchy, group_class])
        except OSError:
            for fd in directories.values():
                os.close(fd)
            raise
        return GroupFiles(directories)

    def limit(self, name: str, limits: CgroupLimits, *, group_class: CgroupClass = CgroupClass.LATENCY) -> None:
        """Change the limits of a group that was made with limits of these kinds. Raises OSError."""
        self._limit(name, limits, group_class)

    def open_procs(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> tuple[int, ...]:
        """`cgroup.procs` of a group in every hierarchy it is in, open for writing; the caller closes them.

        Raises FileNotFoundError when there is no such group.
        """
        fds: list[int] = []
        for hierarchy in self.hierarchies():
            parent = self._parents[hierarchy, group_class]
            try:
                fds.append(os.open(f"{name}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=parent))
            except FileNotFoundError:
                if not hierarchy:
                    raise
        return tuple(fds)

    def names(self) -> set[tuple[str, CgroupClass]]:
        """Every group there is, in any hierarchy."""
        return {
            (entry.name, group_class) for (_, group_class), fd in self._parents.items() for entry in _directories(fd)
        }

    def exists(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> bool:
        """In the v2 tree."""
        return _exists(name, self._parents["", group_class])

    def is_populated(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> bool:
        """Whether a process is in the group or below it."""
        return _read_key(f"{name}/cgroup.events", "populated", self._parents["", group_class]) == 1

    def is_frozen(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> bool:
        """Whether `freeze` was asked for; False when there is no such group."""
        return _read(f"{name}/cgroup.freeze", self._parents["", group_class]) == "1\n"

    async def wait_empty(
        self, name: str, *, timeout_s: float = 10.0, group_class: CgroupClass = CgroupClass.LATENCY
    ) -> None:
        """Return when no process is in it or below it, or there is no such group. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        pause = _RETRY_FIRST_S
        while self.is_populated(name, group_class=group_class):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"cgroup {name!r} still has processes after {timeout_s:g} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_MOST_S)

    def kill(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> None:
        """SIGKILL to every process in it, frozen or not, forks included. No such group is no error."""
        _write_if_present(f"{name}/cgroup.kill", "1", self._parents["", group_class])

    async def freeze(
        self, name: str, *, timeout_s: float = 10.0, group_class: CgroupClass = CgroupClass.LATENCY
    ) -> None:
        """Stop every process; returns when all have. Raises TimeoutError (and they go on), FileNotFoundError."""
        await self._set_frozen(name, group_class, frozen=True, timeout_s=timeout_s)

    async def thaw(self, name: str, *, timeout_s: float = 10.0, group_class: CgroupClass = CgroupClass.LATENCY) -> None:
        """Undo `freeze`."""
        await self._set_frozen(name, group_class, frozen=False, timeout_s=timeout_s)

    async def remove(
        self, name: str, *, timeout_s: float = 10.0, group_class: CgroupClass = CgroupClass.LATENCY
    ) -> None:
        """Remove the group from every hierarchy, with all groups below it. Its processes must have been killed.

        Waits for the last of them to be gone. No such group is no error. Raises TimeoutError naming the group.
        """
        deadline = time.monotonic() + timeout_s
        for hierarchy in self.hierarchies():
            parent = self._parents[hierarchy, group_class]
            pause = _RETRY_FIRST_S
            while not self._remove_once(hierarchy, name, parent):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, f"cgroup {name!r} is still in use after {timeout_s:g} s")
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RETRY_MOST_S)

    def _wanted(self, limits: CgroupLimits) -> Iterator[str]:
        """Hierarchies this sandbox needs a group in."""
        yield ""

    @abstractmethod
    def _prepare(self, mount: Path, directory: Path) -> None:
        """Make a parent fit for children with controllers."""

    async def _set_frozen(self, name: str, group_class: CgroupClass, *, frozen: bool, timeout_s: float) -> None:
        parent = self._parents["", group_class]
        _write(f"{name}/cgroup.freeze", "1" if frozen else "0", parent)
        deadline = time.monotonic() + timeout_s
        pause = _RETRY_FIRST_S
        while _read_key(f"{name}/cgroup.events", "frozen", parent) != int(frozen):
            if time.monotonic() > deadline:
                _write(f"{name}/cgroup.freeze", "0", parent)
                raise TimeoutError(errno.ETIMEDOUT, f"cgroup {name!r} did not {'freeze' if frozen else 'thaw'}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_MOST_S)

    def _remove_once(self, hierarchy: str, name: str, parent: int) -> bool:
        """Whether it is gone now."""
        try:
            os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
            if not hierarchy:
                _remove_below(name, parent)
            return False
        return True


def _exists(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True


def _directories(fd: int) -> list[os.DirEntry[str]]:
    with os.scandir(fd) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def _remove_below(name: str, parent: int) -> None:
    """Remove what groups below it can be removed now."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        for entry in _directories(fd):
            _remove_below(entry.name, fd)
            with contextlib.suppress(FileNotFoundError, OSError):
                os.rmdir(entry.name, dir_fd=fd)
    finally:
        os.close(fd)


async def put_into(procs: Sequence[int], pid: int) -> None:
    """Put a process into the groups of these descriptors of `cgroup.procs`.

    The kernel may take 10 ms for each (it waits for all processors), in which the event loop goes on. Who is cancelled
    returns, too, only once they are not used any more. Raises OSError (ESRCH: the process has ended).
    """
    writing = asyncio.ensure_future(asyncio.to_thread(_write_each, tuple(procs), b"%d" % pid))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        if not writing.cancelled():
            writing.exception()  # whoever is cancelled has other worries
        raise


def _write_each(fds: Sequence[int], text: bytes) -> None:
    for fd in fds:
        os.write(fd, text)


class UnifiedDriver(CgroupDriver):
    """Everything in the v2 tree."""

    def __init__(self, unified: Path, *, root: str, controllers: frozenset[str]) -> None:
        super().__init__(unified, root=root)
        self._controllers = tuple(name for name in CONTROLLERS if name in controllers)

    @property
    def limits(self) -> frozenset[str]:
        return frozenset(self._controllers)

    def hierarchies(self) -> Mapping[str, Path]:
        return {"": self._unified}

    def usage(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> CgroupUsage:
        parent = self._parents["", group_class]
        cpu_us = _read_key(f"{name}/cpu.stat", "usage_usec", parent)
        return CgroupUsage(
            memory_bytes=_read_number(f"{name}/memory.current", parent),
            oom_kills=_read_key(f"{name}/memory.events", "oom_kill", parent),
            pids_denied=_read_key(f"{name}/pids.events", "max", parent),
            cpu_s=None if cpu_us is None else cpu_us / 1e6,
        )

    def _prepare(self, mount: Path, directory: Path) -> None:
        enabled = (directory / "cgroup.subtree_control").read_text(encoding="ascii").split()
        missing = [name for name in self._controllers if name not in enabled]
        if missing:
            (directory / "cgroup.subtree_control").write_text(
                " ".join(f"+{name}" for name in missing), encoding="ascii"
            )

    def _limit(self, name: str, limits: CgroupLimits, group_class: CgroupClass) -> None:
        parent = self._parents["", group_class]
        if limits.memory_bytes is not None:
            _write(f"{name}/memory.max", str(limits.memory_bytes), parent)
            _write_if_present(f"{name}/memory.swap.max", "0", parent)
        if limits.pids is not None:
            _write(f"{name}/pids.max", str(limits.pids), parent)
        if limits.cpu_cores is not None:
            _write(f"{name}/cpu.max", f"{round(limits.cpu_cores * CPU_PERIOD_US)} {CPU_PERIOD_US}", parent)


class HybridDriver(CgroupDriver):
    """v1 controllers, and one v2 directory per sandbox for what v1 cannot do."""

    def __init__(self, unified: Path, legacy: Mapping[str, Path], *, root: str) -> None:
        super().__init__(unified, root=root)
        self._hierarchies = {"": unified, **{name: legacy[name] for name in CONTROLLERS if name in legacy}}

    @property
    def limits(self) -> frozenset[str]:
        return frozenset(self._hierarchies) - {""}

    def hierarchies(self) -> Mapping[str, Path]:
        return self._hierarchies

    def usage(self, name: str, *, group_class: CgroupClass = CgroupClass.LATENCY) -> CgroupUsage:
        memory = self._parents.get(("memory", group_class))
        pids = self._parents.get(("pids", group_class))
        cpu_us = _read_key(f"{name}/cpu.stat", "usage_usec", self._parents["", group_class])
        return CgroupUsage(
            memory_bytes=None if memory is None else _read_number(f"{name}/memory.usage_in_bytes", memory),
            oom_kills=None if memory is None else _read_key(f"{name}/memory.oom_control", "oom_kill", memory),
            pids_denied=None if pids is None else _read_key(f"{name}/pids.events", "max", pids),
            cpu_s=None if cpu_us is None else cpu_us / 1e6,
        )

    def _wanted(self, limits: CgroupLimits) -> Iterator[str]:
        yield ""
        for name in self._hierarchies:
            if name in ("memory", "cpu") or (name == "pids" and limits.pids is not None):
                yield name

    def _prepare(self, mount: Path, directory: Path) -> None:
        """Nothing: a v1 hierarchy has its controllers everywhere."""

    def _limit(self, name: str, limits: CgroupLimits, group_class: CgroupClass) -> None:
        if limits.memory_bytes is not None:
            parent = self._parent("memory", group_class)
            _write(f"{name}/memory.limit_in_bytes", str(limits.memory_bytes), parent)
            _write_if_present(f"{name}/memory.memsw.limit_in_bytes", str(limits.memory_bytes), parent)
        if limits.pids is not None:
            _write(f"{name}/pids.max", str(limits.pids), self._parent("pids", group_class))
        if limits.cpu_cores is not None:
            parent = self._parent("cpu", group_class)
            _write(f"{name}/cpu.cfs_period_us", str(CPU_PERIOD_US), parent)
            _write(f"{name}/cpu.cfs_quota_us", str(round(limits.cpu_cores * CPU_PERIOD_US)), parent)

    def _parent(self, controller: str, group_class: CgroupClass) -> int:
        fd = self._parents.get((controller, group_class))
        if fd is None:
            raise OSError(errno.ENOTSUP, f"no {controller} controller is mounted, so that limit cannot be kept")
        return fd
