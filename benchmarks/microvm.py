"""MicroVMs of QEMU: what a copy costs, beside the bare command; hundreds at once; pauses, clocks, randomness, caches.

    sudo .venv/bin/python -m benchmarks.microvm --store /var/lib/opendsec/store --image debian [--clones 200]

One run, one machine: the bare side restores the very same template with the very same command line, over a plain socket
and without anything of ours around it, in turns with the backend. Times are wall time in milliseconds, CPU is of the
whole machine (all VMMs included) as /proc/stat has it, memory is what MemAvailable loses per sandbox. Nothing is
asserted but what must be right: checksums, clocks, and that no two copies draw the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.backends.base import Running, StartPlan
from opendsec.backends.ground import Ground
from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_files import PAUSED, PLACE
from opendsec.guest.base import Exit, Guest, Output, StartCommand
from opendsec.guest.channel import Channel
from opendsec.linux import libc, process
from opendsec.linux.sockets import listening
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import Image
from opendsec.model.spec import BackendKind, Resources, SandboxSpec
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
from opendsec.vm.qemu import PROGRAM, QemuVmm

PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
PAGE_KIB = 4
HELLO = struct.pack("<IIBBH", 16, 0, 1, 0, 0) + struct.pack("<HHIQ", 1, 0, 8, 1)
FILES = "head -c 3000000 /dev/urandom >/root/f; cp /root/f /dev/shm/f; md5sum /root/f /dev/shm/f >/root/sums"


@dataclass(slots=True)
class Bench:
    """The backend, its image and its directories."""

    backend: MicroVmBackend
    layers: LayerMounts
    image: Image
    state: Path
    run: Path
    memory_mb: int
    slots: list[int]

    def plan(self) -> StartPlan:
        sandbox_id = new_sandbox_id("bench")
        state, run = self.state / "sbx" / sandbox_id, self.run / "sbx" / sandbox_id
        for directory in (state, run):
            directory.mkdir(parents=True)
        spec = SandboxSpec(
            image=self.image.name,
            backend=BackendKind.MICROVM,
            resources=Resources(memory_limit_mb=self.memory_mb),
        )
        return StartPlan(
            sandbox_id=sandbox_id,
            spec=spec,
            image=self.image,
            state_dir=state,
            run_dir=run,
            slot=self.slots.pop(),
        )

    async def destroy(self, plan: StartPlan) -> None:
        await self.backend.destroy(
            plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )
        self.slots.append(plan.slot)


@contextlib.asynccontextmanager
async def bench(store: Path, image: str, kernels: Path, memory_mb: int) -> AsyncIterator[Bench]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/lib"))
    run = Path(tempfile.mkdtemp(prefix="odsb-", dir="/run"))
    layers = LayerMounts(DirectLoader(ImageStore(store), state / "metadata"), run / "layers")
    backend = MicroVmBackend(
        vmm=QemuVmm(state_dir=state),
        layers=layers,
        state_dir=state,
        run_dir=run,
        kernels=kernels,
        ground=Ground(state, cgroup_root=f"opendsec-bench-{os.getpid()}"),
    )
    await backend.open()
    try:
        yield Bench(backend, layers, ImageStore(store).get(image), state, run, memory_mb, list(range(2000)))
    finally:
        await backend.close()
        layers.unmount_all()
        shutil.rmtree(state)
        shutil.rmtree(run)


async def run(guest: Guest, command_id: int, script: str) -> bytes:
    await guest.start(command_id, StartCommand(script=script, env=PATH))
    out, said = b"", {1: 0, 2: 0}
    async for event in guest.events(command_id):
        if isinstance(event, Output):
            out += event.data
            said[event.stream] += len(event.data)
            guest.ack(command_id, said[1], said[2])
        elif isinstance(event, Exit):
            guest.release(command_id)
            assert event.exit_code == 0, (script, out, event)
    return out


# ── one copy, beside the bare command ───────────────────────────────────────────────────────────────────────────────


def bare(argv: Sequence[str], saved: Path, place: Path) -> float:
    """Start the same command with the same files and say HELLO to the agent; milliseconds."""
    words = list(argv)
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(listening(place / "agent.sock"))
        qmp = stack.enter_context(listening(place / "qmp.sock"))
        devices = stack.enter_context((saved / "devices").open("rb")).fileno()
        for chardev, fd in (("id=qmp", qmp), ("id=agent", agent)):
            at = next(number for number, word in enumerate(words) if word.startswith(f"socket,{chardev},"))
            words[at] = f"socket,{chardev},fd={fd},server=on,wait=off"
        words[words.index("-incoming") + 1] = f"fd:{devices}"
        began = time.perf_counter()
        given = {fd: fd for fd in (agent, qmp, devices)}
        pid, pidfd = process.spawn(Path(shutil.which(PROGRAM) or PROGRAM), argv=words, fds=given)
        try:
            with socket.socket(socket.AF_UNIX) as host:
                host.settimeout(60)
                host.connect(str(place / "agent.sock"))
                host.sendall(HELLO)
                assert host.recv(1)
            return (time.perf_counter() - began) * 1000
        finally:
            process.send_signal(pidfd)
            os.waitpid(pid, 0)
            os.close(pidfd)


@contextlib.contextmanager
def greetings() -> Iterator[list[float]]:
    """When each agent has answered HELLO, during the block."""
    greeted: list[float] = []
    hello = Channel.hello

    async def timed(channel: Channel) -> None:
        await hello(channel)
        greeted.append(time.perf_counter())

    Channel.hello = timed  # type: ignore[method-assign,assignment]
    try:
        yield greeted
    finally:
        Channel.hello = hello  # type: ignore[method-assign]


def busy_s() -> float:
    """What all processors have done, seconds since boot."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Measured:
    """Of several starts."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def line(self, name: str) -> str:
        wall = (
            f"{statistics.median(self.wall_ms):7.1f} ms   (median of {len(self.wall_ms)}, min {min(self.wall_ms):.1f}"
        )
        cpu = f"; all processors {self.cpu_s * 1000 / len(self.wall_ms):.0f} ms" if self.cpu_s else ""
        return f"{name:<40}{wall}{cpu})"


async def single(bench: Bench, rounds: int) -> None:
    plan = bench.plan()
    began = time.perf_counter()
    running = await bench.backend.start(plan)
    print(f"first start (template is booted, saved and copied): {(time.perf_counter() - began) * 1000:.0f} ms")
    vmm = int(json.loads((plan.run_dir / PLACE / "vmm.json").read_bytes())["pid"])
    argv = Path(f"/proc/{vmm}/cmdline").read_bytes().decode().split("\0")[1:-1]
    await bench.backend.stop(running.handle, grace_s=0)
    raw, greeted, handed, pings = Measured(), Measured(), Measured(), []
    with greetings() as answers:
        for _ in range(rounds):
            before = busy_s()
            raw.wall_ms.append(await asyncio.to_thread(bare, argv, plan.state_dir / "base", plan.run_dir / PLACE))
            raw.cpu_s += busy_s() - before
            one = bench.plan()
            before, began = busy_s(), time.perf_counter()
            started = await bench.backend.start(one)
            handed.wall_ms.append((time.perf_counter() - began) * 1000)
            handed.cpu_s += busy_s() - before
            greeted.wall_ms.append((answers[-1] - began) * 1000)
            pings.append(await started.guest.ping() * 1000)
            await bench.destroy(one)
    await bench.destroy(plan)
    print(raw.line("bare QEMU command → agent's HELLO"))
    print(greeted.line("backend.start → agent's HELLO"))
    print(handed.line("backend.start → handed out (RENEW)"))
    ratios = [statistics.median(each.wall_ms) / statistics.median(raw.wall_ms) for each in (greeted, handed)]
    print(f"{'ratios to the bare command':<36}{ratios[0]:8.2f} and {ratios[1]:.2f}")
    print(f"{'ping':<36}{statistics.median(pings):8.2f} ms")


# ── many at once ────────────────────────────────────────────────────────────────────────────────────────────────────


def available_kib() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0])


def cached_kib(bench: Bench, image: Image) -> tuple[int, int]:
    """(in the page cache, size) of the files of the image's layers."""
    cached = size = 0
    for layer in image.layers:
        files = bench.layers._loader.attach(layer)  # noqa: SLF001 the files themselves are what is asked about
        for path in (files.meta, files.data):
            if path is not None:
                fd = os.open(path, os.O_RDONLY)
                length = os.fstat(fd).st_size
                cached += libc.cachestat(fd, 0, length) * PAGE_KIB
                size += length // 1024
                os.close(fd)
    return cached, size


