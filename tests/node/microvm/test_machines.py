"""MicroVMs with real Linux guests: parked and resumed, copied, saved, packed, and ended in the middle of everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.harness import MICROVM_NEEDS, Place, Sandbox, microvm_backend

from opendsec.backends.base import Changes, Parked, Running
from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_files import PAUSED, PLACE
from opendsec.backends.microvm_shape import DATA_LABEL
from opendsec.backends.microvm_templates import MACHINE
from opendsec.errors import DiskFullError, OpenDSecError, SandboxLostError, SnapshotInvalidError, StartError
from opendsec.linux import process
from opendsec.linux.disk import make_disk, remove_disk
from opendsec.model.spec import Resources
from opendsec.store.sparse import copy_sparse
from opendsec.vm.base import Vm
from opendsec.vm.saved import MANIFEST

pytestmark = [pytest.mark.anyio, *(getattr(pytest.mark, name) for name in MICROVM_NEEDS)]
MIB = 1024 * 1024
REMEMBER = (
    "head -c 3000000 /dev/urandom > /root/disk; cp /root/disk /dev/shm/memory;"
    " cd /; md5sum root/disk dev/shm/memory > /root/sums; (sleep 4711 &)"
)
RECALL = "cd /; md5sum -c root/sums && ps | grep -c '[s]leep 4711'"


async def again(box: Sandbox) -> None:
    """The edge's new connection after a resume."""
    guest = await box.backend.reconnect(box.running.handle)
    assert guest is not None
    box.running.guest = guest


def vmm_of(box: Sandbox) -> int:
    """Its VMM's pid."""
    return int(json.loads((box.plan.run_dir / PLACE / "vmm.json").read_bytes())["pid"])


async def restart(place: Place) -> None:
    """The edge process dies and another begins."""
    first = place.backend
    assert isinstance(first, MicroVmBackend)
    await first.close()
    place.backend = microvm_backend(first._layers, place.state_dir.parent, place.run_dir.parent)
    await place.backend.open()


async def test_memory_disk_and_programs_outlive_pauses(box: Sandbox) -> None:
    handle = box.running.handle
    await box.run(REMEMBER)
    for _ in range(5):
        pid = vmm_of(box)
        await box.backend.pause(handle)
        assert process.identify(pid) is None
        await box.backend.resume(handle)
        await again(box)
        result = await box.run(RECALL)
        assert result.stdout == b"root/disk: OK\ndev/shm/memory: OK\n1\n", result
    await box.backend.pause(handle)
    own = sum(path.stat().st_blocks * 512 for path in (box.plan.state_dir / PAUSED).iterdir())
    assert own < 48 * MIB  # what was changed, not what there is


async def test_copies_are_not_alike(place: Place) -> None:
    async with contextlib.AsyncExitStack() as stack:
        boxes, began = [], []
        for _ in range(4):
            began.append(time.time())
            boxes.append(await stack.enter_async_context(place.sandbox()))
        files = "/etc/machine-id /run/opendsec/generation /proc/sys/kernel/random/boot_id"
        asked = f"head -c 16 /dev/urandom | xxd -p; cat {files}"
        said = [(await box.run(asked)).stdout for box in boxes]
        assert len({line for text in said for line in text.splitlines() if len(line) >= 32}) == 4 * len(boxes)
        for box, before in zip(boxes, began, strict=True):  # it was told the time while it was started, not before
            inside = int((await box.run("date +%s")).stdout)
            assert before - 0.5 < inside + 1
            assert inside < time.time() + 0.5


async def test_a_snapshot_starts_others_and_the_source_goes_on(place: Place) -> None:
    target = place.state_dir.parent / "snapshot"
    target.mkdir()
    async with place.sandbox() as box:
        await box.run(REMEMBER)
        await box.run("tail /dev/zero")
        assert box.backend.usage(box.running.handle).oom_kills
        asked = "cat /run/opendsec/generation /proc/sys/kernel/random/boot_id"
        seen = set((await box.run(asked)).stdout.split())
        await box.backend.snapshot(box.running.handle, target)
        assert (await box.run(f"echo more >> /root/disk; {RECALL}")).exit.exit_code == 1
        await box.backend.pause(box.running.handle)
        parked = place.state_dir.parent / "snapshot-parked"
        parked.mkdir()
        await box.backend.snapshot(box.running.handle, parked)
        assert isinstance(await box.backend.recover(box.running.handle), Parked)
    for source, code in ((target, 0), (target, 0), (parked, 1)):
        plan = replace(place.plan(), snapshot=source)
        started = Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
        try:
            assert place.backend.usage(started.running.handle).oom_kills == 0, "its own, before anything ran"
            assert (await started.run(RECALL)).exit.exit_code == code
            assert (await started.run("exit 3")).exit.exit_code == 3
            assert place.backend.usage(started.running.handle).oom_kills == 0, "what its source did is not its own"
            seen |= set((await started.run(asked)).stdout.split())
        finally:
            await place.destroy(plan)
    assert len(seen) == 2 * 4, "each has its own"
    await refused_when_damaged(place, target, parked)
    shutil.rmtree(parked)
    await goes_on_without_its_snapshot(place, target)


