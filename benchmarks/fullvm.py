"""Full VMs beside the bare command: start to the first word of the guest, a picture, a key, a snapshot and what starts
from it. The guest is the tests' boot sector, so that what is measured is ours and QEMU's, and no operating system's.

    sudo .venv/bin/python -m benchmarks.fullvm [--rounds 10] [--desktop STATE_DIR]

By turns, in one run: the bare side executes QEMU with the very same machine, as root, without a room, control groups or
an overlay of qemu-img's, and drives it over one connection of its monitor that it keeps. `--desktop` also boots the
image `desktop` of that state directory's store to a window. Times are wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.shared.report import print_goal, print_latency, print_machine
from tests.boot_disk import make_boot_disk, picture, same

from opendsec.backends.base import Running, StartPlan
from opendsec.backends.fullvm import FullVmBackend
from opendsec.backends.ground import Ground
from opendsec.guest.base import Exit, Output, StartCommand
from opendsec.linux import process
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import DiskFormat, Image, Machine
from opendsec.model.screen import Action, ActionKind
from opendsec.model.spec import BackendKind, SandboxSpec
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
from opendsec.vm.qmp import monitor

QEMU = Path("/usr/bin/qemu-system-x86_64")
WORD = b"boot\n"
PATIENCE_S = 120.0


class Bench:
    """One backend and its directories."""

    def __init__(self, backend: FullVmBackend, root: Path, run: Path) -> None:
        self.backend = backend
        self._root = root
        self._run = run
        self._slot = 0

    async def start(self, image: Image, *, snapshot: Path | None = None) -> tuple[StartPlan, Running]:
        self._slot += 1
        state, run = self._root / f"s{self._slot}", self._run / f"r{self._slot}"
        state.mkdir()
        run.mkdir()
        plan = StartPlan(
            sandbox_id=new_sandbox_id("bench"),
            spec=SandboxSpec(image=image.name, backend=BackendKind.FULLVM),
            image=image,
            state_dir=state,
            run_dir=run,
            slot=self._slot,
            snapshot=snapshot,
        )
        return plan, await self.backend.start(plan)

    async def end(self, plan: StartPlan, running: Running) -> None:
        await self.backend.stop(running.handle, grace_s=0)
        await self.backend.destroy(
            plan.sandbox_id, running.handle, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("it did not become so")
        await asyncio.sleep(0.002)


async def bare(disk: Path, times: dict[str, list[float]], place: Path) -> None:
    """One round of the bare side."""
    said, qmp = place / "said", place / "qmp.sock"
    for path in (said, qmp):
        path.unlink(missing_ok=True)
    argv = ["-M", "q35,hpet=off,smm=off", "-accel", "tcg,thread=multi,tb-size=128", "-cpu", "max", "-m", "16M"]
    argv += ["-nodefaults", "-no-user-config", "-display", "none", "-boot", "strict=on,menu=off"]
    argv += ["-blockdev", f"driver=raw,node-name=disk,read-only=on,file.driver=file,file.filename={disk}"]
    argv += ["-blockdev", f"driver=qcow2,node-name=over,backing=disk,file.driver=file,file.filename={place}/over"]
    argv += ["-device", "ide-hd,drive=over", "-device", "VGA", "-device", "qemu-xhci", "-device", "usb-tablet"]
    argv += ["-netdev", "user,id=n,ipv6=off", "-device", "e1000e,netdev=n,romfile=", "-serial", f"file:{said}"]
    argv += ["-qmp", f"unix:{qmp},server=on,wait=off"]
    await process.run(["qemu-img", "create", "-q", "-f", "qcow2", f"{place}/over", "1M"], timeout_s=60)
    began = time.monotonic()
    pid, pidfd = process.spawn(QEMU, argv=argv)
    try:
        await until(lambda: said.exists() and said.read_bytes() == WORD)
        times["bare: start to the guest's first word"].append(time.monotonic() - began)
        async with monitor(qmp) as connection:
            began = time.monotonic()
            await connection.execute("screendump", {"filename": f"{place}/shot.png", "format": "png"})
            times["bare: picture"].append(time.monotonic() - began)
            assert same((place / "shot.png").read_bytes(), picture())
            began = time.monotonic()
            for down in (True, False):
                event = {"type": "key", "data": {"down": down, "key": {"type": "qcode", "data": "k"}}}
                await connection.execute("input-send-event", {"events": [event]})
            await until(lambda: said.read_bytes().endswith(b"k"))
            times["bare: key to the guest's answer"].append(time.monotonic() - began)
    finally:
        process.send_signal(pidfd)
        await process.wait_ended(pidfd, timeout_s=20)
        process.reap(pid)
        os.close(pidfd)


async def ours(bench: Bench, image: Image, times: dict[str, list[float]], saved: Path) -> None:
    """One round of ours; a snapshot the first time."""
    began = time.monotonic()
    plan, running = await bench.start(image)
    console = bench.backend.console(running.handle)
    await until(lambda: console.serial_read(0)[1] == WORD)
    times["full VM: start to the guest's first word"].append(time.monotonic() - began)
    began = time.monotonic()
    shot = await console.picture()
    times["full VM: picture"].append(time.monotonic() - began)
    assert same(shot.png, picture())
    began = time.monotonic()
    await console.act([Action(kind=ActionKind.PRESS, keys=("k",))])
    await until(lambda: console.serial_read(0)[1].endswith(b"k"))
    times["full VM: key to the guest's answer"].append(time.monotonic() - began)
    if not saved.exists():
        saved.mkdir()
        began = time.monotonic()
        await bench.backend.snapshot(running.handle, saved)
        times["full VM: snapshot"].append(time.monotonic() - began)
    began = time.monotonic()
    again_plan, again = await bench.start(image, snapshot=saved)
    restored = await bench.backend.console(again.handle).picture()
    times["full VM: from the snapshot to its first picture"].append(time.monotonic() - began)
    assert same(restored.png, picture(keys=1))
    await bench.end(again_plan, again)
    await bench.end(plan, running)


async def desktop(bench: Bench, image: Image) -> None:
    """Boot it to a window."""
    began = time.monotonic()
    plan, running = await bench.start(image)
    print(f"desktop: start to the agent's answer        {time.monotonic() - began:8.1f} s")
    number = 0
    found = b""
    while not found.strip():
        number += 1
        line = "DISPLAY=:0 xdotool search --onlyvisible --class xterm"
        await running.guest.start(number, StartCommand(script=line, env={"PATH": "/usr/bin:/bin"}))
        async for event in running.guest.events(number):
            if isinstance(event, Output) and event.stream == 1:
                found += event.data
            if isinstance(event, Exit):
                break
        running.guest.release(number)
    print(f"desktop: start to a window                  {time.monotonic() - began:8.1f} s")
    began = time.monotonic()
    shot = await bench.backend.console(running.handle).picture()
    print(f"desktop: picture {shot.size.width} x {shot.size.height}                 {time.monotonic() - began:8.3f} s")
    await bench.end(plan, running)


async def main(rounds: int, kept: Path | None) -> None:
    """Print all."""
    print_machine()
    root = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/tmp"))
    run = Path(tempfile.mkdtemp(prefix="ods-bench-", dir="/run"))
    store = ImageStore(root / "store" if kept is None else kept / "store")
    backend = FullVmBackend(
        layers=LayerMounts(DirectLoader(store, root / "copies"), run / "layers"),
        state_dir=root,
        host_state_dir=root,
        run_dir=run,
        ground=Ground(root, cgroup_root=f"opendsec-bench-{os.getpid()}"),
    )
    try:
        await backend.open()
        print(f"{backend.report().binding}\n{'; '.join(backend.report().degraded)}\n")
        bench = Bench(backend, root, run)
        disk = make_boot_disk(root / "boot.img")
        own = ImageStore(root / "store")
        machine = Machine(format=DiskFormat.RAW, virtual_bytes=512, memory_mb=16)
        image = import_disk(own, DiskRequest(name="boot", path=disk, machine=machine))
        times: dict[str, list[float]] = {}
        keys = ("start to the guest's first word", "picture", "key to the guest's answer")
        times |= {f"{side}: {what}": [] for what in keys for side in ("bare", "full VM")}
        times |= {"full VM: snapshot": [], "full VM: from the snapshot to its first picture": []}
        if kept is not None:
            await desktop(bench, store.compose("desktop"))
        else:
            for _ in range(rounds):
                await bare(disk, times, root)
                await ours(bench, image, times, root / "saved")
            for what, seconds in times.items():
                print_latency(what, seconds)
            for what in keys[:2]:  # keys have a pace of their own, 20 ms between two events
                medians = [statistics.median(times[f"{side}: {what}"]) for side in ("full VM", "bare")]
                print_goal(f"{what}, beside bare", medians[0] / medians[1], 2.0, "times")
    finally:
        await backend.close()
        shutil.rmtree(root)
        shutil.rmtree(run)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--desktop", type=Path, default=None, metavar="STATE_DIR")
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.desktop))
