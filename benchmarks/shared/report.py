"""How benchmarks print: the machine first, then one line for each figure, goals beside what was measured."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("opendsec", "uvicorn", "uvloop", "httptools", "msgspec", "litestar", "httpcore")


def print_machine() -> None:
    """Kernel, processors, memory, load and versions: what figures of two runs may differ by."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    print(f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs ({model}), {memory_gib:.0f} GiB")
    print(f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES))
    print(f"load average {os.getloadavg()[0]:.2f} at the start; on a busy machine compare CPU times, not wall clock")
    print(flush=True)


def quantile(values: Sequence[float], at: float) -> float:
    """The value below which that part of all lies, without interpolation."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * at), len(ordered) - 1)]


def print_latency(what: str, seconds: Sequence[float], *, cpu: str = "") -> None:
    """p50, p90, p99 and the slowest, in milliseconds."""
    points = [statistics.median(seconds), quantile(seconds, 0.9), quantile(seconds, 0.99), max(seconds)]
    p50, p90, p99, most = (f"{point * 1000:8.2f}" for point in points)
    print(f"{what:42} p50 {p50}  p90 {p90}  p99 {p99}  max {most} ms  n {len(seconds):<5} {cpu}".rstrip(), flush=True)


def print_goal(what: str, measured: float, goal: float, unit: str, *, at_least: bool = False) -> None:
    """One figure beside the goal it is held to."""
    kept = measured >= goal if at_least else measured <= goal
    sign = ">=" if at_least else "<="
    print(f"{'kept  ' if kept else 'MISSED'} {what:54} {measured:9.2f} {unit:8} goal {sign} {goal:g}", flush=True)