async def goes_on_without_its_snapshot(place: Place, snapshot: Path) -> None:
    """Somebody removes it by force: what was started from it is paused, copied and packed as ever."""
    plan = replace(place.plan(), snapshot=snapshot)
    box = Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
    shutil.rmtree(snapshot)
    copy = place.state_dir.parent / "snapshot-of-fork"
    copy.mkdir()
    await box.backend.snapshot(box.running.handle, copy)
    for _ in range(2):
        await box.backend.pause(box.running.handle)
        await box.backend.resume(box.running.handle)
        await again(box)
        assert (await box.run(RECALL)).exit.exit_code == 0
    await place.destroy(plan)
    shutil.rmtree(copy)


def other_processor(machine: Path) -> None:
    text = (machine / MANIFEST).read_text()
    (machine / MANIFEST).write_text(text.replace('"cpu_model":"max"', '"cpu_model":"other"'))


def cut_devices(machine: Path) -> None:
    os.truncate(machine / "devices", 100)


def flip_devices(machine: Path) -> None:
    data = bytearray((machine / "devices").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (machine / "devices").write_bytes(data)


def strange_devices(machine: Path) -> None:
    """What was written is whole, and no machine."""
    data = b"no stream of QEMU's" * 1000
    (machine / "devices").write_bytes(data)
    manifest = json.loads((machine / MANIFEST).read_bytes())
    for file in manifest["files"]:
        if file["name"] == "devices":
            file |= {"size": len(data), "crc32": zlib.crc32(data)}
    (machine / MANIFEST).write_text(json.dumps(manifest))


def cut_memory(machine: Path) -> None:
    os.truncate(machine / "memory", 64 * MIB)


def no_manifest(machine: Path) -> None:
    (machine / MANIFEST).unlink()


async def refused_when_damaged(place: Place, good: Path, scratch: Path) -> None:
    damages: list[tuple[Callable[[Path], None], str]] = [
        (other_processor, "processor model"),
        (cut_devices, "devices"),
        (flip_devices, "checksum"),
        (strange_devices, "does not take the saved devices: .*(?i:not) a migration stream"),
        (cut_memory, "memory"),
        (no_manifest, MANIFEST),
    ]
    for damage, named in damages:
        shutil.rmtree(scratch)
        shutil.copytree(good, scratch, copy_function=lambda old, new: copy_sparse(Path(old), Path(new)))
        damage(scratch / MACHINE)
        plan = replace(place.plan(), snapshot=scratch)
        with pytest.raises(SnapshotInvalidError, match=named):
            await place.backend.start(plan)
        assert [*plan.state_dir.iterdir(), *plan.run_dir.iterdir()] == []
        await place.destroy(plan)


async def test_a_damaged_template_is_made_anew(place: Place) -> None:
    async with place.sandbox():
        templates = place.state_dir.parent / "microvm/templates"
        made = [path for path in templates.iterdir() if (path / MACHINE).is_dir()]
        flip_devices(max(made, key=lambda path: path.stat().st_mtime) / MACHINE)  # the one it was copied from
    plan = place.plan()
    with pytest.raises(StartError, match="damaged") as caught:
        await place.backend.start(plan)
    assert (caught.value.retryable, caught.value.sandbox_id) == (True, plan.sandbox_id)
    await place.destroy(plan)
    async with place.sandbox() as box:
        assert (await box.run("echo $((6*7))")).stdout == b"42\n"


async def test_a_vmm_that_is_killed_while_it_loads_costs_no_template(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place.sandbox():
        pass
    templates = place.state_dir.parent / "microvm/templates"
    before = {path.name: path.stat().st_ino for path in templates.iterdir()}
    backend = place.backend
    assert isinstance(backend, MicroVmBackend)
    restore = backend._vmm.restore

    async def killed(*args: Any, **more: Any) -> Vm:
        vm = await restore(*args, **more)
        os.kill(vm.pid, 9)
        return vm

    monkeypatch.setattr(backend._vmm, "restore", killed)
    plan = place.plan()
    with pytest.raises(StartError, match="agent did not answer"):
        await backend.start(plan)
    assert {path.name: path.stat().st_ino for path in templates.iterdir()} == before
    await place.destroy(plan)


async def test_a_new_edge_finds_running_and_parked_ones(place: Place) -> None:
    async with place.sandbox() as running, place.sandbox() as parked, place.sandbox() as cut:
        command = await running.start("echo before; cat; echo after", stdin=True)
        await parked.run(REMEMBER)
        await parked.backend.pause(parked.running.handle)
        # Its edge died between the end of saving and the end of the VMM.
        backend = place.backend
        assert isinstance(backend, MicroVmBackend)
        vm = backend._live.vms[cut.plan.sandbox_id]
        await vm.pause()
        saved = cut.plan.state_dir / PAUSED
        saved.mkdir()
        await vm.save(saved)
        pid = vm.pid
        await restart(place)
        for box in (running, parked, cut):
            box.backend = place.backend
        found = await place.backend.recover(running.running.handle)
        assert isinstance(found, Running)
        running.running = found
        await running.guest.attach(command, 0, 0)
        await running.guest.write_stdin(command, 0, b"between\n", eof=True)
        assert (await running.finish(command)).stdout == b"before\nbetween\nafter\n"
        for box in (parked, cut):
            assert isinstance(await place.backend.recover(box.running.handle), Parked)
            await place.backend.resume(box.running.handle)
            await again(box)
        assert process.identify(pid) is None or pid not in [*process.children(os.getpid())]
        assert (await parked.run(RECALL)).exit.exit_code == 0
        assert (await cut.run("echo alive")).stdout == b"alive\n"


async def test_a_vmm_that_was_killed_is_a_lost_sandbox(place: Place) -> None:
    async with place.sandbox() as box:
        os.kill(vmm_of(box), 9)
        await box.guest.wait_closed()
        for verb in (box.backend.pause, box.backend.resume):
            with pytest.raises(SandboxLostError):
                await verb(box.running.handle)
        assert await box.backend.recover(box.running.handle) is None
        assert await box.backend.reconnect(box.running.handle) is None
        await box.backend.stop(box.running.handle, grace_s=0)


async def test_a_base_that_was_removed_under_it_is_no_end_of_a_machine(place: Place) -> None:
    async with place.sandbox() as box:
        base = box.plan.state_dir / "base/memory"
        base.rename(base.with_name("away"))
        with pytest.raises(SnapshotInvalidError, match="memory it was started from was removed") as caught:
            await box.backend.pause(box.running.handle)
        assert not caught.value.retryable
        await again(box)
        assert (await box.run("echo alive")).stdout == b"alive\n"
        base.with_name("away").rename(base)
        await box.backend.pause(box.running.handle)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.2])
