"""The Firecracker driver beside the bare binary: restore to an answering guest, rate, memory of a clone, 300 live.

    .venv/bin/python -m benchmarks.firecracker [--count 60] [--parallel 4] [--clones 300] [--mib 128] [--state DIR]

Both sides restore one saved machine, whose guest has no operating system (`tests/node/vm/tiny`), so what is measured is
the VMM and who drives it. The bare side is a loop as short as it can be: spawn, wait for the socket, one request over a
raw socket, CONNECT, HELLO. The two sides take turns, so a busy machine is busy for both. CPU is what this process and
its dead children used; memory is PSS of the VMM, and the fall of MemAvailable for each live clone. Needs /dev/kvm and
`opendsec firecracker install`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import socket
import statistics
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared.cost import free_kib
from benchmarks.shared.report import print_goal, print_latency, print_machine
from tests.node.vm import tiny_guest

from opendsec.linux import libc, process
from opendsec.vm.base import MachineSpec, Place
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_install import find_programs
from opendsec.vm.firecracker_machine import FirecrackerVm
from opendsec.vm.firecracker_start import Programs, in_own_thread
from opendsec.vm.kvm import usable_kvm

JAILED = 70_001
DIRTY_PAGES = 8192
SETTLE_S = 0.2
"""Until the guest has seen the end of its connection: one that has not refuses the next, which then tries again."""
HELLO = struct.pack("<IIBBH", 16, 0, 1, 0, 0) + struct.pack("<HHIQ", 1, 0, 8, 1)
LOAD = json.dumps(
    {
        "snapshot_path": "state",
        "mem_backend": {"backend_type": "File", "backend_path": "mem"},
        "enable_diff_snapshots": True,
        "resume_vm": True,
    }
).encode()


@dataclass(slots=True)
class Taken:
    """One side's figures."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


@dataclass(slots=True)
class Live:
    """Clones of one side: the driver's, or (pid, pidfd)."""

    vms: list[FirecrackerVm]
    bare: list[tuple[int, int]]

    @property
    def pids(self) -> list[int]:
        return [pid for pid, _ in self.bare] + [vm.pid for vm in self.vms]


def cpu_s() -> float:
    """Of this process and its children that have been reaped."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Bare:
    """The binary, driven by as little as will do."""

    def __init__(self, programs: Programs, saved: Path, run: Path) -> None:
        self._programs = programs
        self._saved = saved
        self._run = run

    async def restore(self, number: int) -> tuple[int, int]:
        directory = self._run / f"b{number}"
        directory.mkdir()
        for name in ("state", "mem"):
            (directory / name).symlink_to(self._saved / name)
        (directory / "snapshot").mkdir()

        def spawn() -> tuple[int, int]:
            libc.unshare(libc.CLONE_FS)
            os.chdir(directory)
            with Path(os.devnull).open("r+b") as nothing:
                fds = {0: nothing.fileno(), 1: nothing.fileno(), 2: nothing.fileno()}
                argv = ["--api-sock", "api.sock", "--level", "Error"]
                return process.spawn(self._programs.firecracker, argv=argv, fds=fds)

        pid, pidfd = await in_own_thread(spawn)
        loop = asyncio.get_running_loop()
        api = await _connected(directory / "api.sock")
        with api:
            head = b"PUT /snapshot/load HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(LOAD)
            await loop.sock_sendall(api, head + LOAD)
            answer = await loop.sock_recv(api, 4096)
            assert b" 204 " in answer, answer
        with await _connected(directory / "v.sock") as guest:
            await loop.sock_sendall(guest, b"CONNECT 5000\n")
            assert (await loop.sock_recv(guest, 64)).startswith(b"OK ")
            await loop.sock_sendall(guest, HELLO)
            assert await loop.sock_recv(guest, 4096)
        return pid, pidfd

    async def end(self, pid: int, pidfd: int) -> None:
        process.send_signal(pidfd)
        await process.wait_ended(pidfd)
        process.reap(pid)
        os.close(pidfd)


async def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    while True:
        try:
            sock.connect(str(path))
        except OSError:
            await asyncio.sleep(0.0005)
        else:
            return sock


class Bench:
    """One template, both sides, in directories of their own."""

    def __init__(self, vmm: FirecrackerVmm, programs: Programs, spec: MachineSpec, run: Path, saved: Path) -> None:
        self._vmm = vmm
        self._spec = spec
        self._run = run
        self._saved = saved
        self._bare = Bare(programs, saved, run)
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def make_template(self) -> None:
        vm = await self._vmm.boot(self._spec, self._place(0))
        guest = await vm.connect(timeout_s=60)
        status, _ = await tiny_guest.run(guest, 1, f"fill {DIRTY_PAGES} 1")
        assert status == 0
        await guest.aclose()
        await asyncio.sleep(SETTLE_S)
        await vm.pause()
        await vm.save(self._saved)
        await vm.kill()

    def _place(self, host_id: int) -> Place:
        directory = self._run / f"m{self._next()}"
        directory.mkdir()
        return Place(directory=directory, host_id=host_id)

    async def bare(self) -> tuple[int, int]:
        return await self._bare.restore(self._next())

    async def driver(self, host_id: int = 0) -> FirecrackerVm:
        vm = await self._vmm.restore(self._saved, self._spec, self._place(host_id))
        channel = await vm.connect(timeout_s=60)
        assert channel.agent == "tiny"
        await channel.aclose()
        return vm

    async def one_after_the_other(self, count: int) -> dict[str, Taken]:
        """Bare, driver, driver in a jail, by turns."""
        sides = {name: Taken() for name in ("bare", "driver", "jailed")}
        for _ in range(count):
            for name, taken in sides.items():
                before, begin = cpu_s(), time.perf_counter()
                vm = await (self.bare() if name == "bare" else self.driver(0 if name == "driver" else JAILED))
                taken.seconds.append(time.perf_counter() - begin)
                await (vm.kill() if isinstance(vm, FirecrackerVm) else self._bare.end(*vm))
                taken.cpu_s += cpu_s() - before
        return sides

    async def many(self, count: int, parallel: int, *, bare: bool) -> tuple[float, Live]:
        """Restores a second, and what lives now."""
        vms: list[FirecrackerVm] = []
        pids: list[tuple[int, int]] = []
        turns = iter(range(count))

        async def some() -> None:
            for _ in turns:
                if bare:
                    pids.append(await self.bare())
                else:
                    vms.append(await self.driver())

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(some())
        return count / (time.perf_counter() - begin), Live(vms, pids)

    async def end(self, live: Live) -> None:
        for vm in live.vms:
            await vm.kill()
        for pid, pidfd in live.bare:
            await self._bare.end(pid, pidfd)


def pss_kib(pid: int) -> int:
    """Proportional share of its memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


