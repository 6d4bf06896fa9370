"""One control group's files, kept open: for whoever reads or changes them a thousand times a second.

`open_group` finds them by what is there, v2 or v1. It makes, moves and removes nothing; a group that is gone answers
None or raises OSError (ENODEV). Counters are the kernel's own, the guest's word is not asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Self

_BYTES = 4096
_KILL = b"1"


class GroupFiles:
    """`directories`: hierarchy → descriptor of the group's directory in it, taken over; the v2 tree is the hierarchy
    ``.
    """

    def __init__(self, directories: Mapping[str, int]) -> None:
        self._directories = dict(directories)
        self._open: list[int] = []
        memory = "memory" if "memory" in directories else ""
        pids = "pids" if "pids" in directories else ""
        self._cpu = self._find(("", "cpu.stat"))
        self._pids = self._find((pids, "pids.current"))
        self._pids_max = self._find((pids, "pids.max"), write=True)
        self._pids_events = self._find((pids, "pids.events"))
        self._limit = self._find((memory, "memory.limit_in_bytes"), ("", "memory.max"), write=True)
        self._swap_limit = self._find((memory, "memory.memsw.limit_in_bytes"), write=True)
        self._usage = self._find((memory, "memory.usage_in_bytes"), ("", "memory.current"))
        self._stat = self._find((memory, "memory.stat"))
        self._oom = self._find((memory, "memory.oom_control"), ("", "memory.events"))
        self._peak = self._find((memory, "memory.max_usage_in_bytes"), ("", "memory.peak"), write=True)

    def _find(self, *names: tuple[str, str], write: bool = False) -> int | None:
        """The first of these files, given as hierarchy and name, that is there."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        for hierarchy, name in names:
            # kernels before 6.12 have a memory.peak that cannot be reset
            with contextlib.suppress(FileNotFoundError, PermissionError):
                fd = os.open(name, flags, dir_fd=self._directories[hierarchy])
                self._open.append(fd)
                return fd
        return None

    def close(self) -> None:
        """Let go of the files; the group stays."""
        for fd in (*self._open, *self._directories.values()):
            os.close(fd)
        self._open.clear()
        self._directories.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Counters

    def processes(self) -> int:
        """Processes and threads in it and below it. Without a pids controller: processes only."""
        if self._pids is not None:
            return int(os.pread(self._pids, 32, 0))
        return _count(self._directories[""])

    def cpu_s(self) -> float:
        """Seconds of all processes so far."""
        return _cpu(self._cpu)

    def charged_bytes(self) -> int | None:
        """Charged now, file pages included."""
        return None if self._usage is None else int(os.pread(self._usage, 32, 0))

    def memory_bytes(self) -> int | None:
        """Charged now, file pages that could be dropped not counted."""
        if self._usage is None or self._stat is None:
            return None
        stat = os.pread(self._stat, _BYTES, 0)
        cached = _key(stat, b"total_cache")
        files = _key(stat, b"file") if cached is None else cached
        held = _key(stat, b"shmem") if cached is None else _key(stat, b"total_shmem")
        return max(0, int(os.pread(self._usage, 32, 0)) - (files or 0) + (held or 0))

    def oom_kills(self) -> int | None:
        """Processes killed for the memory limit so far."""
        return None if self._oom is None else _key(os.pread(self._oom, 512, 0), b"oom_kill")

    def forks_denied(self) -> int | None:
        """Forks refused for the limit of processes so far."""
        return None if self._pids_events is None else _key(os.pread(self._pids_events, 128, 0), b"max")

    def peak_bytes(self) -> int | None:
        """Most that was charged at once since `reset_peak`."""
        return None if self._peak is None else int(os.pread(self._peak, 32, 0))

    def reset_peak(self) -> None:
        """Count the peak from now on."""
        if self._peak is not None:
            os.pwrite(self._peak, b"0", 0)

    # Limits

    def limit_memory(self, size_bytes: int) -> None:
        """Memory and swap together, from now on. OSError (EBUSY) when that much cannot be given back."""
        value = str(size_bytes).encode("ascii")
        if self._limit is None:
            return
        files = [fd for fd in (self._limit, self._swap_limit) if fd is not None]
        try:
            for fd in files:
                os.pwrite(fd, value, 0)
        except OSError:
            for fd in reversed(files):  # v1 keeps memory <= memory and swap: raising begins with the second
                os.pwrite(fd, value, 0)

    def limit_processes(self, count: int) -> None:
        """Processes and threads, from now on."""
        if self._pids_max is not None:
            os.pwrite(self._pids_max, str(count).encode("ascii"), 0)

    # Groups below

    def kill_below(self, name: str) -> None:
        """SIGKILL to every process of a group below, forks included. No such group is no error."""
        with contextlib.suppress(FileNotFoundError, OSError):
            fd = os.open(f"{name}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._directories[""])
            try:
                os.write(fd, _KILL)
            finally:
                os.close(fd)

    def cpu_below_s(self, name: str) -> float | None:
        """As `cpu_s`, of one group below. None: it is gone."""
        try:
            fd = os.open(f"{name}/cpu.stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directories[""])
        except FileNotFoundError:
            return None
        try:
            return _cpu(fd)
        except OSError:
            return None
        finally:
            os.close(fd)


def _cpu(fd: int | None) -> float:
    found = None if fd is None else _key(os.pread(fd, 512, 0), b"usage_usec")
    return (found or 0) / 1e6


def _key(text: bytes, key: bytes) -> int | None:
    """One `key value` line of a flat keyed file."""
    start = 0 if text.startswith(key + b" ") else text.find(b"\n" + key + b" ") + 1
    if not start and not text.startswith(key + b" "):
        return None
    begin = start + len(key) + 1
    end = text.find(b"\n", begin)
    return int(text[begin : end if end >= 0 else len(text)])


def _count(directory: int) -> int:
    """Processes of a v2 group and all below it."""
    total = 0
    fd = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        total += len(file.read().split())
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            try:
                total += _count(below)
            finally:
                os.close(below)
    return total