async def many(bench: Bench, count: int, at_once: int) -> None:
    limit = asyncio.Semaphore(at_once)
    live: list[tuple[StartPlan, Running]] = []
    before = available_kib()

    async def one() -> None:
        async with limit:
            plan = bench.plan()
            live.append((plan, await bench.backend.start(plan)))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    took = time.perf_counter() - began
    idle = (before - available_kib()) / count / 1024
    print(f"{count} live: {count / took:.1f}/s, {idle:.1f} MiB each")
    asked = "head -c 16 /dev/urandom | od -An -tx1; date +%s"
    random: set[bytes] = set()
    worst = 0.0
    for _, running in live:
        asked_at = time.time()
        *drawn, seconds = (await run(running.guest, 1, asked)).split()
        random.add(b"".join(drawn))
        worst = max(worst, asked_at - int(seconds) - 1, int(seconds) - time.time())
    after = (before - available_kib()) / count / 1024
    cached, size = cached_kib(bench, bench.image)
    print(f"after one command in each: {after:.1f} MiB each")
    print(f"distinct random bytes: {len(random)} of {count}; clocks off by more than a tick: at most {worst:.2f} s")
    print(f"page cache of the shared root on the host: {cached // 1024} of {size // 1024} MiB, once for all {count}")
    assert len(random) == count
    began = time.perf_counter()
    for plan, _ in live:
        await bench.destroy(plan)
    print(f"destroyed at {count / (time.perf_counter() - began):.0f}/s")


