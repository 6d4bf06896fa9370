"""What processes use, read from the kernel: CPU time, memory, descriptors.

CPU time of one process is `utime + stime` of /proc/PID/stat, all threads, also those that have ended (10 ms steps).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from `state` on."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()


def cpu_s(pid: int) -> float:
    """Seconds of CPU the process has used so far."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mib(pid: int) -> float:
    """Resident memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_KIB / 1024


def children(pid: int) -> list[int]:
    """Its direct children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def name(pid: int) -> str:
    """The kernel's short name of the program."""
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()


def group_cpu_s(*groups: Path) -> float:
    """CPU of everything that is or was in these cgroup2 directories: nothing that ran in between escapes."""
    total = 0
    for group in groups:
        if (group / "cpu.stat").exists():
            words = (group / "cpu.stat").read_text(encoding="ascii").split()
            total += int(words[words.index("usage_usec") + 1])
    return total / 1e6


def free_kib() -> tuple[int, int]:
    """(MemAvailable, MemFree and the pages in the per-CPU lists, which MemFree leaves out)."""
    info = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE))
    zones = Path("/proc/zoneinfo").read_text(encoding="ascii")
    lists = sum(map(int, re.findall(r"^\s+count:\s+(\d+)", zones, re.MULTILINE)))
    return int(info["MemAvailable"]), int(info["MemFree"]) + lists * _PAGE_KIB


class Spent:
    """CPU of named processes since it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def ms_per(self, units: float) -> str:
        """CPU-ms for each of so many units of work, process by process."""
        spent = {name: (cpu_s(pid) - self._before[name]) * 1000 / units for name, pid in self._pids.items()}
        return ", ".join(f"{name} {value:.2f}" for name, value in spent.items())