async def test_who_destroys_wins(place: Place, delay_s: float) -> None:
    async def cycle(box: Sandbox) -> None:
        with contextlib.suppress(OpenDSecError, FileNotFoundError):
            while True:
                await box.backend.pause(box.running.handle)
                await box.backend.resume(box.running.handle)

    async with asyncio.TaskGroup() as group:
        async with place.sandbox() as box:
            cycling = group.create_task(cycle(box))
            await asyncio.sleep(delay_s)
        await asyncio.wait((cycling,), timeout=20)
        assert cycling.done()
    assert place.backend.report().live == 0


async def test_a_full_disk_of_the_host(place: Place) -> None:
    backend = place.backend
    plan = place.plan(resources=Resources(memory_limit_mb=128))
    other = plan.state_dir.parent / f"{plan.sandbox_id}-disk"
    other.mkdir()
    mounted = await make_disk(other, size_bytes=160 * MIB)
    plan = replace(plan, state_dir=mounted / "sandbox")
    plan.state_dir.mkdir()
    filler = mounted / "filler"
    try:
        fill(filler, leave=8 * MIB)
        with pytest.raises(DiskFullError):
            await backend.start(plan)
        assert [*plan.state_dir.iterdir(), *plan.run_dir.iterdir()] == []
        filler.unlink()
        box = Sandbox(backend, plan, await backend.start(plan))
        await box.run(REMEMBER)
        for leave in (MIB, 16 * 1024):  # for devices and not for memory; not for devices either
            fill(filler, leave=leave)
            with pytest.raises(DiskFullError):
                await backend.pause(box.running.handle)
            await again(box)
            filler.unlink()
        assert (await box.run(RECALL)).exit.exit_code == 0
        await backend.destroy(
            plan.sandbox_id, box.running.handle, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot
        )
    finally:
        remove_disk(other)
        other.rmdir()
        (place.state_dir / plan.sandbox_id).rmdir()
        plan.run_dir.rmdir()
        place.slots.append(plan.slot)


