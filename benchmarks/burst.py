"""A burst of sandboxes over many images that no node has seen: on demand, cached, pulled and unpacked; in one run.

    .venv/bin/python -m benchmarks.burst_images        # once: 50 images on five bases, a toolkit, and all as tar.gz
    sudo .venv/bin/python -m benchmarks.burst [--sandboxes 200] [--megabytes-s 200] [--only …] [--plot DIR]

All arms have the same 200 sandboxes in the same order, 32 at a time, with the same task (compile and test a repository;
its output is checked), on the same edge code and a disk of their own (an ext4 of its own, counted by the kernel). The
store is MooseFS behind a cable of 200 MB/s. Memory and disk are cold at the beginning of every arm.

    on demand  layers are mounted, their data is read from the shared store as it is wanted
    cached     the same with a store on the node's own disk, which holds everything already
    unpack     each layer is fetched as tar.gz once, unpacked to the disk, and overlaid as a directory

Then workspace and toolkit alone (`layers`: mounted; `tar`: streamed into each sandbox as tar.gz and unpacked there),
on bases that are loaded on demand in both.

Bytes read are those that came over the cable; bytes written are those the node's disk was given, synced at the end.
Writes of the tasks themselves are in all arms. `--plot` draws both figures from the last run as SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.burst_images import STATE, TOOLKIT, Workspace, plan, tar_of
from benchmarks.burst_plot import draw
from benchmarks.shared import crowd, report
from benchmarks.shared.burst_node import Counts, Meters, Node, burst_node, drop_caches, run_long

import opendsec
from opendsec.store.images import ImageStore

ARMS = ("cached", "on demand", "unpack", "layers", "tar")
EDGE_MODULE = "opendsec.edge"
UNPACKING = "benchmarks.shared.unpacking_edge"
TASK_TIMEOUT_S = 600
LOOK = "/opt/agent/bin/busybox find /workspace/project -type f | wc -l"


@dataclass(slots=True)
class Times:
    """Seconds of each sandbox."""

    ready: list[float] = field(default_factory=list)
    """Create → ready for commands, with what had to be unpacked into it."""
    first: list[float] = field(default_factory=list)
    """Create → result of the first command, which reads a program of the image."""
    task: list[float] = field(default_factory=list)


Script = Callable[[opendsec.DSecClient, Workspace, Times], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What is asked of every arm."""

    order: list[Workspace]
    at_once: int
    layers: ImageStore
    tars: Path


async def work(sandbox: opendsec.Sandbox, one: Workspace, times: Times, begin: float, *, look: str = "true") -> None:
    """First command, then the task; its output is checked."""
    await sandbox.run_shell(look, check=True)
    times.first.append(time.perf_counter() - begin)
    done = await sandbox.run_shell(one.task, check=True, timeout=TASK_TIMEOUT_S)
    times.task.append(time.perf_counter() - begin - times.first[-1])
    assert done.stdout.split("\n")[-2] == one.expected, f"{one.name}: {done.stdout!r} {done.stderr!r}"


def image_script(_: Burst) -> Script:
    """Figure 10: the image as a whole."""

    async def script(client: opendsec.DSecClient, one: Workspace, times: Times) -> None:
        begin = time.perf_counter()
        async with client.container(opendsec.DSecContainerRunArgs(container_image=one.name)) as sandbox:
            times.ready.append(time.perf_counter() - begin)
            await work(sandbox, one, times, begin)

    return script


def layers_script(_: Burst) -> Script:
    """Figure 11: workspace and toolkit are layers over the base."""

    async def script(client: opendsec.DSecClient, one: Workspace, times: Times) -> None:
        begin = time.perf_counter()
        args = opendsec.DSecContainerRunArgs(container_image=one.base, workspace=one.name, toolkits=(TOOLKIT,))
        async with client.container(args) as sandbox:
            times.ready.append(time.perf_counter() - begin)
            await work(sandbox, one, times, begin, look=LOOK)

    return script


def tar_script(burst: Burst) -> Script:
    """Figure 11: workspace and toolkit are unpacked inside."""

    async def script(client: opendsec.DSecClient, one: Workspace, times: Times) -> None:
        begin = time.perf_counter()
        async with client.container(opendsec.DSecContainerRunArgs(container_image=one.base)) as sandbox:
            for name in (one.name, TOOLKIT):
                [layer] = burst.layers.get(name).layers
                archive = await asyncio.to_thread(tar_of(burst.tars, layer).read_bytes)
                await sandbox.commands.run(["tar", "-xzf", "-", "-C", "/"], stdin=archive, check=True, timeout=600)
            times.ready.append(time.perf_counter() - begin)
            await work(sandbox, one, times, begin, look=LOOK)

    return script


SCRIPTS: dict[str, Callable[[Burst], Script]] = {
    "cached": image_script,
    "on demand": image_script,
    "unpack": image_script,
    "layers": layers_script,
    "tar": tar_script,
}


