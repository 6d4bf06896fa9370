"""What one container sandbox costs at the backend: CPU of all processes, rate, round trip, memory while idle.

    .venv/bin/python -m benchmarks.container_start [--image debian] [--count 500] [--parallel 16] [--idle 300]

CPU is `cpu.stat` of two control groups that hold this process, the launcher and every sandbox, so nothing is missed but
kernel threads. Memory is the fall of MemAvailable, and of MemFree plus the per-CPU free lists, per live sandbox.
Without --image a small busybox image is made. Run it on a quiet machine; it prints machine, kernel and versions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.images import make_busybox_image

from opendsec.backends.base import Running, StartPlan
from opendsec.backends.container import ContainerBackend
from opendsec.guest.base import Exit, StartCommand
from opendsec.linux import libc
from opendsec.linux.cgroup import choose_driver, find_mounts
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import Image
from opendsec.model.spec import Resources, SandboxSpec
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts

ROOT = "opendsec-bench"


class Bench:
    """One backend in directories and groups of its own."""

    def __init__(self, backend: ContainerBackend, image: Image, state: Path, run: Path, memory_limit_mb: int) -> None:
        self.backend = backend
        self.image = image
        self._state = state
        self._run = run
        self._memory_limit_mb = memory_limit_mb

    async def start(self, slot: int) -> tuple[StartPlan, Running, float]:
        sandbox_id = new_sandbox_id("bench")
        state, run = self._state / sandbox_id, self._run / sandbox_id
        state.mkdir(mode=0o700)
        run.mkdir(mode=0o700)
        spec = SandboxSpec(image=self.image.name, resources=Resources(memory_limit_mb=self._memory_limit_mb))
        plan = StartPlan(sandbox_id=sandbox_id, spec=spec, image=self.image, state_dir=state, run_dir=run, slot=slot)
        begin = time.perf_counter()
        running = await self.backend.start(plan)
        return plan, running, time.perf_counter() - begin

    async def end(self, plan: StartPlan) -> None:
        await self.backend.destroy(
            plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )
        plan.state_dir.rmdir()
        plan.run_dir.rmdir()

    async def start_many(self, count: int, parallel: int) -> tuple[list[StartPlan], list[float], list[Running]]:
        slots = iter(range(count))
        plans: list[StartPlan] = []
        took: list[float] = []
        live: list[Running] = []

        async def worker() -> None:
            for slot in slots:
                plan, running, seconds = await self.start(slot)
                plans.append(plan)
                live.append(running)
                took.append(seconds)

        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())
        return plans, took, live

    async def end_many(self, plans: list[StartPlan], parallel: int) -> None:
        rest = iter(plans)

        async def worker() -> None:
            for plan in rest:
                await self.end(plan)

        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(worker())


def cpu_ms(groups: list[Path]) -> float:
    total = 0
    for group in groups:
        for line in (group / "cpu.stat").read_text(encoding="ascii").splitlines():
            if line.startswith("usage_usec "):
                total += int(line.split()[1])
    return total / 1000


def free_kib() -> tuple[int, int]:
    """(MemAvailable, MemFree and the per-CPU lists)"""
    info = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE))
    lists = sum(map(int, re.findall(r"^\s+count:\s+(\d+)", Path("/proc/zoneinfo").read_text("ascii"), re.MULTILINE)))
    return int(info["MemAvailable"]), int(info["MemFree"]) + lists * os.sysconf("SC_PAGE_SIZE") // 1024


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {
        f"{name}_ms": round(ordered[min(int(len(ordered) * q), len(ordered) - 1)] * 1000, 2) for name, q in at.items()
    }


async def round_trip(bench: Bench) -> float:
    """Median seconds of `true`, started to end event."""
    plan, running, _ = await bench.start(0)
    took: list[float] = []
    for number in range(1, 201):
        begin = time.perf_counter()
        await running.guest.start(number, StartCommand(argv=("/bin/true",), env={"PATH": "/bin"}))
        async for event in running.guest.events(number):
            if isinstance(event, Exit):
                running.guest.release(number)
        took.append(time.perf_counter() - begin)
    await bench.end(plan)
    return statistics.median(took)


async def measure(bench: Bench, groups: list[Path], args: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {}
    for label in ("slots_used_first", "slots_used_again"):
        begin_cpu, begin = cpu_ms(groups), time.perf_counter()
        plans, took, _ = await bench.start_many(args.count, args.parallel)
        started = {
            "cpu_ms_each": round((cpu_ms(groups) - begin_cpu) / args.count, 2),
            "per_second": round(args.count / (time.perf_counter() - begin)),
            **percentiles(took),
        }
        begin_cpu, begin = cpu_ms(groups), time.perf_counter()
        await bench.end_many(plans, args.parallel)
        destroyed = {
            "cpu_ms_each": round((cpu_ms(groups) - begin_cpu) / args.count, 2),
            "per_second": round(args.count / (time.perf_counter() - begin)),
        }
        result[label] = {"start": started, "destroy": destroyed}
    serial: list[float] = []
    begin_cpu = cpu_ms(groups)
    for slot in range(50):
        plan, _, seconds = await bench.start(slot)
        serial.append(seconds)
        await bench.end(plan)
    result["one_after_the_other"] = {
        "start_and_destroy_cpu_ms": round((cpu_ms(groups) - begin_cpu) / 50, 2),
        **percentiles(serial),
    }
    result["round_trip_p50_ms"] = round(await round_trip(bench) * 1000, 2)
    await asyncio.sleep(1)
    before = free_kib()
    plans, _, _ = await bench.start_many(args.idle, args.parallel)
    await asyncio.sleep(1)
    after = free_kib()
    result["idle_kib_each"] = {
        "by_available": round((before[0] - after[0]) / args.idle),
        "by_free": round((before[1] - after[1]) / args.idle),
    }
    await bench.end_many(plans, args.parallel)
    return result


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", help="name of an image in --store; a busybox image when not given")
    parser.add_argument("--store", type=Path, default=Path("/var/lib/opendsec/store"))
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--idle", type=int, default=300)
    parser.add_argument("--memory-limit-mb", type=int, default=512)
    args = parser.parse_args()
    unified = find_mounts().unified
    if unified is None:
        raise SystemExit("no cgroup v2 tree")
    own = unified / f"{ROOT}-self"
    own.mkdir(exist_ok=True)
    (own / "cgroup.procs").write_text("0")
    state = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/run"))
    libc.mount("tmpfs", run, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "mode=700")
    store = ImageStore(args.store if args.image else state / "store")
    image = store.get(args.image) if args.image else make_busybox_image(store)
    layers = LayerMounts(DirectLoader(store, state / "metadata"), run / "layers")
    backend = ContainerBackend(layers=layers, state_dir=state, run_dir=run, cgroup_root=ROOT)
    try:
        await backend.open()
        bench = Bench(backend, image, state, run, args.memory_limit_mb)
        result = await measure(bench, [own, unified / ROOT], args)
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
        load = os.getloadavg()[0]
        print(json.dumps({"image": image.name, "machine": machine, "load": load, **result}, indent=1))
    finally:
        await backend.close()
        layers.unmount_all()
        choose_driver(find_mounts(), root=ROOT).remove_root()
        (unified / "cgroup.procs").write_text("0")
        own.rmdir()
        shutil.rmtree(state)
        libc.umount2(run)
        run.rmdir()


if __name__ == "__main__":
    asyncio.run(main())
