"""Idle sandboxes: what one costs in memory, that a thousand live side by side, and that nothing of them stays.

    .venv/bin/python -m benchmarks.density [--count 1000] [--image NAME]

The same thousand lives twice: started, one command in each, stopped. The first time fills what is kept on purpose
(connections between apiserver and edge, a user namespace for each range of ids); what the platform holds after the
second must be what it held after the first: processes, control groups, namespaces, mounts, descriptors, threads, files.

Memory is the fall of MemAvailable, and of MemFree plus the pages in the per-CPU lists, per sandbox, while the second
thousand starts: everything is in it, also what edge and apiserver grow by. On a machine with other work the second
figure also counts files that others read or write meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from benchmarks.shared import belongings, cost, crowd, report
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec

GOAL_KIB = 450.0
SETTLE_S = 30.0
KEEP_ENDED_S = 3


def held(platform: Platform) -> dict[str, int]:
    """What there is now."""
    pids = platform.pids(supervisor=True)
    del pids["client"]
    found = belongings.count(pids, cgroup_root=platform.groups[1].name, places=platform.places)
    # Connections from the apiserver to the edge are kept for the next request: a descriptor at each end.
    sockets = found.pop("sockets of apiserver")
    found["descriptors of edge"] -= sockets
    found["descriptors of apiserver"] -= sockets
    return found


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


async def lives(platform: Platform, client: opendsec.DSecClient, count: int) -> list[float]:
    """Start, use and stop so many; KiB of one, by both ways of counting."""
    memory, before = await settled_memory(), held(platform)
    begin = time.perf_counter()
    sandboxes = await crowd.fill(client, platform.args(), count)
    print(f"{count} live after {time.perf_counter() - begin:.1f} s, started through the API in batches of 500")
    full, live = await settled_memory(), held(platform)
    print("  held for them: " + ", ".join(f"{live[name] - number:+d} {name}" for name, number in before.items()))
    begin = time.perf_counter()
    await crowd.each(sandboxes, lambda sandbox: sandbox.run_shell("true", check=True), at_once=32)
    print(f"  a command in each of them: {count / (time.perf_counter() - begin):.0f}/s")
    begin = time.perf_counter()
    await crowd.stop_all(sandboxes)
    print(f"  all stopped after {time.perf_counter() - begin:.1f} s", flush=True)
    return [(was - is_) / count for was, is_ in zip(memory, full, strict=True)]


async def measure(platform: Platform, count: int) -> dict[str, int]:
    """Twice, and what the second time leaves."""
    async with platform.client() as client:
        await lives(platform, client, count)
    await asyncio.sleep(KEEP_ENDED_S + 3)
    before = held(platform)
    async with platform.client() as client:
        kib = await lives(platform, client, count)
    left = await left_behind(platform, before)
    report.print_goal("idle sandbox, by MemAvailable", kib[0], GOAL_KIB, "KiB")
    report.print_goal("idle sandbox, by MemFree and per-CPU lists", kib[1], GOAL_KIB, "KiB")
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