def fill(path: Path, *, leave: int) -> None:
    """A file that takes all room of its file system but so much."""
    found = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)


async def test_what_was_written_is_packed(place: Place) -> None:
    async with place.sandbox() as box:
        await box.run("mkdir -p /new/d; echo x > /new/d/f; rm /bin/vi; chmod 4755 /new/d/f; ln -s f /new/d/l")
        for parked in (False, True):
            if parked:
                await box.backend.pause(box.running.handle)
            async with box.backend.changes(box.running.handle, image=box.plan.image) as changes:
                assert isinstance(changes, Changes)
                assert (changes.tree / "new/d/f").read_bytes() == b"x\n"
                assert (changes.tree / "new/d/f").stat().st_mode & 0o7777 == 0o4755
                assert (changes.tree / "new/d/l").readlink() == Path("f")
                gone = (changes.tree / "bin/vi").lstat()
                assert (gone.st_rdev, os.path.exists(changes.tree / "etc/passwd")) == (0, False)
                assert len(changes.lower) == 1
            assert isinstance(await box.backend.recover(box.running.handle), Parked if parked else Running)


async def test_a_pack_that_fails_leaves_no_clock_behind(box: Sandbox) -> None:
    async def generation() -> bytes:
        return (await box.run("cat /run/opendsec/generation")).stdout

    async def fail() -> None:
        async with box.backend.changes(box.running.handle, image=box.plan.image):
            await asyncio.sleep(3)
            raise RuntimeError("no room for the pack")

    before = await generation()
    with pytest.raises(RuntimeError, match="no room for the pack"):
        await fail()
    assert await generation() not in (b"", before)
    assert int((await box.run("date +%s")).stdout) > time.time() - 2


async def test_a_disk_for_what_cannot_lie_on_an_overlay(place: Place) -> None:
    image = replace(
        place.images["busybox"], config=replace(place.images["busybox"].config, labels={DATA_LABEL: "/var/lib/docker"})
    )
    plan = replace(place.plan(), image=image)
    box = Sandbox(place.backend, plan, await place.backend.start(plan))
    try:
        kind = "awk '$2==\"/var/lib/docker\"{print $3}' /proc/mounts; cd /var/lib/docker; mkdir u w /m"
        laid = "mount -t overlay o -o lowerdir=/etc,upperdir=u,workdir=w /m && ls /m/passwd"
        assert (await box.run(f"{kind}; {laid}")).stdout == b"ext4\n/m/passwd\n"
        await box.run("echo kept > /var/lib/docker/f")
        await box.backend.pause(box.running.handle)
        await box.backend.resume(box.running.handle)
        await again(box)
        assert (await box.run("cat /var/lib/docker/f")).stdout == b"kept\n"
    finally:
        await place.destroy(plan)


async def test_networks_are_apart(place: Place) -> None:
    async with place.sandbox(rules={"*": True}) as first, place.sandbox(rules={"*": True}) as second:
        show = "ip -4 -o address show eth0 | awk '{print $4}'; ip route | awk '/default/{print $3}'"
        (one, host), (two, _) = [(await box.run(show)).stdout.decode().split() for box in (first, second)]
        assert one != two
        for address in (two.partition("/")[0], host):
            assert (await first.run(f"ping -c 1 -W 1 {address}")).exit.exit_code != 0
        serving = await second.start("echo ready; nc -l -p 8080 -e cat")
        await second.wait_for(serving, b"ready")
        with socket_to(two.partition("/")[0]) as there:
            there.sendall(b"hello")
            there.shutdown(1)
            assert there.recv(100) == b"hello"
        await second.backend.pause(second.running.handle)
        await second.backend.resume(second.running.handle)
        await again(second)
        assert (await second.run(show)).stdout.decode().split()[0] == two
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("odsv-")]


@contextlib.contextmanager
def socket_to(address: str) -> Iterator[socket.socket]:
    end = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection((address, 8080), timeout=5) as connected:
                yield connected
                return
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
