"""A first start from a store that is far away: how long until a first command is done, and what had to be moved for it.

    .venv/bin/python -m benchmarks.cold_start [--mb 50] [--latency-ms 0] [--repeat 3] [--only print] [--arms fuse+p]

Nothing of the image is on the node, and the page cache is emptied before each start (the host's own programs are
warmed again by a sandbox from another image). Then the command is run again with the page cache emptied, and once
more. Arms, all in one run, each with every command:

    local       the same image on this node's disk, read directly: what the others are held to
    direct      data on a mounted file system (FUSE) that gives so many MB/s
    fuse        HTTP at so many MB/s, the FUSE loader
    fanotify    HTTP at so many MB/s, the fanotify loader
    unpack      tar.gz over the same HTTP, unpacked to a directory while it arrives, and a sandbox on that

Without more they have no profile: the first start of an image anywhere. Then one is recorded, and with it every other
first start of a node is like +p, unless it does something else (+other: the profile of another command; what is read
ahead in vain counts) or OPENDSEC_START_WAIT_MS is 0 (+now: ready at once, while what the profile says is still read).

It prints two kinds of tables in Markdown: medians of each command, and at the end which goals were kept. All arms of a
repetition follow each other, so on a busy machine ratios count; wall clock and CPU only beside their neighbours.

The throttle is a token bucket in a server process of its own (`benchmarks.shared.slow_store`). Bytes fetched are the
server's count: data, packs, tables, metadata, profiles and all (of `direct` data alone); bytes touched the pages of the
image in memory after the command in the arm `local`; bytes written the blocks the arm's directories have grown by; CPU
is that of this process, its loaders and the sandbox.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.shared import cost
from benchmarks.shared.cold_report import Figures, goals, table
from benchmarks.shared.report import print_machine
from benchmarks.shared.slow_store import sent
from tests.images import make_busybox_image

from opendsec.backends.base import StartPlan
from opendsec.backends.container import ContainerBackend
from opendsec.errors import NodeError
from opendsec.guest.base import Exit, Guest, Output, StartCommand
from opendsec.host.loader import unmount_data
from opendsec.linux import libc
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import Image
from opendsec.model.spec import Resources, SandboxSpec
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading.base import Loader
from opendsec.store.loading.control import ask
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.loading.fanotify import FanotifyLoader
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import SOCKET, FuseLoader
from opendsec.store.loading.recording import found_in_memory, keep_profile, profile_of
from opendsec.store.loading.settings import START_WAIT_MS
from opendsec.store.loading.sources import DirectoryFiles, open_files
from opendsec.store.loading.starting import Starts
from opendsec.store.mounts import LayerMounts, unmount_layers

ROOT = "opendsec-bench-cold"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
TURN = """set -e
rm -rf /tmp/work && mkdir -p /tmp/work && cd /tmp/work
git init -q . && git config user.email a@b.c && git config user.name agent
python3 - <<'END'
for n in range(12):
    open(f'm{n}.py', 'w').write(''.join(f'def f{i}(x):\\n    return x * {i} + {n}\\n' for i in range(40)))
    open(f'test_m{n}.py', 'w').write(f'import unittest, json, re, m{n}\\nclass T(unittest.TestCase):\\n' + ''.join(
        f'    def test_{i}(self):\\n        self.assertEqual(m{n}.f{i}(2), {2 * i + n})\\n' for i in range(40)))
