"""Ten minutes of disorder: random creates, commands, files, pauses and ends by several client processes, while edge,
apiserver, supervisor and clients are killed and halted; then every answer anybody got is held against the truth.

    .venv/bin/python -m benchmarks.chaos [--seconds 600] [--seed 1] [--workers 3] [--pause 5] [--image NAME]

Exit status 0: every outcome had a type, every acknowledged thing was true, no command ran twice, nothing was lost, and
nothing was left after `opendsec down`. 1: there are findings; they are printed, and diaries and logs stay in a
directory that is named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.disorder import diary, remains
from benchmarks.disorder.faults import Client, Disorder
from benchmarks.disorder.judge import Fate, Judge, Verdict
from benchmarks.disorder.worker import ANSWER_S
from benchmarks.shared import report
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec
from opendsec.model.node import LIVE_STATES, SandboxState

SHORTEST_PAUSE_S = 0.3
SPARE_DESCRIPTORS = 24
"""Pools and threads of a server that has worked may keep so many more than one that has not."""
SERVERS = frozenset({"edge", "apiserver", "supervisor"})
"""The launcher keeps a user namespace of each range of ids that was ever used, by design."""
SETTLE_S = 20.0
IDLE_S = 90.0
LONG_S = 300.0
"""Descriptors are counted at the end of a run at least so long."""
SHOWN = 40


def disturb(disorder: Disorder, rng: random.Random, *, pause_s: float) -> None:
    """Until the time is over; then the platform is whole, and the clients come to their end."""
    for client in disorder.clients:
        disorder.start_client(client)
    while time.time() < disorder.until:
        time.sleep(rng.uniform(SHORTEST_PAUSE_S, pause_s))
        disorder.look_after_clients()
        disorder.strike(rng)
    disorder.restore()
    patience = time.monotonic() + 3 * ANSWER_S
    while disorder.look_after_clients():
        if time.monotonic() > patience:
            raise SystemExit("a client process did not come to its end")
        time.sleep(0.1)


async def last_words(platform: Platform) -> tuple[dict[str, Fate], dict[str, list[str]]]:
    """What the platform says of all sandboxes, and the ledgers of those that live; then they are stopped."""
    fates: dict[str, Fate] = {}
    ledgers: dict[str, list[str]] = {}
    async with platform.client() as client:
        for state in (None, SandboxState.STOPPED, SandboxState.FAILED):
            async for status in client.list(state=state, page_size=100):
                live = status.state in LIVE_STATES
                reason = None if status.end_reason is None else str(status.end_reason)
                fates[status.sandbox_id] = Fate(str(status.state), reason, status.spec.labels.get("op", ""), live)
        async with asyncio.TaskGroup() as group:
            for sandbox_id, fate in fates.items():
                if fate.live:
                    group.create_task(_farewell(client, sandbox_id, ledgers))
    return fates, ledgers


async def _farewell(client: opendsec.DSecClient, sandbox_id: str, ledgers: dict[str, list[str]]) -> None:
    sandbox = await client.connect(sandbox_id)
    if await sandbox.files.exists("/ledger"):
        ledgers[sandbox_id] = (await sandbox.files.read("/ledger")).split()
    else:
        ledgers[sandbox_id] = []
    await sandbox.stop()


def judge(disorder: Disorder, fates: dict[str, Fate], ledgers: dict[str, list[str]]) -> Verdict:
    """Everything the clients wrote, held against what the platform and the sandboxes say."""
    verdicts = Judge(fates, killed=frozenset(disorder.killed))
    for client in disorder.clients:
        lines = list(diary.read(disorder.folder / f"worker-{client.worker}"))
        mine = {
            line.facts["sandbox"] for line in lines if line.event == "ask" and line.facts["kind"] in ("run", "connect")
        }
        for sandbox_id in sorted(mine & ledgers.keys()):
            name = f"end-{sandbox_id}"
            lines.append(diary.Line("ask", name, {"kind": "audit", "sandbox": sandbox_id}))
            lines.append(diary.Line("answer", name, {"lines": ledgers[sandbox_id]}))
        verdicts.read(lines)
    verdict = verdicts.finish()
    verdict.findings += [f"a client process failed: {text}" for text in disorder.failed_lives]
    return verdict


def many_descriptors(platform: Platform, before: dict[str, int], *, patience_s: float) -> list[str]:
    """Of servers that have nothing to do any more; idle connections are closed after 75 s."""
    until = time.monotonic() + patience_s
    while True:
        now = {name: remains.descriptors(pid) for name, pid in platform.pids(supervisor=True).items()}
        found = [
            f"{name} has {count} descriptors, {before[name]} at the beginning"
            for name, count in now.items()
            if name in SERVERS and count > before[name] + SPARE_DESCRIPTORS
        ]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.5)


def left_over(platform: Platform, environment: dict[str, str]) -> list[str]:
    """Everything after `down`."""
    assert platform.local is not None
    local, group = platform.local, environment["OPENDSEC_EDGE_CGROUP"]
    found = []
    words = [sys.executable, "-m", "opendsec.main", "down"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout.strip())
    if done.returncode:
        found.append(f"down failed: {done.stderr}")
    until = time.monotonic() + SETTLE_S
    while True:
        left = [
            *remains.processes(local.run_dir, group),
            *remains.groups(group),
            *remains.mounts(local.state_dir / "edge", local.run_dir),
            *remains.files(local.state_dir, local.run_dir),
        ]
        if not left or time.monotonic() > until:
            return found + left
        time.sleep(0.2)


def show(disorder: Disorder, verdict: Verdict, seconds: float) -> None:
    """The tables."""
    print(f"\n{seconds:.0f} s, seed {disorder.seed}; faults:")
    for name, count in sorted(disorder.done.items()):
        print(f"  {name:24} {count:6}")
    print("\nasked, and what came of it:")
    for (what, outcome), count in sorted(verdict.outcomes.items()):
        print(f"  {what:24} {outcome:24} {count:6}   slowest {verdict.slowest_s.get(what, 0.0):6.1f} s")
    print(f"\n{verdict.sandboxes} sandboxes, {verdict.live_at_end} of them alive at the end")
    print(f"{verdict.ran} commands checked against the ledgers of their sandboxes")
    print(f"{len(verdict.findings)} findings")
    for text in verdict.findings[:SHOWN]:
        print(f"  {text}")


def chaos(options: argparse.Namespace, folder: Path) -> int:
    """The number of findings."""
    with started(options) as platform:
        assert platform.local is not None
        group = platform.groups[-1].name
        environment = platform.local.environment(
            {**os.environ, "OPENDSEC_EDGE_CGROUP": group, "OPENDSEC_API_URL": platform.api_url}
        )
        environment["OPENDSEC_API_KEY"] = platform.api_key
        before = {name: remains.descriptors(pid) for name, pid in platform.pids(supervisor=True).items()}
        disorder = Disorder(platform, environment, folder, options.seed, time.time() + options.seconds)
        disorder.clients += [Client(number) for number in range(options.workers)]
        begin = time.monotonic()
        try:
            disturb(disorder, random.Random(options.seed), pause_s=options.pause)
            fates, ledgers = asyncio.run(last_words(platform))
            seconds = time.monotonic() - begin
            verdict = judge(disorder, fates, ledgers)
            if options.seconds >= LONG_S:
                verdict.findings += many_descriptors(platform, before, patience_s=IDLE_S)
            verdict.findings += left_over(platform, environment)
        finally:
            for client in disorder.clients:
                if client.process is not None:
                    client.process.kill()
                    client.process.wait(30)
            shutil.copy(platform.local.log_file, folder)
        show(disorder, verdict, seconds)
        return len(verdict.findings)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two faults, at most")
    add_options(parser)
    options = parser.parse_args()
    if options.api:
        parser.error("chaos kills the platform's processes: it needs one of its own, without --api")
    report.print_machine()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opendsec-chaos-")))
        keep = folder.with_name(f"{folder.name}-kept")
        try:
            found = chaos(options, folder)
        except BaseException:
            shutil.copytree(folder, keep)
            print(f"diaries and logs are kept in {keep}")
            raise
        if found:
            shutil.copytree(folder, keep)
            print(f"diaries and logs are kept in {keep}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
