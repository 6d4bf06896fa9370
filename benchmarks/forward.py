"""What the apiserver adds on the way to an edge: latency of small requests and throughput of a stream, against asking
the edge directly.

    python benchmarks/forward.py

Starts an edge with the in-memory backend and an apiserver, as processes on Unix sockets, and asks both from this
process in turns, so that whatever else the machine does hits both alike. Prints medians and their difference; there
is no threshold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import uvloop

from opendsec.apiserver.__main__ import new_key
from opendsec.apiserver.connection import EdgeConnection
from opendsec.apiserver.link import EdgeLink
from opendsec.apiserver.settings import from_environment
from opendsec.server.runner import Address

ROUNDS = 2000
STREAM_BYTES = 1024 * 1024 * 1024
ROOT = Path(__file__).parents[1]


@contextlib.asynccontextmanager
async def process(module: str, environment: dict[str, str], socket: Path, *words: str) -> AsyncIterator[int]:
    """A server of ours until the end of the block; yields its pid once it listens."""
    command = [sys.executable, "-m", module, *words]
    running = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT)
    try:
        async with asyncio.timeout(30):
            while not socket.exists():
                await asyncio.sleep(0.02)
        yield running.pid
    finally:
        running.terminate()
        await running.wait()


async def round_trip(link: EdgeLink, target: str) -> float:
    """Seconds of one small exchange."""
    begun = time.perf_counter()
    await link.call("GET", target, project="default")
    return time.perf_counter() - begun


async def stream(link: EdgeLink, target: str) -> float:
    """MB/s of one download."""
    connection: EdgeConnection = await link.connection()
    head = link.request_head("GET", target.encode(), project="default", request_id="")
    begun = time.perf_counter()
    connection.begin(head + b"content-length: 0\r\n\r\n", whole=True)
    assert await connection.head() == 200
    got = 0
    async for chunk in connection.chunks():
        got += len(chunk)
    link.release(connection)
    assert got == STREAM_BYTES
    return got / 1e6 / (time.perf_counter() - begun)


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        token = "the-token-of-this-benchmark"
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}/src",
            "OPENDSEC_LISTEN": f"unix:{folder}/api.sock",
            "OPENDSEC_EDGES": f"local=unix:{folder}/local.sock",
            "OPENDSEC_EDGE_TOKEN": token,
            "OPENDSEC_DATABASE_URL": f"sqlite:///{folder}/iam.sqlite3",
            "OPENDSEC_LOG_LEVEL": "warning",
        }
        key = new_key(from_environment(environment), "default")
        double = "tests.cluster.apiserver.edge_double"
        async with (
            process(double, environment, folder / "local.sock", "local", f"{folder}/local.sock", token),
            process("opendsec.apiserver", environment, folder / "api.sock") as apiserver,
        ):
            through = EdgeLink("api", Address(path=folder / "api.sock"), token=key)
            direct = EdgeLink("edge", Address(path=folder / "local.sock"), token=token)
            await measure(through, direct, apiserver)
            through.close()
            direct.close()


async def measure(through: EdgeLink, direct: EdgeLink, apiserver: int) -> None:
    """Turns between both ways."""
    _, body = await through.call("POST", "/v1/sandboxes", body=b'{"spec":{"image":"debian"}}')
    sandbox = "/v1/sandboxes/" + body.split(b'"')[3].decode()
    times: dict[str, list[float]] = {"through": [], "direct": []}
    spent = cpu_s(apiserver)
    for _ in range(ROUNDS):
        times["through"].append(await round_trip(through, sandbox))
        times["direct"].append(await round_trip(direct, sandbox))
    spent = (cpu_s(apiserver) - spent) / ROUNDS
    medians = {way: statistics.median(values) * 1e3 for way, values in times.items()}
    target = f"{sandbox}/files/content?length={STREAM_BYTES}"
    rates = {"through": 0.0, "direct": 0.0}
    streaming = cpu_s(apiserver)
    for _ in range(3):
        rates["through"] = max(rates["through"], await stream(through, target))
        rates["direct"] = max(rates["direct"], await stream(direct, target))
    streaming = (cpu_s(apiserver) - streaming) / (3 * STREAM_BYTES / 1e9)
    print(f"{platform.node()} {platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, uvicorn {version('uvicorn')}, uvloop {version('uvloop')}")
    print(f"GET of a sandbox, p50 of {ROUNDS}: direct {medians['direct']:.3f} ms, through {medians['through']:.3f} ms,")
    print(f"  added {medians['through'] - medians['direct']:.3f} ms, apiserver CPU {spent * 1e3:.3f} ms a request")
    print(
        f"stream of {STREAM_BYTES >> 20} MiB: direct {rates['direct']:.0f} MB/s, through {rates['through']:.0f} MB/s,"
    )
    print(f"  apiserver CPU {streaming:.2f} s/GB; load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    uvloop.run(main())