END
git add . && git commit -q -m first
python3 -m unittest -q
printf '#include <stdio.h>\\nint main(void){long s=0;for(long i=0;i<1000;i++)s+=i;printf("%%ld\\\\n",s);}\\n' > main.c
gcc -O1 -o main main.c && ./main
grep -rn 'def f39' --include=*.py . | wc -l && git log --oneline | wc -l
"""
COMMANDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "true": (("/bin/true",), ""),
    "print": (("python3", "-c", "print(1)"), "1"),
    "imports": (("python3", "-c", "import json, asyncio, ssl, urllib.request; print(2)"), "2"),
    "git": (("git", "--version"), "git version"),
    "read": (("/bin/sh", "-c", "cat /usr/lib/x86_64-linux-gnu/lib*.so.* | wc -c"), ""),
    "turn": (("/bin/sh", "-c", TURN), "499500\n12\n1"),
}
"""Name → program, and what its output begins with."""
ARMS = ("local", "direct", "direct+p", "fuse", "fuse+p", "fuse+now", "fuse+other", "fanotify", "fanotify+p", "unpack")
OTHER = {"imports": "git"}
"""Whose profile is another command's: that of `imports` where nothing is said."""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Directories, the slow servers, and the image."""

    work: Path
    run: Path
    store: ImageStore
    image: Image
    warm: Image
    url: str
    counts: Mapping[str, Path]
    groups: tuple[Path, ...]
    results: dict[tuple[str, str], list[Figures]] = field(default_factory=lambda: defaultdict(list))


class Layers:
    """LayerMounts of the image that is measured, and of the one that warms the host up."""

    def __init__(self, warm: LayerMounts, warm_name: str) -> None:
        self.warm = warm
        self._warm_name = warm_name
        self.measured: Any = None

    async def acquire_soon(self, image: Image) -> tuple[int, ...]:
        chosen = self.warm if image.name == self._warm_name else self.measured
        found: tuple[int, ...] = await chosen.acquire_soon(image)
        return found


class Unpacked:
    """A tree that comes as tar.gz and is unpacked as it arrives."""

    def __init__(self, url: str, target: Path) -> None:
        self._url = url
        self._target = target
        self._fd = -1

    async def acquire_soon(self, image: Image) -> tuple[int, ...]:
        return await asyncio.to_thread(self._acquire)

    def _acquire(self) -> tuple[int, ...]:
        self._target.mkdir()
        self._target.chmod(0o755)
        with subprocess.Popen(["curl", "-sSf", self._url], stdout=subprocess.PIPE) as fetch:
            subprocess.run(["tar", "-xzpf", "-", "-C", self._target, "--numeric-owner"], stdin=fetch.stdout, check=True)
        if fetch.returncode:
            sys.exit("the archive could not be fetched")
        self._fd = os.open(self._target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return (self._fd,)

    def close(self) -> None:
        os.close(self._fd)


# ── one start ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def start(backend: ContainerBackend, bench: Bench, image: Image) -> tuple[float, Guest, StartPlan]:
    """Seconds until the sandbox takes commands."""
    sandbox_id = new_sandbox_id("bench")
    state, run = bench.work / "sandboxes" / sandbox_id, bench.run / sandbox_id
    state.mkdir(parents=True)
    run.mkdir()
    spec = SandboxSpec(image=image.name, resources=Resources(memory_limit_mb=1024))
    plan = StartPlan(sandbox_id=sandbox_id, spec=spec, image=image, state_dir=state, run_dir=run, slot=0)
    begin = time.perf_counter()
    running = await backend.start(plan)
    return time.perf_counter() - begin, running.guest, plan


async def run_command(guest: Guest, number: int, command: str) -> float:
    """Seconds to its result, which is what it should be."""
    argv, expected = COMMANDS[command]
    output = b""
    begin = time.perf_counter()
    await guest.start(number, StartCommand(argv=argv, env=ENVIRONMENT))
    async for event in guest.events(number):
        if isinstance(event, Output):
            output += event.data
        if isinstance(event, Exit):
            took, text = time.perf_counter() - begin, output.decode(errors="replace")
            if event.exit_code != 0 or expected not in text:
                sys.exit(f"{command} gave {event.exit_code}: {text[-500:]}")
            guest.release(number)
            return took
    sys.exit(f"{command} did not end")


async def end(backend: ContainerBackend, plan: StartPlan) -> None:
    await backend.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)
    plan.state_dir.rmdir()
    plan.run_dir.rmdir()


