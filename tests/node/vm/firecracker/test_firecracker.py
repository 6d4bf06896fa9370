"""The driver against the real Firecracker and a guest without an operating system: start, save, restore, find again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.vm.firecracker.yard import CONNECT_S, JAILED, PAGES, Yard
from tests.node.vm.tiny_guest import run

from opendsec.errors import StartError
from opendsec.guest.base import GuestError, GuestLostError, StartCommand
from opendsec.linux import process
from opendsec.linux.cgroup import find_mounts
from opendsec.vm import firecracker_machine
from opendsec.vm.base import Card, Drive, Rates
from opendsec.vm.firecracker import MAX_DRIVES, FirecrackerVmm
from opendsec.vm.firecracker_machine import FirecrackerVm
from opendsec.vm.firecracker_start import CONSOLE_BYTES
from opendsec.vm.kernels import file_digest

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.firecracker]

as_root_and_jailed = pytest.mark.parametrize("host_id", [0, JAILED], ids=["root", "jailed"])


@as_root_and_jailed
async def test_a_guest_boots_talks_and_sees_its_drives(yard: Yard, host_id: int) -> None:
    vm = await yard.boot(host_id=host_id)
    guest = await yard.guest(vm)
    assert guest.agent == "tiny"
    assert guest.capabilities == {"machine"}
    assert await guest.ping() > 0
    assert await run(guest, 1, "echo hello") == (0, b"hello")
    assert await run(guest, 2, "read 0 0") == (0, b"what is on the base")
    assert await run(guest, 3, "write 1 3 kept") == (0, b"")
    assert yard.spec.drives[1].path.read_bytes()[3 * 512 :][:5] == b"kept\0"
    assert (await run(guest, 4, "write 0 0 no"))[0] != 0, "a read-only drive was written"
    serial = await run(guest, 5, "serial 0")
    assert serial == (0, yard.vmm.serial_of(yard.spec.drives[0]).encode())
    assert "tiny guest: ready" in vm.console()
    status = Path(f"/proc/{vm.pid}/status").read_text()
    assert f"Uid:\t{host_id}\t{host_id}\t{host_id}\t{host_id}" in status
    assert f"Gid:\t{host_id}\t{host_id}\t{host_id}\t{host_id}" in status


@as_root_and_jailed
async def test_what_was_saved_goes_on_any_number_of_times_each_on_its_own(yard: Yard, host_id: int) -> None:
    saved = await yard.template(host_id=host_id)
    before = file_digest(saved / "mem")
    clones = [await yard.restore(saved, host_id=host_id) for _ in range(2)]
    guests = [await yard.guest(vm) for vm in clones]
    assert [guest.boot_id for guest in guests] == [guests[0].boot_id] * 2, "they are one machine's past"
    assert await run(guests[0], 1, f"fill {PAGES} 99") == (0, b"%d" % PAGES)
    assert await yard.wrong_pages(clones[1]) == 0
    assert await yard.wrong_pages(clones[0], seed=99) == 0
    assert file_digest(saved / "mem") == before
    used = (saved / "mem").stat().st_blocks * 512
    assert used < 48 * 1024 * 1024, "zero pages take room on the disk"


@as_root_and_jailed
async def test_saves_of_saves_hold_what_changed_and_lean_on_one_base(yard: Yard, saved: Path, host_id: int) -> None:
    base = saved / "mem"
    before = file_digest(base)
    for generation in (1, 2, 3):
        vm = await yard.restore(saved, host_id=host_id)
        guest = await yard.guest(vm)
        assert await run(guest, 1, f"fill {400 // generation} {generation}") == (0, b"%d" % (400 // generation))
        if generation > 1:  # as after a resume: what it was restored from goes, but for the base
            shutil.rmtree(saved)
        await vm.pause()
        saved = yard.folder()
        await vm.save(saved)
        await vm.kill()
        assert json.loads((saved / "machine.json").read_text())["base"] == str(base)
        assert (saved / "mem").stat().st_blocks * 512 < 8 * 1024 * 1024
    assert file_digest(base) == before
    vm = await yard.restore(saved, host_id=host_id)
    assert await yard.wrong_pages(vm, pages=133, seed=3) == 0
    assert await yard.wrong_pages(vm, pages=200, seed=2) == 133
    assert await yard.wrong_pages(vm, pages=400, seed=1) == 200
    assert await yard.wrong_pages(vm) == 400


async def test_a_whole_save_needs_no_other_file(yard: Yard) -> None:
    first = await yard.template()
    vm = await yard.restore(first)
    assert await run(await yard.guest(vm), 1, "fill 100 5") == (0, b"100")
    await vm.pause()
    whole = yard.folder()
    await vm.save(whole, whole=True)
    await vm.kill()
    for path in first.iterdir():
        path.unlink()
    assert sorted(path.name for path in whole.iterdir()) == ["machine.json", "mem", "mem.sums", "state"]
    again = await yard.restore(whole)
    assert await yard.wrong_pages(again, pages=100, seed=5) == 0
    assert await yard.wrong_pages(again) == 100


async def test_a_vmm_that_keeps_its_files_open_changes_nothing_others_start_from(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await yard.boot(host_id=JAILED)
    await vm.pause()
    kept: list[int] = []

    def looks(target: Path) -> None:
        kept.extend(os.open(target / name, os.O_RDWR) for name in ("state", "mem"))

    monkeypatch.setattr(firecracker_machine, "_must_be_plain", looks)  # it has written, and goes on
    saved = yard.folder()
    await vm.save(saved, whole=True)
    before = [file_digest(saved / name) for name in ("state", "mem")]
    for fd in kept:
        os.pwrite(fd, b"changed" * 1000, 0)
        os.close(fd)
    assert len(kept) == 2
    assert [file_digest(saved / name) for name in ("state", "mem")] == before
    assert sorted(path.name for path in saved.iterdir()) == ["machine.json", "mem", "mem.sums", "state"]
    await yard.guest(await yard.restore(saved, host_id=JAILED))


async def test_a_machine_may_be_saved_more_than_once_and_goes_on(yard: Yard) -> None:
    vm = await yard.boot()
    leans_on, first = [], yard.disk
    for turn in (1, 2, 3, 4):
        assert await run(await yard.guest(vm), turn, f"fill {100 * turn} {turn}") == (0, b"%d" % (100 * turn))
        await vm.pause()
        await vm.pause()
        saved = yard.folder()
        await vm.save(saved)
        leans_on.append(json.loads((saved / "machine.json").read_text())["base"])
        await vm.resume()
        await vm.resume()
        clone = await yard.restore(saved)
        assert await yard.wrong_pages(clone, pages=100 * turn, seed=turn) == 0
        if turn == 1:
            first = saved
        elif turn == 2:  # changes are held open
            shutil.rmtree(saved)
        elif turn == 3:  # what all lean on is gone: the next must be whole
            shutil.rmtree(first)
    assert leans_on == ["", str(first / "mem"), str(first / "mem"), ""]


async def test_restored_but_not_running_until_it_is_told_to(yard: Yard, saved: Path) -> None:
    vm = yard.keep(await yard.vmm.restore(saved, yard.spec, yard.place(), paused=True))
    with pytest.raises(GuestLostError):
        await vm.connect(timeout_s=0.3)
    await vm.resume()
    assert await yard.wrong_pages(vm) == 0


async def test_fifty_clones_at_once_and_none_like_the_other(yard: Yard, saved: Path) -> None:
    turn = asyncio.Semaphore(4)

    async def one(number: int) -> int:
        async with turn:
            vm = await yard.restore(saved, spec=yard.with_scratch(f"scratch{number}"))
            guest = await yard.guest(vm)
            assert await run(guest, 1, f"fill 8 {number}") == (0, b"8")
            assert await run(guest, 2, f"write 1 0 {number}") == (0, b"")
        return number

    numbers = await asyncio.gather(*(one(number) for number in range(100, 150)))
    vms = yard.living()
    assert len({vm.pid for vm in vms}) == 50
    for number in numbers:
        assert (yard.disk / f"scratch{number}").read_bytes().startswith(b"%d\0" % number)
    assert sorted([await yard.wrong_pages(vm, pages=8, seed=149) for vm in vms]) == [0] + [8] * 49


@as_root_and_jailed
async def test_found_again_by_another_driver(yard: Yard, saved: Path, host_id: int) -> None:
    place = yard.place(host_id=host_id)
    first = await yard.vmm.restore(saved, yard.spec, place)
    await first.release()
    other = FirecrackerVmm(programs=yard.programs, run_dir=yard.run_dir)
    await other.open()
    found = await other.find(place)
    assert found is not None
    yard.keep(found)
    assert found.pid == first.pid
    assert await yard.wrong_pages(found) == 0
    await found.pause()
    target = yard.folder()
    await found.save(target)
    leans_on = json.loads((target / "machine.json").read_text())["base"]
    assert leans_on == str(saved / "mem"), "the new driver did not know what the machine was restored from"
    await found.kill()
    assert await other.find(place) is None
    assert list(place.directory.iterdir()) == []
    await other.close()


async def test_two_starts_in_one_place_hurt_nobody(yard: Yard, saved: Path) -> None:
    place = yard.place()
    outcomes = await asyncio.gather(
        *(yard.vmm.restore(saved, yard.spec, place) for _ in range(3)), return_exceptions=True
    )
    alive = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(alive) == 1
    assert [type(one) for one in outcomes if isinstance(one, BaseException)] == [StartError, StartError]
    assert await yard.wrong_pages(yard.keep(alive[0])) == 0


async def test_a_guest_that_prints_without_end_fills_64_kib_and_no_more(yard: Yard) -> None:
    vm = await yard.boot()
    guest = await yard.guest(vm)
    line = "x" * 500
    for number in range(1, 10):
        assert await run(guest, number, f"say {line}") == (0, b"")
    assert CONSOLE_BYTES - 600 < len(vm.console()) <= CONSOLE_BYTES
    assert await run(guest, 20, "echo on") == (0, b"on")


async def test_what_is_too_much_for_the_guest_is_taken_and_refused(yard: Yard) -> None:
    """More bytes than the vsock's window: credit comes back as the guest takes them."""
    guest = await yard.guest(await yard.boot())
    with pytest.raises(GuestError, match="too long"):
        await guest.start(1, StartCommand(script="x" * 1_000_000))
    assert await run(guest, 2, "echo on") == (0, b"on")


