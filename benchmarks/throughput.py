"""Bytes per second of everything that streams: a command's output, a download, an upload; and that memory stays flat.

    .venv/bin/python -m benchmarks.throughput [--megabytes 500] [--rounds 3] [--image NAME] [--api URL] [--edge]

One stream at a time through SDK, apiserver and edge (`--edge`: straight at the edge). The program inside writes zeros
(`head -c`); files are written and read inside the sandbox on its own disk layer, once before they are measured, so
downloads come from the page cache. Memory is the largest resident size of each process while the stream ran, above the
size at its beginning. The goal is judged on the best round: other load on the machine can only slow a stream down.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.shared import cost, report
from benchmarks.shared.cost import Spent
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec

GOAL_MB_S = 200.0
FLAT_MIB = 16.0
PIECE = b"\0" * (256 * 1024)
ALL_OUTPUT = 1 << 30


@dataclass(slots=True)
class Stream:
    """Rounds of one kind of stream."""

    rates: list[float] = field(default_factory=list)
    cpu: str = ""
    growth_mib: dict[str, float] = field(default_factory=dict)


async def watch_memory(pids: Mapping[str, int], peak: dict[str, float]) -> None:
    """The largest resident size of each, looked at every 20 ms."""
    while True:
        for name, pid in pids.items():
            peak[name] = max(peak.get(name, 0.0), cost.rss_mib(pid))
        await asyncio.sleep(0.02)


async def round_of(stream: Stream, pids: Mapping[str, int], size: int, work: Callable[[], Awaitable[int]]) -> None:
    """Time one stream."""
    before = {name: cost.rss_mib(pid) for name, pid in pids.items()}
    peak: dict[str, float] = {}
    spent = Spent(pids)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch_memory(pids, peak))
        begin = time.perf_counter()
        got = await work()
        took = time.perf_counter() - begin
        watching.cancel()
    assert got == size, f"{got} bytes of {size}"
    stream.rates.append(size / 1e6 / took)
    stream.cpu = spent.ms_per(size / 1e6)
    for name, most in peak.items():
        stream.growth_mib[name] = max(stream.growth_mib.get(name, 0.0), most - before[name])


async def output(sandbox: opendsec.Sandbox, size: int) -> int:
    """Bytes of a command's output as they come."""
    process = await sandbox.commands.start(["head", "-c", str(size), "/dev/zero"], max_output_bytes=ALL_OUTPUT)
    got = 0
    async for data in process.stdout:
        got += len(data)
    result = await process.wait()
    assert result.exit_code == 0
    await process.aclose()
    return got


async def download(sandbox: opendsec.Sandbox, _size: int) -> int:
    """Bytes of a file as they come."""
    return sum([len(data) async for data in sandbox.files.read_stream("/tmp/measured")])


async def upload(sandbox: opendsec.Sandbox, size: int) -> int:
    """Bytes the sandbox has of a file sent to it."""

    async def pieces() -> AsyncIterator[bytes]:
        left = size
        while left:
            piece = PIECE[:left]
            left -= len(piece)
            yield piece

    return (await sandbox.files.write_stream("/tmp/sent", pieces())).size_bytes


KINDS = {"output of a command": output, "download": download, "upload": upload}


def agent_pid(platform: Platform) -> int:
    """Pid 1 of the only sandbox."""
    group = platform.groups[1]
    found = [pid for file in group.rglob("cgroup.procs") for pid in map(int, file.read_text().split())]
    return next(pid for pid in found if cost.name(pid).startswith("opendsec"))


async def measure(platform: Platform, client: opendsec.DSecClient, options: argparse.Namespace) -> None:
    """Every kind, in turns."""
    size = options.megabytes * 1_000_000
    streams = {name: Stream() for name in KINDS}
    async with client.container(platform.args(memory_limit_mb=8192)) as sandbox:
        pids = platform.pids()
        if platform.local is not None:
            pids["agent"] = agent_pid(platform)
        for kind in KINDS.values():
            await sandbox.run_shell(f"head -c {size // 10} /dev/zero > /tmp/measured", check=True)
            await kind(sandbox, size // 10)
        await sandbox.run_shell(f"head -c {size} /dev/zero > /tmp/measured", check=True)
        for _ in range(options.rounds):
            for name, kind in KINDS.items():
                await round_of(streams[name], pids, size, lambda kind=kind: kind(sandbox, size))  # type: ignore[misc]
    for name, stream in streams.items():
        print(f"{name}: {', '.join(f'{rate:.0f}' for rate in stream.rates)} MB/s; CPU-ms/MB: {stream.cpu}")
        growth = ", ".join(f"{who} {mib:+.1f}" for who, mib in stream.growth_mib.items())
        print(f"  resident memory while {size // 1_000_000} MB passed, MiB: {growth}")
    for name, stream in streams.items():
        report.print_goal(name, max(stream.rates), GOAL_MB_S, "MB/s", at_least=True)
        report.print_goal(f"{name}: growth of any process", max(stream.growth_mib.values()), FLAT_MIB, "MiB")


async def run(platform: Platform, options: argparse.Namespace) -> None:
    """Pick the way."""
    async with platform.edge_client() if options.edge else platform.client() as client:
        await measure(platform, client, options)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--edge", action="store_true", help="without the apiserver")
    options = parser.parse_args()
    report.print_machine()
    with started(options) as platform:
        asyncio.run(run(platform, options))


if __name__ == "__main__":
    main()