async def one(backend: ContainerBackend, layers: Layers, bench: Bench, arm: str, command: str) -> Figures:
    """A cold start in one arm."""
    with measured_layers(bench, arm, command) as (mounts, place, count):
        layers.measured = mounts
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        _, guest, plan = await start(backend, bench, bench.warm)
        await run_command(guest, 1, "true")
        await end(backend, plan)
        if (bench.run / SOCKET).exists():
            ask(bench.run / SOCKET, "status", timeout_s=20)
        blocks, cpu, got = disk_bytes(place, bench.work / "sandboxes"), cost.group_cpu_s(*bench.groups), sent(count)
        create_s, guest, plan = await start(backend, bench, bench.image)
        try:
            first_s = await run_command(guest, 1, command)
            cpu = cost.group_cpu_s(*bench.groups) - cpu
            asked = await settled(bench)
            figures = Figures(
                create_s=create_s,
                first_s=first_s,
                again_s=0,
                warm_s=0,
                fetched=sent(count) - got if arm != "local" else 0,
                written=disk_bytes(place, bench.work / "sandboxes") - blocks,
                cpu_s=cpu,
                touched=resident_bytes(bench.run / "layers") if arm == "local" else 0,
                asked=asked,
            )
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("1")
            figures.again_s = await run_command(guest, 2, command)
            figures.warm_s = await run_command(guest, 3, command)
        finally:
            await end(backend, plan)
        return figures


async def settled(bench: Bench) -> int:
    """Bytes the kernel has asked the loader for, once nothing is loaded ahead any more: what is read in vain counts."""
    while (bench.run / SOCKET).exists():
        layers = ask(bench.run / SOCKET, "status", timeout_s=20)["layers"].values()
        if not any(layer["loading"] for layer in layers):
            return sum(int(layer["asked_bytes"]) for layer in layers)
        await asyncio.sleep(0.02)
    return 0


def disk_bytes(*places: Path) -> int:
    """Blocks of everything below."""
    total = 0
    for place in places:
        for directory, _, names in os.walk(place):
            total += sum(os.lstat(os.path.join(directory, name)).st_blocks * 512 for name in names)
            total += os.lstat(directory).st_blocks * 512
    return total


def resident_bytes(mounts: Path) -> int:
    """Pages in memory of all files mounted there."""
    script = f"find {mounts} -xdev -mindepth 1 -maxdepth 1 -type d ! -name '.*' -exec find {{}} -type f -print0 \\; "
    script += "| xargs -0 fincore -b -n -r -o RES"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    return sum(int(line) for line in done.stdout.split())


# ── the arms ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def measured_layers(bench: Bench, arm: str, command: str) -> Iterator[tuple[Any, Path, Path]]:
    """Layers of a node that has nothing yet; where it writes; who counts what it fetches."""
    place = Path(tempfile.mkdtemp(prefix="node-", dir=bench.work))
    kind, _, how = arm.partition("+")
    count = bench.counts["fuse" if kind == "direct" else "http"]
    far = ImageStore(bench.work / "far") if kind == "direct" else bench.store
    profile = "" if not how else OTHER.get(command, "imports") if how == "other" else command
    try:
        with _profile(bench, far, profile):
            if kind == "unpack":
                unpacked = Unpacked(f"{bench.url}/image.tar.gz", place / "tree")
                yield unpacked, place, count
                unpacked.close()
            elif kind in ("local", "direct"):
                loader: Loader = DirectLoader(far, place / "metadata")
                with _mounted(loader, bench, str(far.root), place, how) as mounts:
                    yield mounts, place, count
            else:
                with loader_process(bench, kind, place):
                    source = ChunkSource(open_files(bench.url, attempt_s=10), patience_s=30)
                    loader = (
                        FuseLoader(source, place / "cache" / "metadata", bench.run)
                        if kind == "fuse"
                        else FanotifyLoader(source, bench.run, place)
                    )
                    with _mounted(loader, bench, bench.url, place, how) as mounts:
                        yield mounts, place, count
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def _mounted(loader: Loader, bench: Bench, address: str, place: Path, how: str) -> Iterator[LayerMounts]:
    wait_s = 0.0 if how == "now" else START_WAIT_MS / 1000
    starts = Starts(open_files(address, attempt_s=10), place / "cache", wait_s=wait_s, record_s=None)
    mounts = LayerMounts(loader, bench.run / "layers", starts=starts)
    try:
        yield mounts
    finally:
        starts.close()
        mounts.unmount_all()
        loader.close()


