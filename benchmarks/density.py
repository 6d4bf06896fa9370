"""Idle sandboxes: what one costs in memory, that a thousand live side by side, and that nothing of them stays.

    .venv/bin/python -m benchmarks.density [--count 1000] [--image NAME]

Memory is the fall of MemAvailable, and of MemFree plus the pages in the per-CPU lists, per sandbox: everything is in
it, also what edge and apiserver grow by. Take the larger one; run it on a quiet machine.
Then one command runs in every sandbox, all are stopped, and what the platform holds is counted against the count from
before: processes, control groups, namespaces, mounts, descriptors, threads, files. Each must be what it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from benchmarks.shared import belongings, cost, crowd, report
from benchmarks.shared.platforms import Platform, add_options, started

GOAL_KIB = 450.0
SETTLE_S = 30.0
KEEP_ENDED_S = 3


def held(platform: Platform) -> dict[str, int]:
    """What there is now."""
    pids = platform.pids(supervisor=True)
    del pids["client"]
    return belongings.count(pids, cgroup_root=platform.groups[1].name, places=platform.places)


async def left_behind(platform: Platform, before: dict[str, int]) -> dict[str, int]:
    """What is more than before once it has stopped falling; ended sandboxes keep their results for KEEP_ENDED_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = held(platform)
        more = {name: number - before.get(name, 0) for name, number in now.items() if number > before.get(name, 0)}
        if not more or time.monotonic() > deadline:
            return more
        await asyncio.sleep(0.25)


async def settled_memory() -> tuple[int, int]:
    """After the kernel has freed in its own time what has ended."""
    await asyncio.sleep(2)
    return cost.free_kib()


async def measure(platform: Platform, count: int) -> dict[str, int]:
    """Fill, look, use, empty, look."""
    async with platform.client() as client:
        await crowd.stop_all(await crowd.fill(client, platform.args(), 200))
        await asyncio.sleep(KEEP_ENDED_S + 3)
        before, memory = held(platform), await settled_memory()
        begin = time.perf_counter()
        sandboxes = await crowd.fill(client, platform.args(), count)
        print(f"{count} live after {time.perf_counter() - begin:.1f} s, started through the API in batches of 500")
        full = await settled_memory()
        kib = [(was - is_) / count for was, is_ in zip(memory, full, strict=True)]
        print(f"one idle sandbox: {kib[0]:.0f} KiB of MemAvailable, {kib[1]:.0f} KiB of MemFree and per-CPU lists")
        live = held(platform)
        print("at the full count: " + ", ".join(f"{name} {live[name] - before.get(name, 0):+d}" for name in live))
        begin = time.perf_counter()
        await crowd.each(sandboxes, lambda sandbox: sandbox.run_shell("true", check=True), at_once=32)
        print(f"a command in each of them: {count / (time.perf_counter() - begin):.0f}/s")
        begin = time.perf_counter()
        await crowd.stop_all(sandboxes)
        print(f"all stopped after {time.perf_counter() - begin:.1f} s", flush=True)
        left = await left_behind(platform, before)
    report.print_goal("idle sandbox, by the worse of both figures", max(kib), GOAL_KIB, "KiB")
    report.print_goal("things left behind", float(sum(left.values())), 0.0, "")
    for name, number in left.items():
        print(f"  left: {number} {name}")
    return left


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    if options.api:
        parser.error("memory and leftovers can only be counted on a platform of its own")
    report.print_machine()
    with started(options, OPENDSEC_EDGE_KEEP_ENDED=str(KEEP_ENDED_S)) as platform:
        left = asyncio.run(measure(platform, options.count))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