async def live_side(bench: Bench, clones: int, parallel: int, *, bare: bool) -> float:
    """Figures of that many clones of one side; the rate."""
    before, _ = free_kib()
    spent, begin = cpu_s(), time.perf_counter()
    rate, live = await bench.many(clones, parallel, bare=bare)
    cpu, wall = cpu_s() - spent, time.perf_counter() - begin
    after, _ = free_kib()
    pss = statistics.median(pss_kib(pid) for pid in live.pids[:50])
    name = "bare" if bare else "driver"
    own = f"{cpu / clones * 1000:.2f} CPU-ms of this process"
    print(f"{name:8} {clones} live: {rate:6.0f}/s in {wall:.2f} s, {own} each; ", end="")
    print(f"PSS {pss / 1024:.2f} MiB, {(before - after) / clones / 1024:.2f} MiB of MemAvailable each", flush=True)
    begin = time.perf_counter()
    await bench.end(live)
    print(f"{name:8} ended in {(time.perf_counter() - begin) / clones * 1000:.2f} ms each", flush=True)
    return rate


async def measure(args: argparse.Namespace) -> None:
    programs = find_programs(args.state)
    run = Path(tempfile.mkdtemp(prefix="ods-bench-", dir="/run"))
    disk = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/tmp"))
    try:
        kernel = tiny_guest.build(disk)
        (disk / "initrd").write_bytes(bytes(512))
        saved = disk / "saved"
        saved.mkdir()
        spec = MachineSpec(
            kernel=kernel, initrd=disk / "initrd", command_line="console=ttyS0", memory_mib=args.mib, cpus=1
        )
        vmm = FirecrackerVmm(programs=programs, run_dir=run)
        await vmm.open()
        print(f"Firecracker {vmm.binding.version}, guest of {args.mib} MiB; {usable_kvm().sentence}\n", flush=True)
        bench = Bench(vmm, programs, spec, run, saved)
        await bench.make_template()
        await bench.one_after_the_other(3)  # warm
        sides = await bench.one_after_the_other(args.count)
        for name, taken in sides.items():
            cpu = f"{taken.cpu_s / args.count * 1000:.1f} CPU-ms with the VMM"
            print_latency(f"restore to channel, {name}", taken.seconds, cpu=cpu)
        rates = {bare: await live_side(bench, args.clones, args.parallel, bare=bare) for bare in (True, False)}
        print()
        medians = {name: statistics.median(taken.seconds) for name, taken in sides.items()}
        print_goal("driver / bare, restore to channel", medians["driver"] / medians["bare"], 1.3, "x")
        print_goal("restores a second, several at a time", rates[False], 150, "/s", at_least=True)
        print_goal("clones live at once", args.clones, 300, "", at_least=True)
        rate, jailed = rates[False] / rates[True], medians["jailed"] / medians["bare"]
        print(f"       driver / bare, rate {rate:.2f}; jailed / bare, restore to channel {jailed:.2f}")
        await vmm.close()
    finally:
        shutil.rmtree(run)
        shutil.rmtree(disk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="restores of each side, one after the other")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--clones", type=int, default=300)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--state", type=Path, default=Path("/var/lib/opendsec"))
    args = parser.parse_args()
    print_machine()
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