@contextlib.contextmanager
def _profile(bench: Bench, store: ImageStore, command: str) -> Iterator[None]:
    """The store has the profile recorded of that command, or none."""
    target = store.root / "profiles"
    if command:
        shutil.copytree(bench.work / "profiles" / command / "profiles", target)
    try:
        yield
    finally:
        if command:
            shutil.rmtree(target)


@contextlib.contextmanager
def loader_process(bench: Bench, kind: str, place: Path) -> Iterator[None]:
    environment = {
        **os.environ,
        "OPENDSEC_STATE_DIR": str(place),
        "OPENDSEC_RUN_DIR": str(bench.run),
        "OPENDSEC_STORE": bench.url,
        "OPENDSEC_LOADER": kind,
        "OPENDSEC_LOG_LEVEL": "error",
    }
    with subprocess.Popen([sys.executable, "-m", "opendsec.host.loader"], env=environment) as process:
        try:
            for _ in range(400):
                with contextlib.suppress(NodeError):
                    ask(bench.run / SOCKET, "status", timeout_s=20)
                    break
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(60)
            unmount_data(bench.run)


async def record(backend: ContainerBackend, layers: Layers, bench: Bench, command: str) -> None:
    """The profile of a command, from a start of its own on the node's disk, as edges record it."""
    layer = bench.image.layers[0]
    target = bench.work / "profiles" / command
    if target.exists():
        return
    assert layer.data is not None
    with measured_layers(bench, "local", command) as (mounts, _, _):
        layers.measured = mounts
        Path("/proc/sys/vm/drop_caches").write_text("3")
        _, guest, plan = await start(backend, bench, bench.image)
        try:
            await run_command(guest, 1, command)
            (fd,) = mounts.acquire(bench.image)
            profile = profile_of(layer, found_in_memory(fd), now=time.time(), command=command)
        finally:
            await end(backend, plan)
    assert profile is not None
    meta, data = bench.store.blob_path(layer.mounted.digest), bench.store.data_path(layer.data.digest)
    place = DirectoryFiles(target)
    keep_profile(profile, layer, meta, data, store=place, local=place)


# ── the bench itself ────────────────────────────────────────────────────────────────────────────────────────────────


def copy_image(name: str, library: Path, work: Path, store: ImageStore) -> Image:
    """The same tree, as metadata and data; and as `image.tar.gz` beside it."""
    source = ImageStore(library)
    image = source.get(name)
    with LayerMounts(DirectLoader(source, work / "copies"), work / "mounts") as mounts:
        fds = mounts.acquire(image)
        if len(fds) != 1:
            sys.exit(f"{name} has {len(fds)} layers; one is expected")
        tree = f"/proc/self/fd/{fds[0]}/."
        with store.staging() as staging:
            subprocess.run(["cp", "-a", tree, staging / "tree"], check=True, pass_fds=fds)
            layer = make_layer(store, staging, staging / "tree")
            made = store.publish(name, layers=[layer], config=image.config, source=f"copy of {name}")
        archive = ["tar", "--numeric-owner", "-czf", f"{store.root}/image.tar.gz", "-C", tree, "."]
        subprocess.run(archive, check=True, pass_fds=fds)
        mounts.unmount_all()
    return made


@contextlib.contextmanager
def slow_servers(
    store: ImageStore, work: Path, options: argparse.Namespace
) -> Iterator[tuple[str, Mapping[str, Path]]]:
    """HTTP, and a mounted file system."""
    far = work / "far"
    for folder in ("blobs", "tables", "manifests", "tags"):
        shutil.copytree(store.root / folder, far / folder, copy_function=os.link)
    (far / "data" / "sha256").mkdir(parents=True)
    counts = {how: work / f"count-{how}" for how in ("http", "fuse")}
    words = ["--mb", str(options.mb), "--latency-ms", str(options.latency_ms)]
    command = [sys.executable, "-m", "benchmarks.shared.slow_store"]
    port = work / "port"
    http = [*command, "http", str(store.root), "--port-file", str(port), "--count", str(counts["http"]), *words]
    data = [*command, "fuse", f"{store.root}/data/sha256", "--target", f"{far}/data/sha256"]
    with (
        subprocess.Popen(http) as first,
        subprocess.Popen([*data, "--count", str(counts["fuse"]), *words]) as second,
    ):
        try:
            while not (port.exists() and os.path.ismount(far / "data" / "sha256")):
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port.read_text(encoding='ascii')}", counts
        finally:
            libc.umount2(far / "data" / "sha256", libc.MNT_DETACH)
            for process in (first, second):
                process.kill()