async def burst_of(socket: Path, burst: Burst, script: Script, counts: Counts) -> Times:
    """All sandboxes; the first that fails ends the arm."""
    times = Times()
    async with opendsec.DSecClient(f"unix:{socket}", "", timeout=900) as client:

        async def one(workspace: Workspace) -> None:
            counts.running += 1
            await script(client, workspace, times)
            counts.running -= 1
            counts.completed += 1

        await crowd.each(burst.order, one, at_once=burst.at_once)
    return times


def arm(name: str, node: Node, burst: Burst, library: Path) -> dict[str, Any]:
    """One arm from cold; its figures."""
    store = node.shared / "store"
    settings: dict[str, str] = {}
    if name == "cached":
        store = node.disk / "store"
        run_long("cp", "-r", str(library / "store"), str(store))
    if name == "unpack":
        settings = {"BURST_TARS": str(node.shared / "tars"), "BURST_UNPACKED": str(node.disk / "unpacked")}
    drop_caches()
    counts = Counts()
    module = UNPACKING if name == "unpack" else EDGE_MODULE
    with node.edge(module, store, **settings) as socket, Meters(node, counts) as meters:
        cpu, begin = node.cpu_s(), time.perf_counter()
        times = asyncio.run(burst_of(socket, burst, SCRIPTS[name](burst), counts))
        took, cpu = time.perf_counter() - begin, node.cpu_s() - cpu
        run_long("sync", "-f", str(node.disk))
    for left in ("store", "unpacked"):
        if (node.disk / left).exists():
            shutil.rmtree(node.disk / left)
    rows = meters.as_rows()
    figures = {
        "arm": name,
        "seconds": took,
        "cpu_s": cpu,
        "read": rows[-1]["read"],
        "written": rows[-1]["written"],
        "writes": rows[-1]["writes"],
        "ready": times.ready,
        "first": times.first,
        "task": times.task,
        "samples": rows,
    }
    print_arm(figures)
    return figures


def print_arm(one: dict[str, Any]) -> None:
    """Three lines."""
    print(
        f"--- {one['arm']}: {len(one['task'])} sandboxes in {one['seconds']:.1f} s, CPU {one['cpu_s']:.1f} s; "
        f"read from the store {one['read'] / 1e6:.0f} MB, written to the disk {one['written'] / 1e6:.0f} MB "
        f"in {one['writes']:.0f} requests"
    )
    report.print_latency("create → ready", one["ready"])
    report.print_latency("create → first command's result", one["first"])
    report.print_latency("the task", one["task"])


def compare(found: dict[str, dict[str, Any]]) -> None:
    """Ratios of one run."""
    for slow, quick, what in (
        ("unpack", "on demand", "figure 10"),
        ("on demand", "cached", ""),
        ("tar", "layers", "figure 11"),
    ):
        if slow not in found or quick not in found:
            continue
        one, other = found[slow], found[quick]
        print(
            f"{slow} / {quick}: time {one['seconds'] / other['seconds']:.2f}, "
            f"start p50 {statistics.median(one['first']) / statistics.median(other['first']):.2f}, "
            f"CPU {one['cpu_s'] / other['cpu_s']:.2f}, written {one['written'] / max(1, other['written']):.2f}, "
            f"read {one['read'] / max(1, other['read']):.2f}  {what}".rstrip()
        )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=STATE, help="where burst_images has put everything")
    parser.add_argument("--workspaces", type=int, default=10, help="of each family, as burst_images was told")
    parser.add_argument("--sandboxes", type=int, default=200)
    parser.add_argument("--unpacked-sandboxes", type=int, default=100, help="of the arms layers and tar")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--megabytes-s", type=int, default=200, help="what the store's cable carries")
    parser.add_argument("--only", default=",".join(ARMS), help="comma-separated arms")
    parser.add_argument("--plot", type=Path, help="directory for burst.svg and burst-tar.svg, from the last run")
    options = parser.parse_args()
    results = options.state / "burst.json"
    if options.plot:
        for file in draw(json.loads(results.read_bytes()), options.plot):
            print(file)
        return
    report.print_machine()
    images = plan(options.workspaces)
    order = [images[number % len(images)] for number in range(options.sandboxes)]
    random.Random(3).shuffle(order)
    work_dir = options.state / "run"
    work_dir.mkdir(exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    with burst_node(work_dir, options.state, megabytes_s=options.megabytes_s) as node:
        for name in options.only.split(","):
            count = options.unpacked_sandboxes if name in ("layers", "tar") else options.sandboxes
            burst = Burst(
                order=order[:count],
                at_once=options.at_once,
                layers=ImageStore(options.state / "store"),
                tars=node.shared / "tars",
            )
            found[name] = arm(name, node, burst, options.state)
            results.write_text(json.dumps({"megabytes_s": options.megabytes_s, "arms": found}), encoding="utf-8")
    work_dir.rmdir()
    compare(found)


if __name__ == "__main__":
    main()