# ── pauses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def cycles(bench: Bench, count: int) -> None:
    plan = bench.plan()
    running = await bench.backend.start(plan)
    await run(running.guest, 1, FILES)
    pauses, resumes, sizes = [], [], []
    for number in range(count):
        began = time.perf_counter()
        await bench.backend.pause(running.handle)
        paused = time.perf_counter()
        sizes.append(sum(path.stat().st_blocks for path in (plan.state_dir / PAUSED).iterdir()) // 2)
        again = time.perf_counter()
        await bench.backend.resume(running.handle)
        resumes.append((time.perf_counter() - again) * 1000)
        pauses.append((paused - began) * 1000)
        guest = await bench.backend.reconnect(running.handle)
        assert guest is not None
        said = await run(guest, 2 + number, "md5sum -c /root/sums")
        assert said.count(b": OK") == 2, said
    target = bench.state / "snapshot"
    target.mkdir()
    began = time.perf_counter()
    await bench.backend.snapshot(running.handle, target)
    whole = (time.perf_counter() - began) * 1000
    size = sum(path.stat().st_blocks for path in target.rglob("*") if path.is_file()) // 2048
    await bench.destroy(plan)
    print(f"{count} times paused and resumed, memory and disk right each time")
    print(f"pause {statistics.median(pauses):.0f} ms, resume {statistics.median(resumes):.0f} ms (medians)")
    print(f"a pause writes {statistics.median(sizes) / 1024:.1f} MiB (difference to the template)")
    print(f"a whole snapshot takes {whole:.0f} ms and {size} MiB")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("/var/lib/opendsec/store"))
    parser.add_argument("--image", default="debian")
    parser.add_argument("--kernels", type=Path, default=Path("/var/lib/opendsec"), help="state directory with a kernel")
    parser.add_argument("--memory", type=int, default=128, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clones", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=100)
    asked = parser.parse_args()
    async with bench(asked.store, asked.image, asked.kernels, asked.memory) as made:
        report = made.backend.report()
        print(f"{report.binding}; image {asked.image}, {asked.memory} MiB; load {os.getloadavg()[0]:.1f}")
        for line in report.degraded:
            print(line)
        await single(made, asked.rounds)
        if asked.clones:
            await many(made, asked.clones, asked.at_once)
        if asked.cycles:
            await cycles(made, asked.cycles)


if __name__ == "__main__":
    asyncio.run(main())