async def measure(bench: Bench, options: argparse.Namespace) -> None:
    commands = options.only.split(",")
    wanted = {"local", *(options.arms or ",".join(ARMS)).split(",")} | ({"unpack"} if options.repeat_unpack else set())
    arms = [arm for arm in ARMS if arm in wanted and (arm != "unpack" or options.repeat_unpack)]
    with LayerMounts(DirectLoader(bench.store, bench.work / "warm"), bench.run / "warm") as warm:
        layers = Layers(warm, bench.warm.name)
        backend = ContainerBackend(
            layers=cast("LayerMounts", layers), state_dir=bench.work, run_dir=bench.run, cgroup_root=ROOT
        )
        try:
            await backend.open()
            for command in commands:
                for profile in (command, OTHER.get(command, "imports")) if any("+" in arm for arm in arms) else ():
                    await record(backend, layers, bench, profile)
                for number in range(options.repeat):
                    for arm in arms:
                        if arm == "unpack" and number >= options.repeat_unpack:
                            continue
                        bench.results[command, arm].append(await one(backend, layers, bench, arm, command))
                print("\n".join(("", *table(bench.results, command, arms))), flush=True)
            print("\n".join(("", *goals(bench.results, commands, arms))), flush=True)
        finally:
            await backend.close()
            warm.unmount_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="debian")
    parser.add_argument("--store", type=Path, default=Path("/var/lib/opendsec/store"))
    parser.add_argument("--mb", type=float, default=50)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--repeat-unpack", type=int, default=1)
    parser.add_argument("--only", default="true,print,git,imports,turn", help=f"commands, of {','.join(COMMANDS)}")
    parser.add_argument("--arms", default="", help=f"of {','.join(ARMS)}; beside local and unpack")
    options = parser.parse_args()
    unified = find_mounts().unified
    if unified is None:
        sys.exit("benchmarks need a cgroup v2 tree")
    print_machine()
    work = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/run"))
    libc.mount("tmpfs", run, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "mode=700")
    home, own = Path("/proc/self/cgroup").read_text(encoding="ascii"), unified / f"{ROOT}-self"
    try:
        store = ImageStore(work / "store")
        image = copy_image(options.image, options.store, work, store)
        warm = make_busybox_image(store)
        with slow_servers(store, work, options) as (url, counts):
            own.mkdir()
            (own / "cgroup.procs").write_text("0", encoding="ascii")
            bench = Bench(
                work=work,
                run=run,
                store=store,
                image=image,
                warm=warm,
                url=url,
                counts=counts,
                groups=(own, unified / ROOT),
            )
            size = image.layers[0].size_bytes / 1e6
            archive = (store.root / "image.tar.gz").stat().st_size / 1e6
            print(f"{options.image}: {size:.0f} MB, tar.gz {archive:.0f} MB")
            print(f"store: {options.mb:g} MB/s, {options.latency_ms:g} ms")
            asyncio.run(measure(bench, options))
    finally:
        line = next(line for line in home.splitlines() if line.startswith("0::"))
        (unified / line[3:].lstrip("/") / "cgroup.procs").write_text("0", encoding="ascii")
        with contextlib.suppress(FileNotFoundError):
            own.rmdir()
        choose_driver(find_mounts(), root=ROOT).remove_root()
        for mounts in (run / "layers", run / "warm", work / "mounts"):
            unmount_layers(mounts)
        libc.umount2(run, libc.MNT_DETACH)
        run.rmdir()
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
