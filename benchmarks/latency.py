"""How long one caller waits: create → ready, create → first command's result, command round trip, stop; one after the
other, through SDK, apiserver and edge, and again with many idle sandboxes on the same edge.

    .venv/bin/python -m benchmarks.latency [--creates 200] [--commands 1000] [--live 1000] [--image NAME] [--api URL]

Prints p50, p90, p99, and CPU-ms of each process for one operation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field

from benchmarks.shared import crowd, report
from benchmarks.shared.cost import Spent
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec

FIRST_RESULT_GOAL_MS = 25.0
ROUND_TRIP_GOAL_MS = 5.0
CROWDED_P99_GOAL_MS = 100.0


@dataclass(slots=True)
class Seconds:
    """Everything timed in one pass."""

    ready: list[float] = field(default_factory=list)
    first_result: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    round_trip: list[float] = field(default_factory=list)


async def life(client: opendsec.DSecClient, args: opendsec.DSecContainerRunArgs, seconds: Seconds) -> None:
    """One sandbox: create, first command, stop."""
    begin = time.perf_counter()
    sandbox = await client.run_container(args)
    ready = time.perf_counter()
    await sandbox.run_shell("true", check=True)
    first = time.perf_counter()
    await sandbox.stop()
    seconds.ready.append(ready - begin)
    seconds.first_result.append(first - begin)
    seconds.stop.append(time.perf_counter() - first)


async def one_pass(platform: Platform, client: opendsec.DSecClient, options: argparse.Namespace, what: str) -> Seconds:
    """Measure and print."""
    args, seconds = platform.args(), Seconds()
    for _ in range(10):
        await life(client, args, Seconds())
    pids = platform.pids()
    spent = Spent(pids)
    for _ in range(options.creates):
        await life(client, args, seconds)
    lives = spent.ms_per(options.creates)
    async with client.container(args) as sandbox:
        for _ in range(20):
            await sandbox.run_shell("true", check=True)
        spent = Spent(pids)
        for _ in range(options.commands):
            begin = time.perf_counter()
            await sandbox.run_shell("true", check=True)
            seconds.round_trip.append(time.perf_counter() - begin)
        commands = spent.ms_per(options.commands)
    print(f"--- {what}")
    report.print_latency("create → ready", seconds.ready)
    report.print_latency("create → first command's result", seconds.first_result)
    report.print_latency("stop", seconds.stop)
    print(f"  CPU-ms of create, command and stop: {lives}")
    report.print_latency("command round trip", seconds.round_trip)
    print(f"  CPU-ms of a command: {commands}", flush=True)
    return seconds


async def measure(platform: Platform, options: argparse.Namespace) -> None:
    """Both passes."""
    async with platform.client() as client:
        alone = await one_pass(platform, client, options, "nothing else is live")
        crowded: Seconds | None = None
        if options.live:
            async with crowd.living(client, platform.args(), options.live):
                crowded = await one_pass(platform, client, options, f"{options.live} idle sandboxes live")
    first, trip = statistics.median(alone.first_result) * 1e3, statistics.median(alone.round_trip) * 1e3
    report.print_goal("create → first command's result, p50", first, FIRST_RESULT_GOAL_MS, "ms")
    report.print_goal("command round trip, p50", trip, ROUND_TRIP_GOAL_MS, "ms")
    if crowded:
        p99 = report.quantile(crowded.first_result, 0.99) * 1e3
        report.print_goal(f"the same at {options.live} live, p99", p99, CROWDED_P99_GOAL_MS, "ms")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--creates", type=int, default=200)
    parser.add_argument("--commands", type=int, default=1000)
    parser.add_argument("--live", type=int, default=1000, help="0: only the first pass")
    options = parser.parse_args()
    report.print_machine()
    with started(options) as platform:
        asyncio.run(measure(platform, options))


if __name__ == "__main__":
    main()
