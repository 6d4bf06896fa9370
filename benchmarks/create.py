"""What one sandbox costs at the edge, from the request to "ready for commands", beside container runtimes in one run.

    sudo .venv/bin/python -m benchmarks.create [--rounds 5] [--starts 50] [--only crun,bwrap] [--image NAME]

CPU is all of it: this client, the edge, the launcher, the sandbox's own processes, from the control groups they run in.
Ours is a request over the edge's socket: admission, journal, directories, control groups with limits, namespaces,
overlay, seccomp, and a guest agent that has greeted; `create and stop` has its end and clean-up too. Theirs is `run` of
/bin/true with its end and clean-up, so the fair pair is `create and stop`; the goal is held by `create` alone.
Rounds are interleaved, medians over rounds are printed. What only the launcher costs is in `benchmarks.launch`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

from benchmarks import launch
from benchmarks.shared import crowd, report
from benchmarks.shared.platforms import Platform, add_options, started

from opendsec.apiserver.link import EdgeLink
from opendsec.model.node import SandboxStatus
from opendsec.server.runner import Address
from opendsec.wire import codec
from opendsec.wire.contracts import CreateRequest

CPU_GOAL_MS = 3.0
OF_CRUN_GOAL = 0.5
AT_ONCE = 8


async def ours(platform: Platform, link: EdgeLink, starts: int, at_once: int) -> tuple[launch.Round, launch.Round]:
    """(create, create and stop)"""
    body = codec.encode(CreateRequest(spec=platform.args().to_spec()))
    found: list[str] = []

    async def create(_: int) -> None:
        _, answer = await link.call("POST", "/v1/sandboxes", body=body)
        found.append(codec.decode_answer(answer, SandboxStatus).sandbox_id)

    async def stop(sandbox_id: str) -> None:
        await link.call("DELETE", f"/v1/sandboxes/{sandbox_id}")

    cpu, wall = platform.cpu_s(), time.perf_counter()
    await crowd.each(range(starts), create, at_once=at_once)
    ready_cpu, ready = platform.cpu_s(), time.perf_counter()
    await crowd.each(found, stop, at_once=at_once)
    both_cpu, both = platform.cpu_s() - cpu, time.perf_counter() - wall
    return (
        launch.Round((ready_cpu - cpu) * 1e3 / starts, (ready - wall) * 1e3 / starts, starts / (ready - wall)),
        launch.Round(both_cpu * 1e3 / starts, both * 1e3 / starts),
    )


async def compare(platform: Platform, bench: launch.Bench, options: argparse.Namespace) -> None:
    """Interleaved rounds, then the table."""
    assert platform.local is not None
    only = set(filter(None, options.only.split(",")))
    runtimes = {
        name: command for name, command in launch.commands(bench).items() if not only or name.split()[0] in only
    }
    found: dict[str, list[launch.Round]] = {}
    absent: dict[str, str] = {}
    link = EdgeLink(platform.local.edge, Address(path=platform.local.edge_socket))
    with contextlib.closing(link):
        await ours(platform, link, options.starts * 2, AT_ONCE)
        for _ in range(options.rounds):
            await our_turn(platform, link, options.starts, found)
            for name, command in runtimes.items():
                if name not in absent:
                    their_turn(bench, name, command, options.starts, found, absent)
    launch.print_table(found, absent)
    judge(found)


async def our_turn(platform: Platform, link: EdgeLink, starts: int, found: dict[str, list[launch.Round]]) -> None:
    """One after the other, then some at once."""
    for at_once, words in ((1, ""), (AT_ONCE, f", {AT_ONCE} at once")):
        create, both = await ours(platform, link, starts * at_once, at_once)
        found.setdefault(f"opendsec create{words}", []).append(create)
        found.setdefault(f"opendsec create and stop{words}", []).append(both)


def their_turn(
    bench: launch.Bench,
    name: str,
    command: Callable[[str], list[str]],
    starts: int,
    found: dict[str, list[launch.Round]],
    absent: dict[str, str],
) -> None:
    """One runtime."""
    slow = name.startswith(("runsc", "podman"))
    outcome = launch.theirs(bench, command, max(2, starts // 10) if slow else starts)
    if isinstance(outcome, str):
        absent[name] = outcome
    else:
        found.setdefault(name, []).append(outcome)


def judge(found: dict[str, list[launch.Round]]) -> None:
    """Against the goals."""
    medians = {name: statistics.median(each.cpu_ms for each in rounds) for name, rounds in found.items()}
    many = f", {AT_ONCE} at once"
    report.print_goal("create → ready, one after the other", medians["opendsec create"], CPU_GOAL_MS, "CPU-ms")
    report.print_goal(f"create → ready{many}", medians[f"opendsec create{many}"], CPU_GOAL_MS, "CPU-ms")
    crun = medians.get("crun run, cgroupfs") or medians.get("crun run, cgroups disabled")
    if crun:
        report.print_goal("create of crun run", medians["opendsec create"] / crun, OF_CRUN_GOAL, "")
        both = medians["opendsec create and stop"] / crun
        report.print_goal("create and stop of crun run", both, OF_CRUN_GOAL, "")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--only", default="", help="comma-separated first words of the runtimes to compare with")
    options = parser.parse_args()
    if options.api:
        parser.error("CPU of all processes can only be measured on a platform of its own")
    report.print_machine()
    for program in ("crun", "runc", "bwrap", "podman", "runsc"):
        print(f"  {program}: {launch.version(program)}")
    with launch.bench() as bench, started(options, OPENDSEC_EDGE_KEEP_ENDED="2") as platform:
        # What the runtimes are started from is this process, so their CPU is counted where it runs.
        asyncio.run(compare(platform, dataclasses.replace(bench, cgroup=platform.groups[0]), options))


if __name__ == "__main__":
    main()
