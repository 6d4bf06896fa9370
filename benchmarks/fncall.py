"""FnCalls beside sandboxes: calls per second against create-exec-stop, latency of a warm function, drift.

    sudo .venv/bin/python -m benchmarks.fncall [--rounds 5] [--sandboxes 60] [--calls 1000] [--drift 10000]

Both sides do the same work in the same run, through SDK, apiserver and edge: a Python function of two numbers. A
sandbox is made, runs `python3 -c` with it, and is stopped; or /bin/true instead, the least a sandbox can do, as a lower
bound. A call is a function call in a warm container; `fncall_many` sends all of them in one request. Rounds are
interleaved, medians over rounds are printed. CPU is all of it, from control groups: this client, the platform, and what
runs inside. Hop by hop: `engine alone` is the same call at the engine itself, in this process, with no HTTP before it;
`SDK and edge` leaves the apiserver out.

Drift: memory of the edge, its descriptors, processes in containers, files in its directories and control groups after
the first tenth of the calls and after the last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.shared import belongings, cost, crowd, report
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec
from opendsec.backends.container import ContainerBackend
from opendsec.fncall.engine import Engine
from opendsec.fncall.settings import FnCallSettings
from opendsec.host.local import EDGE
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts

RATIO_GOAL = 10.0
P50_GOAL_MS = 5.0
AT_ONCE = 8
PROGRAM = "def add(a, b):\n    return a + b\n"
COMMAND = ["python3", "-c", "print(2 + 3)"]

Rounds = dict[str, list[tuple[float, float]]]
"""What → (calls per second, CPU-ms per call) of each round."""


def function_call() -> opendsec.DSecFnCallArgs:
    """Two numbers."""
    return opendsec.DSecFnCallArgs(task_type="function", code=PROGRAM, function="add", arguments=(2, 3))


async def timed(platform: Platform, found: Rounds, what: str, count: int, work: Callable[[], Awaitable[None]]) -> None:
    """One round."""
    cpu, begin = platform.cpu_s(), time.perf_counter()
    await work()
    took = time.perf_counter() - begin
    found.setdefault(what, []).append((count / took, (platform.cpu_s() - cpu) * 1e3 / count))


async def sandboxes(platform: Platform, client: opendsec.DSecClient, count: int, command: list[str]) -> None:
    """Create, execute, stop, so many times."""

    async def one(_: int) -> None:
        sandbox = await client.run_container(platform.args())
        result = await sandbox.commands.run(command)
        assert result.exit_code == 0, result
        await sandbox.stop()

    await crowd.each(range(count), one, at_once=AT_ONCE)


async def calls(client: opendsec.DSecClient, count: int) -> None:
    """One request each."""

    async def one(_: int) -> None:
        assert (await client.fncall(function_call())).value == "5"

    await crowd.each(range(count), one, at_once=AT_ONCE)


async def many(client: opendsec.DSecClient, count: int) -> None:
    """All in one request."""
    done = 0
    async for _, outcome in client.fncall_many([function_call()] * count):
        assert not isinstance(outcome, opendsec.OpenDSecError), outcome
        assert outcome.value == "5"
        done += 1
    assert done == count


async def latency(client: opendsec.DSecClient, count: int) -> list[float]:
    """One after the other."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        await client.fncall(function_call())
        found.append(time.perf_counter() - begin)
    return found


@asynccontextmanager
async def engine_alone(platform: Platform) -> AsyncIterator[Engine]:
    """An engine in this process, in directories of its own beside the platform's."""
    assert platform.local is not None
    state, run = platform.local.state_dir / "engine", platform.local.run_dir / "engine"
    name = f"{platform.groups[1].name}-engine"
    for folder in (state, run):
        folder.mkdir()
    store = ImageStore(platform.local.state_dir / "store")
    with LayerMounts(DirectLoader(store, state / "metadata"), run / "layers") as layers:
        containers = ContainerBackend(layers=layers, state_dir=state, run_dir=run / "edge", cgroup_root=name)
        await containers.open()
        settings = FnCallSettings(state_dir=state / "fncall", run_dir=run / "fncall", image=platform.image)
        engine = Engine(settings=settings, containers=containers, images=store)
        await engine.open()
        try:
            yield engine
        finally:
            await engine.close()
            await containers.close()
            layers.unmount_all()
            choose_driver(find_mounts(), root=name).remove_root()


