"""Bursts: sandboxes ready per second in batches, straight at the edge and through the apiserver, and how long a single
create takes meanwhile; with nothing live and with many idle ones.

    .venv/bin/python -m benchmarks.batch [--rounds 5] [--count 400] [--live 1000] [--image NAME] [--api URL]

Both ways take turns in one run. A batch is one request of `--count`; its rate counts from the request to the last
sandbox ready. Latencies of the batch's items count from the request too, so they are queueing; `create, 8 at once` are
single creates. CPU is all of client, platform and sandboxes for one sandbox, from their control groups. Every sandbox
must start: a failure ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.shared import crowd, report
from benchmarks.shared.cost import Spent
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec

GOALS = {"at the edge": 400.0, "through the API": 200.0}
CPU_GOAL_MS = 3.0
AT_ONCE = 8


@dataclass(slots=True)
class Way:
    """What one way to the sandboxes showed."""

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    stop_cpu_ms: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)
    by_process: str = ""

    def show(self, what: str, count: int) -> None:
        """One block."""
        print(
            f"{what:24} {statistics.median(self.rates):7.0f} ready/s (of {sorted(map(round, self.rates))}), "
            f"100 % of {count * len(self.rates)} started, {statistics.median(self.cpu_ms):.2f} CPU-ms each"
        )
        print(
            f"{'':24} {statistics.median(self.stops):7.0f} stopped/s, {statistics.median(self.stop_cpu_ms):.2f} CPU-ms"
        )
        print(f"{'':24} CPU-ms of one create: {self.by_process}")
        report.print_latency(f"  create, {AT_ONCE} at once", self.singles)


async def batch(platform: Platform, client: opendsec.DSecClient, count: int, way: Way) -> None:
    """One batch, then its end."""
    sandboxes: list[opendsec.Sandbox] = []
    pids = Spent(platform.pids())
    cpu, begin = platform.cpu_s(), time.perf_counter()
    async for outcome in client.run_many(platform.args(), count):
        if isinstance(outcome, opendsec.Failed):
            raise outcome.error
        sandboxes.append(outcome.sandbox)
    ready_s, ready_cpu = time.perf_counter() - begin, platform.cpu_s()
    way.by_process = pids.ms_per(count)
    assert len(sandboxes) == count
    begin = time.perf_counter()
    await crowd.stop_all(sandboxes)
    way.rates.append(count / ready_s)
    way.stops.append(count / (time.perf_counter() - begin))
    way.cpu_ms.append((ready_cpu - cpu) * 1e3 / count)
    way.stop_cpu_ms.append((platform.cpu_s() - ready_cpu) * 1e3 / count)


async def singles(platform: Platform, client: opendsec.DSecClient, count: int, way: Way) -> None:
    """Single creates, some at once; each is stopped before the next one of its worker."""

    async def one(_: int) -> None:
        begin = time.perf_counter()
        sandbox = await client.run_container(platform.args())
        way.singles.append(time.perf_counter() - begin)
        await sandbox.stop()

    await crowd.each(range(count), one, at_once=AT_ONCE)


async def one_pass(
    platform: Platform, clients: Mapping[str, opendsec.DSecClient], options: argparse.Namespace
) -> dict[str, Way]:
    """Turns between the ways."""
    ways = {name: Way() for name in clients}
    for client in clients.values():
        await batch(platform, client, 64, Way())
    for _ in range(options.rounds):
        for name, client in clients.items():
            await batch(platform, client, options.count, ways[name])
            await singles(platform, client, options.count // 2, ways[name])
    return ways


async def measure(platform: Platform, options: argparse.Namespace) -> None:
    """With nothing live, then with many."""
    async with platform.client() as client:
        if platform.local is None:
            await both_passes(platform, {"through the API": client}, options)
            return
        async with platform.edge_client() as edge:
            await both_passes(platform, {"at the edge": edge, "through the API": client}, options)


async def both_passes(
    platform: Platform, clients: Mapping[str, opendsec.DSecClient], options: argparse.Namespace
) -> None:
    """Measure, print, judge."""
    found = {0: await one_pass(platform, clients, options)}
    if options.live:
        async with crowd.living(clients["through the API"], platform.args(), options.live):
            found[options.live] = await one_pass(platform, clients, options)
    for live, ways in found.items():
        print(f"--- {live} live; batches of {options.count}")
        for name, way in ways.items():
            way.show(name, options.count)
    for live, ways in found.items():
        for name, way in ways.items():
            rate = statistics.median(way.rates)
            report.print_goal(f"launches {name}, {live} live", rate, GOALS[name], "/s", at_least=True)
            if name == "at the edge":
                cpu = statistics.median(way.cpu_ms)
                report.print_goal(f"create → ready, all processes, {live} live", cpu, CPU_GOAL_MS, "CPU-ms")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--live", type=int, default=1000, help="0: only the pass without live ones")
    options = parser.parse_args()
    report.print_machine()
    with started(options, OPENDSEC_EDGE_KEEP_ENDED="5") as platform:
        asyncio.run(measure(platform, options))


if __name__ == "__main__":
    main()
