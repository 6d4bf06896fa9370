"""Packing 10,000 files of 200 MB while their sandbox goes on, through the SDK; and starting from what was packed.

    sudo .venv/bin/python -m benchmarks.pack [--rounds 5] [--files 10000] [--megabytes 200] [--chain 20]

Each round changes one file and packs under a new name, so each makes a layer. Beside it, in the same run: GNU tar and
sha256sum of the same tree, which is the least that a commit into a layer of the usual kind does (a registry's layer is
compressed, too). Then sandboxes of the packed image are started in turn with sandboxes of the image it was built on,
and the whole trees of source and copy are compared. The chain packs what was started from the last pack, again and
again.

A platform of its own, with a busybox image made on the spot. `stood still` is the time in which no process of the
sandbox ran.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared import report
from benchmarks.shared.platforms import Platform, add_options, started

import opendsec
from opendsec.store.erofs import mkfs_version

PACK_GOAL_S = 1.5
START_GOAL = 1.1
"""Of the time of a normal create; two medians of one run differ by about so much."""
DIRECTORIES = 100
_ALL = "find . -xdev \\( -path ./proc -o -path ./sys -o -path ./dev -o -path ./tmp \\) -prune -o"
DIGEST = (
    f"cd / && ({_ALL} -type d -print | grep -v '^\\.$\\|^\\./etc$' | sort | xargs stat -c '%n %f %u %g %Y';"
    f" {_ALL} ! -type d -print | sort | xargs stat -c '%n %f %u %g %h %s %Y %N';"
    f" {_ALL} -type f -print | sort | xargs sha256sum) | sha256sum"
)
"""Of the whole tree as a sandbox sees it: names, kinds, modes, owners, times, links and bytes; sizes and link counts of
directories are the file system's own business, times of / and /etc each node's."""


async def fill(sandbox: opendsec.Sandbox, *, files: int, megabytes: int) -> None:
    """So many files of random bytes."""
    each = max(1, files // DIRECTORIES)
    size = megabytes * 1_000_000 // (each * DIRECTORIES)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for directory in range(DIRECTORIES):
            below = Path(folder, f"d{directory}")
            below.mkdir()
            for number in range(each):
                (below / f"f{number}").write_bytes(os.urandom(size))
        done = await sandbox.files.upload(folder, "/work", user="root")
    print(f"{done.files} entries, files of {size} bytes in {DIRECTORIES} directories", flush=True)


async def packs(platform: Platform, sandbox: opendsec.Sandbox, rounds: int) -> opendsec.PackedImage:
    """Wall time, CPU of everything, time standing still; the last image."""
    walls, still, cpus, tars = [], [], [], []
    made: opendsec.PackedImage | None = None
    for number in range(rounds):
        await sandbox.run_shell(f"echo {number} > /work/round", user="root", check=True)
        cpu, began = platform.cpu_s(), time.perf_counter()
        made = await sandbox.pack_diff(f"round-{number}")
        walls.append(time.perf_counter() - began)
        cpus.append(platform.cpu_s() - cpu)
        still.append(made.details.frozen_ms / 1e3)
        tars.append(await asyncio.to_thread(tar_of, platform, sandbox.id))
    assert made is not None
    report.print_latency("pack_diff, through the SDK", walls, cpu=f"CPU {statistics.median(cpus) * 1e3:.0f} ms")
    report.print_latency("  of which the sandbox stood still", still)
    report.print_latency("tar and sha256sum of the same tree", tars)
    print(f"layer: {made.details.files} entries, {made.details.layer_bytes / 1e6:.1f} MB in the store", flush=True)
    report.print_goal("pack_diff", statistics.median(walls), PACK_GOAL_S, "s")
    return made


def tar_of(platform: Platform, sandbox_id: str) -> float:
    """Seconds that tar needs to write the sandbox's upper directory into a file, and sha256sum to name it."""
    assert platform.local is not None
    edge = platform.local.state_dir / "edge" / platform.local.edge
    upper = edge / "sandboxes" / sandbox_id / "box" / "upper"
    with tempfile.TemporaryDirectory(dir=platform.local.state_dir) as folder:
        archive = Path(folder) / "layer.tar"
        began = time.perf_counter()
        subprocess.run(
            ["tar", "--xattrs", "--xattrs-include=*", "-C", upper, "-cf", archive, "."], check=True, timeout=600
        )
        subprocess.run(["sha256sum", archive], check=True, timeout=600, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began


async def starts(client: opendsec.DSecClient, plain: str, packed: str, rounds: int) -> None:
    """Creates of both images in turn."""
    found: dict[str, list[float]] = {plain: [], packed: []}
    for _ in range(rounds):
        for image in (plain, packed):
            began = time.perf_counter()
            sandbox = await client.run_container(opendsec.DSecContainerRunArgs(container_image=image))
            found[image].append(time.perf_counter() - began)
            await sandbox.stop()
    report.print_latency("create from the image it was built on", found[plain])
    report.print_latency("create from the packed image", found[packed])
    print(f"  the first one, which mounts the new layer: {found[packed][0] * 1e3:.2f} ms", flush=True)
    ratio = statistics.median(found[packed]) / statistics.median(found[plain])
    report.print_goal("create from a pack, of a normal create", ratio, START_GOAL, "")


async def same_tree(client: opendsec.DSecClient, source: opendsec.Sandbox, packed: str) -> None:
    """Ends the benchmark when a copy shows another tree than its source."""
    args = opendsec.DSecContainerRunArgs(container_image=packed)
    async with client.container(args) as copy:
        digests = [(await one.run_shell(DIGEST, user="root", check=True)).stdout.split()[0] for one in (source, copy)]
    if len(set(digests)) != 1:
        sys.exit(f"the trees differ: {digests}")
    print(f"tree digests are equal: {digests[0][:16]}…", flush=True)


async def chain(client: opendsec.DSecClient, image: str, length: int) -> None:
    """Change, pack, start from that, and so on."""
    packing, creating = [], []
    for number in range(length):
        began = time.perf_counter()
        sandbox = await client.run_container(opendsec.DSecContainerRunArgs(container_image=image))
        creating.append(time.perf_counter() - began)
        change = (
            f"mkdir -p /chain && echo {number} > /chain/{number} && rm -f /chain/{number - 2} && echo {number} > /last"
        )
        await sandbox.run_shell(change, user="root", check=True)
        began = time.perf_counter()
        image = await sandbox.pack_diff(f"link-{number}")
        packing.append(time.perf_counter() - began)
        if number == length - 1:
            await same_tree(client, sandbox, image)
        await sandbox.stop()
    report.print_latency(f"pack of a small change, chain of {length}", packing)
    report.print_latency("create from the chain so far", creating)
    print(f"  first {creating[0] * 1e3:.2f} ms, last {creating[-1] * 1e3:.2f} ms", flush=True)


async def run(platform: Platform, options: argparse.Namespace) -> None:
    """Everything, one after the other."""
    async with platform.client() as client, client.container(platform.args(ttl_running_stop=None)) as source:
        await fill(source, files=options.files, megabytes=options.megabytes)
        packed = await packs(platform, source, options.rounds)
        await starts(client, platform.image, packed, max(20, options.rounds))
        await same_tree(client, source, packed)
        await chain(client, platform.image, options.chain)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--chain", type=int, default=20)
    parser.set_defaults(store=Path("/nonexistent"))  # packs are published: never into a store in use
    options = parser.parse_args()
    report.print_machine()
    print(f"mkfs.erofs {'.'.join(map(str, mkfs_version()))}\n", flush=True)
    with started(options) as platform:
        asyncio.run(run(platform, options))


if __name__ == "__main__":
    main()