async def test_a_new_connection_replaces_the_old(yard: Yard) -> None:
    vm = await yard.boot()
    first = await yard.guest(vm)
    second = await yard.guest(vm)
    async with asyncio.timeout(60):
        await first.wait_closed()
    assert await run(second, 1, "echo second") == (0, b"second")


async def test_a_guest_that_resets_itself_has_ended(yard: Yard) -> None:
    vm = await yard.boot()
    guest = await yard.guest(vm)
    with pytest.raises(GuestLostError):
        await run(guest, 1, "reset")
    async with asyncio.timeout(60):
        await vm.wait_ended()
    with pytest.raises(GuestLostError, match="ended"):
        await vm.connect(timeout_s=5)


async def test_it_runs_in_the_groups_it_is_given(yard: Yard) -> None:
    unified = find_mounts().unified
    assert unified is not None
    group = unified / f"opendsec-fc-test-{os.getpid()}"
    group.mkdir()
    descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        vm = yard.keep(await yard.vmm.boot(yard.spec, yard.place(host_id=JAILED, cgroup_procs=(descriptor,))))
        assert (group / "cgroup.procs").read_text().split() == [str(vm.pid)]
        await vm.kill()
    finally:
        os.close(descriptor)
        group.rmdir()


@pytest.mark.tun
async def test_a_machine_takes_as_many_drives_as_are_said(yard: Yard) -> None:
    tap = f"odsfc{os.getpid() % 100_000}m"
    subprocess.run(["ip", "tuntap", "add", tap, "mode", "tap"], check=True, timeout=120)
    try:
        many = [Drive(name=f"d{number}", path=yard.disk / "base") for number in range(MAX_DRIVES - 1)]
        card = Card(tap=tap, mac="06:00:00:00:00:01")
        spec = replace(yard.spec, drives=(*many, yard.scratch("last")), card=card, balloon=True)
        vm = yard.keep(await yard.vmm.boot(spec, yard.place(host_id=JAILED)))
        async with asyncio.timeout(CONNECT_S):
            while "tiny guest: ready" not in vm.console():
                await asyncio.sleep(0.01)
        others = 3 + yard.vmm.reports_free_pages  # card, vsock, entropy
        assert vm.console().count("virtio_mmio.device=") == MAX_DRIVES + others
        await vm.pause()
        saved = yard.folder()
        await vm.save(saved)
        await vm.kill()
        assert process.identify((await yard.restore(saved, spec=spec, host_id=JAILED)).pid) is not None
        await yard.living()[0].kill()
    finally:
        subprocess.run(["ip", "link", "delete", tap], check=True, timeout=120)