async def engine_latency(platform: Platform, count: int) -> list[float]:
    """As `latency`, without HTTP."""
    spec, found = function_call().to_spec(), []
    async with engine_alone(platform) as engine:
        for _ in range(count):
            begin = time.perf_counter()
            result = await engine.call(spec, project="default")
            found.append(time.perf_counter() - begin)
            assert result.value == "5"
    return found


def holdings(platform: Platform) -> dict[str, float]:
    """What the platform has now."""
    assert platform.local is not None
    pids = platform.pids()
    places = [Path(path) for path in platform.places]
    found: dict[str, float] = dict(
        belongings.count({EDGE: pids[EDGE]}, cgroup_root=platform.groups[1].name, places=places)
    )
    found["MiB of edge"] = cost.rss_mib(pids[EDGE])
    return found


async def drift(platform: Platform, client: opendsec.DSecClient, count: int) -> None:
    """Many calls; what is held in the middle and at the end, when everything idle has been ended."""
    await many(client, count // 10)
    before = holdings(platform)
    await many(client, count - count // 10)
    after = holdings(platform)
    print(f"\ndrift over {count} calls (after the first tenth -> after the last)")
    for name, value in before.items():
        print(f"  {name:36} {value:10.1f} -> {after[name]:10.1f}")


async def measure(options: argparse.Namespace, platform: Platform) -> None:
    """Rounds, latencies, drift, goals."""
    found: Rounds = {}
    async with platform.client() as client:
        await sandboxes(platform, client, AT_ONCE, COMMAND)
        await many(client, AT_ONCE * 20)
        for _ in range(options.rounds):
            for what, command in (("create, python3 -c, stop", COMMAND), ("create, /bin/true, stop", ["/bin/true"])):
                count = options.sandboxes
                await timed(platform, found, what, count, lambda: sandboxes(platform, client, count, command))  # noqa: B023 awaited at once
            await timed(platform, found, "fncall, a request each", options.calls, lambda: calls(client, options.calls))
            await timed(platform, found, "fncall_many, one request", options.calls, lambda: many(client, options.calls))
        through_sdk = await latency(client, options.calls)
        async with platform.edge_client() as edge:
            through_edge = await latency(edge, options.calls)
        alone = await engine_latency(platform, options.calls)
        await drift(platform, client, options.drift)
    print(f"\n{'':28}{'per second':>12}{'CPU-ms each':>14}   (medians of {options.rounds} rounds, {AT_ONCE} at once)")
    for what, rounds in found.items():
        rate, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{what:28}{rate:12.1f}{cpu:14.2f}")
    print()
    report.print_latency("warm function, engine alone", alone)
    report.print_latency("warm function, SDK and edge", through_edge)
    report.print_latency("warm function, through SDK", through_sdk)
    print()
    judge(found, through_sdk)


def judge(found: Rounds, through_sdk: list[float]) -> None:
    """Goals."""
    rates = {what: statistics.median(rate for rate, _ in rounds) for what, rounds in found.items()}
    cpus = {what: statistics.median(cpu for _, cpu in rounds) for what, rounds in found.items()}
    many_rate = rates["fncall_many, one request"]
    report.print_goal(
        "calls/s of create-exec-stop, the same function",
        many_rate / rates["create, python3 -c, stop"],
        RATIO_GOAL,
        "x",
        at_least=True,
    )
    print(
        f"       the same in CPU: {cpus['create, python3 -c, stop'] / cpus['fncall_many, one request']:.1f}x;"
        f" against /bin/true: {many_rate / rates['create, /bin/true, stop']:.1f}x calls/s"
    )
    report.print_goal("p50 of a warm function through the SDK", statistics.median(through_sdk) * 1e3, P50_GOAL_MS, "ms")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sandboxes", type=int, default=60, help="in each round")
    parser.add_argument("--calls", type=int, default=1000, help="in each round")
    parser.add_argument("--drift", type=int, default=10_000, help="calls of the drift check")
    options = parser.parse_args()
    report.print_machine()
    settings = {"OPENDSEC_FNCALL_IMAGE": options.image} if options.image else {}
    with started(options, **settings) as platform:
        asyncio.run(measure(options, platform))


if __name__ == "__main__":
    main()
