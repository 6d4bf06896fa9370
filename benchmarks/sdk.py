"""What the SDK itself costs: against a platform from memory in another process, so that nothing else is measured.

    .venv/bin/python benchmarks/sdk.py [--commands 1000] [--megabytes 300] [--at-once 500,3000]

Prints the round trip of a command (wall clock, and CPU of this process alone), streams in MB/s, and thousands of
commands at once over one client. The other side is Python too, so wall-clock figures are lower bounds of what the
SDK can do.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.synchronize
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.cluster.client import fake_server  # noqa: E402

import opendsec  # noqa: E402
import opendsec.sync  # noqa: E402

ARGS = opendsec.DSecContainerRunArgs(container_image="any")


def serve(urls: multiprocessing.Queue[str], stop: multiprocessing.synchronize.Event, megabytes: int) -> None:
    with fake_server.running() as server:
        server.programs["true"] = fake_server.Program(stdout=b"hi\n")
        server.programs["large"] = fake_server.Program(stdout=b"x" * megabytes * 1_000_000)
        server.files["/large"] = b"y" * megabytes * 1_000_000
        server.piece_bytes = 256 * 1024
        urls.put(server.url)
        stop.wait()


@contextmanager
def timed(what: str, size_bytes: int) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:28} {size_bytes / wall / 1e6:8.0f} MB/s {cpu / size_bytes * 1e9:8.2f} CPU-ms/MB")


def print_round_trip(what: str, seconds: list[float], cpu_s: float) -> None:
    p99 = sorted(seconds)[int(len(seconds) * 0.99)]
    per_call = cpu_s / len(seconds) * 1e3
    print(
        f"{what:28} p50 {statistics.median(seconds) * 1e3:.2f} ms  p99 {p99 * 1e3:.2f} ms  {per_call:.2f} CPU-ms each"
    )


async def measure(url: str, options: argparse.Namespace) -> None:
    size = options.megabytes * 1_000_000
    async with opendsec.DSecClient(url, fake_server.KEY) as client:
        sandbox = await client.run_container(ARGS)
        seconds, cpu = [], time.process_time()
        for _ in range(options.commands):
            begin = time.perf_counter()
            await sandbox.run_shell("true")
            seconds.append(time.perf_counter() - begin)
        print_round_trip("run_shell", seconds, time.process_time() - cpu)
        with timed("output of a command", size):
            assert len((await sandbox.run_shell("large", max_output_bytes=1 << 30)).stdout_bytes) == size
        with timed("files.read_stream", size):
            assert sum([len(data) async for data in sandbox.files.read_stream("/large")]) == size
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            with timed("files.download", size):
                await sandbox.files.download("/large", f"{folder}/large")
            with timed("files.upload", size):
                await sandbox.files.upload(f"{folder}/large", "/back")
        for count in map(int, options.at_once.split(",")):
            begin = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(sandbox.run_shell("true")) for _ in range(count)]
            assert all(run.result().ok for run in runs)
            print(f"{f'{count} commands at once':28} {count / (time.perf_counter() - begin):8.0f} /s")


def measure_sync(url: str, options: argparse.Namespace) -> None:
    with opendsec.sync.DSecClient(url, fake_server.KEY) as client:
        sandbox = client.run_container(ARGS)
        seconds, cpu = [], time.process_time()
        for _ in range(options.commands):
            begin = time.perf_counter()
            sandbox.run_shell("true")
            seconds.append(time.perf_counter() - begin)
        print_round_trip("run_shell (sync)", seconds, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=1000)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--at-once", default="500,3000")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}")
    urls: multiprocessing.Queue[str] = multiprocessing.Queue()
    stop = multiprocessing.Event()
    server = multiprocessing.Process(target=serve, args=(urls, stop, options.megabytes))
    server.start()
    try:
        url = urls.get(timeout=30)
        asyncio.run(measure(url, options))
        measure_sync(url, options)
    finally:
        stop.set()
        server.join()


if __name__ == "__main__":
    main()