@pytest.mark.tun
@as_root_and_jailed
async def test_a_restored_machine_takes_the_tap_it_is_given(yard: Yard, host_id: int) -> None:
    taps = [f"odsfc{os.getpid() % 100_000}{letter}" for letter in "ab"]
    for tap in taps:
        subprocess.run(["ip", "tuntap", "add", tap, "mode", "tap", "user", str(host_id)], check=True, timeout=120)
    try:
        specs = [replace(yard.spec, card=Card(tap=tap, mac="06:00:00:00:00:01")) for tap in taps]
        vm = yard.keep(await yard.vmm.boot(specs[0], yard.place(host_id=host_id)))
        await yard.guest(vm)
        assert _taps_of(vm.pid) == {taps[0]}
        await vm.pause()
        saved = yard.folder()
        await vm.save(saved)
        clone = await yard.restore(saved, spec=specs[1], host_id=host_id)
        await yard.guest(clone)
        assert _taps_of(clone.pid) == {taps[1]}
        await clone.kill()
        await vm.kill()
    finally:
        for tap in taps:
            subprocess.run(["ip", "link", "delete", tap], check=True, timeout=120)


def _taps_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        for line in entry.read_text().splitlines():
            if line.startswith("iff:"):
                found.add(line.split()[1])
    return found


async def test_rates_reach_the_device(yard: Yard, template: Path) -> None:
    """One operation a second: the third read has to wait for the bucket, also of a machine saved without limits."""
    vmm = FirecrackerVmm(programs=yard.programs, run_dir=yard.run_dir, rates=Rates(disk_operations=1))
    await vmm.open()

    async def waits(vm: FirecrackerVm) -> None:
        guest = await yard.guest(yard.keep(vm))
        begin = asyncio.get_running_loop().time()
        for number in (2, 3, 4):
            assert (await run(guest, number, "read 0 0"))[0] == 0
        assert asyncio.get_running_loop().time() - begin > 0.9

    parked = await vmm.restore(template, yard.spec, yard.place(), paused=True)
    await parked.resume()
    others = [await vmm.boot(yard.spec, yard.place()), await vmm.restore(template, yard.spec, yard.place())]
    await asyncio.gather(*(waits(vm) for vm in (parked, *others)))
    await vmm.close()


async def test_the_probe_of_its_features_leaves_nothing(yard: Yard) -> None:
    assert yard.vmm.binding.vmm == "firecracker"
    if yard.vmm.binding.version.startswith("1.12."):
        assert yard.vmm.reports_free_pages is False
    assert list(yard.run_dir.iterdir()) == []
