"""What goes wrong with machines under Firecracker: each has its error, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.capabilities import STATE_DIR
from tests.node.vm.firecracker.yard import JAILED, Yard
from tests.node.vm.tiny_guest import run

from opendsec.errors import (
    DiskFullError,
    HostCapabilityError,
    NodeError,
    SandboxLostError,
    SnapshotInvalidError,
    StartError,
)
from opendsec.guest.base import GuestLostError
from opendsec.linux import libc
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_api import Api
from opendsec.vm.firecracker_machine import FirecrackerVm, Record
from opendsec.vm.firecracker_start import Programs

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.firecracker]

DYING = Path(__file__).with_name("dying_edge.py")


def rewrite(saved: Path, **changed: object) -> None:
    """Change the manifest; checksums and sizes of its files are made right again."""
    manifest = saved / "machine.json"
    content = json.loads(manifest.read_text()) | changed
    for file in content["files"]:
        path = saved / file["name"]
        file["size"] = path.stat().st_size
        file["crc32"] = None if file["crc32"] is None else zlib.crc32(path.read_bytes())
    manifest.write_text(json.dumps(content))


def spoil(path: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize("host_id", [0, JAILED], ids=["root", "jailed"])
@pytest.mark.parametrize("step", ["1", "done"], ids=["not said to run", "running"])
async def test_an_edge_killed_during_a_start_leaves_a_machine_found_or_none(
    yard: Yard, saved: Path, step: str, host_id: int
) -> None:
    place = yard.place(host_id=host_id)
    paths = [str(path) for path in (saved, yard.run_dir, place.directory, STATE_DIR)]
    argv = [sys.executable, str(DYING), step, *paths, str(host_id)]
    done = subprocess.run(argv, input=pickle.dumps(yard.spec), timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(yard.processes()) == 1
    found = await yard.vmm.find(place)
    if step == "done":
        assert found is not None
        assert await yard.wrong_pages(yard.keep(found)) == 0
        return
    assert found is None
    assert list(place.directory.iterdir()) == []
    assert yard.processes() == []


@pytest.mark.parametrize("name", ["mem", "mem.pages", ".machine.json"])
async def test_links_a_vmm_has_made_where_it_saves_are_not_followed(
    yard: Yard, saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    victim.chmod(0o600)
    create = FirecrackerVm._create

    async def create_and_link(vm: FirecrackerVm, target: Path, kind: str) -> None:
        await create(vm, target, kind)
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to(victim)

    vm = await yard.restore(saved)
    await vm.pause()
    monkeypatch.setattr(FirecrackerVm, "_create", create_and_link)
    target = yard.folder()
    with pytest.raises(NodeError, match="nothing that Firecracker writes"):
        await vm.save(target)
    assert (victim.read_bytes(), victim.stat().st_mode & 0o777) == (b"", 0o600)
    assert list(target.iterdir()) == []


async def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(yard: Yard) -> None:
    place = yard.place()
    record = Record.fresh(yard.spec, host_id=0)
    record.pid, record.start_ticks, record.running = os.getpid(), 1, True
    record.write(place.directory)
    assert await yard.vmm.find(place) is None
    assert list(place.directory.iterdir()) == []


@pytest.mark.parametrize("at", [("restore", "snapshot/load"), ("boot", "machine-config"), ("boot", "actions")])
async def test_a_vmm_killed_during_a_start_is_a_start_error(
    yard: Yard, saved: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[str, str]
) -> None:
    put = Api.put

    async def put_or_kill(api: Api, path: str, body: dict[str, Any], **options: Any) -> None:
        if path == at[1]:
            for pid in yard.processes():
                os.kill(pid, signal.SIGKILL)
        await put(api, path, body, **options)

    monkeypatch.setattr(Api, "put", put_or_kill)
    place = yard.place()
    start = yard.vmm.boot(yard.spec, place) if at[0] == "boot" else yard.vmm.restore(saved, yard.spec, place)
    with pytest.raises(StartError, match="ended while it started"):
        await start
    assert list(place.directory.iterdir()) == []
    assert yard.processes() == []


async def test_a_vmm_killed_later_is_a_lost_sandbox_and_its_end_is_noticed(yard: Yard, saved: Path) -> None:
    vm = await yard.restore(saved)
    guest = await yard.guest(vm)
    waiting = asyncio.ensure_future(vm.wait_ended())
    os.kill(vm.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await waiting
        await guest.wait_closed()
    for call in (vm.pause(), vm.resume(), vm.save(yard.folder())):
        with pytest.raises(SandboxLostError):
            await call
    with pytest.raises(GuestLostError):
        await vm.connect(timeout_s=5)
    with pytest.raises(SandboxLostError):
        vm.console()
    await vm.kill()
    await vm.kill()


async def test_a_vmm_killed_while_it_saves_leaves_no_save(
    yard: Yard, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await yard.restore(saved, host_id=JAILED)
    await vm.pause()
    put = Api.put

    async def put_and_kill(api: Api, path: str, body: dict[str, Any], **options: Any) -> None:
        await put(api, path, body, **options)
        os.kill(vm.pid, signal.SIGKILL)

    monkeypatch.setattr(Api, "put", put_and_kill)
    target = yard.folder()
    await vm.save(target)  # all was written before it died: that is a save
    monkeypatch.setattr(Api, "put", put)
    assert await yard.wrong_pages(await yard.restore(target)) == 0


async def test_a_stopped_vmm_is_not_waited_for_without_end(yard: Yard, saved: Path) -> None:
    vm = await yard.restore(saved)
    os.kill(vm.pid, signal.SIGSTOP)
    with pytest.raises(GuestLostError, match="within"):
        await vm.connect(timeout_s=0.3)
    await vm.kill()
    assert yard.processes() == []


async def test_an_api_that_is_gone_is_the_nodes_fault_and_the_machine_can_still_be_ended(
    yard: Yard, saved: Path
) -> None:
    place = yard.place()
    vm = yard.keep(await yard.vmm.restore(saved, yard.spec, place))
    (place.directory / "api.sock").unlink()
    with pytest.raises(NodeError, match="does not do what it is asked"):
        await vm.pause()
    assert await yard.wrong_pages(vm) == 0
    await vm.kill()
    assert list(place.directory.iterdir()) == []


async def test_a_cancelled_start_leaves_nothing(yard: Yard, saved: Path) -> None:
    for after_ms in (0, 1, 2, 4, 6, 8, 12, 16):
        await _cancel(yard, saved, after_ms)


async def _cancel(yard: Yard, saved: Path, after_ms: int) -> None:
    places = [yard.place(), yard.place(host_id=JAILED)]
    starts = [asyncio.ensure_future(yard.vmm.restore(saved, yard.spec, place)) for place in places]
    await asyncio.sleep(after_ms / 1000)
    for start in starts:
        start.cancel()
    for start, place in zip(starts, places, strict=True):
        try:
            yard.keep(await start)
        except asyncio.CancelledError:
            assert list(place.directory.iterdir()) == []


async def test_what_was_saved_elsewhere_is_refused_and_the_difference_named(yard: Yard, saved: Path) -> None:
    good = (saved / "machine.json").read_text()
    place = yard.place()
    others: dict[str, object] = {
        "vmm": "qemu",
        "version": "1.11.0",
        "accelerator": "tcg",
        "cpu_model": "GenuineIntel 6 143 Xeon 8",
        "memory_mib": 128,
        "cpus": 2,
        "drives": [["base", True]],
        "card": True,
    }
    for name, value in others.items():
        rewrite(saved, **{name: value})
        with pytest.raises(SnapshotInvalidError, match="bound to another") as caught:
            await yard.vmm.restore(saved, yard.spec, place)
        assert repr((("base", True),) if name == "drives" else value) in str(caught.value)
        (saved / "machine.json").write_text(good)
    assert list(place.directory.iterdir()) == []
    yard.keep(await yard.vmm.restore(saved, yard.spec, place))


async def test_damage_is_noticed_before_a_guest_runs_on_it(yard: Yard, saved: Path) -> None:
    place = yard.place()
    state = (saved / "state").read_bytes()
    memory = (saved / "mem").stat().st_size
    spoil(saved / "state", 4000, b"\xff" * 64)
    with pytest.raises(SnapshotInvalidError, match="damaged"):
        await yard.vmm.restore(saved, yard.spec, place)
    rewrite(saved)  # by somebody who made the checksums right as well
    with pytest.raises(SnapshotInvalidError, match="Firecracker says"):
        await yard.vmm.restore(saved, yard.spec, place)
    (saved / "state").chmod(0o644)
    (saved / "state").write_bytes(state[:1000])
    rewrite(saved)
    with pytest.raises(SnapshotInvalidError, match="Firecracker says"):
        await yard.vmm.restore(saved, yard.spec, place)
    (saved / "state").write_bytes(state)
    rewrite(saved)
    os.truncate(saved / "mem", memory // 2)
    with pytest.raises(SnapshotInvalidError, match="mem"):
        await yard.vmm.restore(saved, yard.spec, place)
    (saved / "machine.json").unlink()
    with pytest.raises(SnapshotInvalidError, match="machine"):
        await yard.vmm.restore(saved, yard.spec, place)
    assert list(place.directory.iterdir()) == []
    assert yard.processes() == []


async def test_changes_whose_base_is_gone_are_refused(yard: Yard, saved: Path) -> None:
    vm = await yard.restore(saved)
    await vm.pause()
    changes = yard.folder()
    await vm.save(changes)
    (saved / "mem").unlink()
    with pytest.raises(SnapshotInvalidError, match="is gone"):
        await yard.vmm.restore(changes, yard.spec, yard.place())


async def test_a_full_disk_is_named_leaves_nothing_and_the_machine_can_be_saved_elsewhere(
    yard: Yard, saved: Path
) -> None:
    small = yard.folder()
    libc.mount("tmpfs", small, "tmpfs", libc.MS_NOSUID, "size=2m")
    try:
        for host_id in (0, JAILED):
            vm = await yard.restore(saved, host_id=host_id)
            guest = await yard.guest(vm)
            assert await run(guest, 1, "fill 2000 9") == (0, b"2000")
            await vm.pause()
            with pytest.raises(DiskFullError):
                await vm.save(small)
            assert list(small.iterdir()) == []
            await vm.resume()
            assert await yard.wrong_pages(vm, pages=2000, seed=9) == 0
            await vm.pause()
            good = yard.folder()
            await vm.save(good)
            await vm.kill()
            again = await yard.restore(good, host_id=host_id)
            assert await yard.wrong_pages(again, pages=2000, seed=9) == 0
            assert await yard.wrong_pages(again) == 2000
    finally:
        libc.umount2(small, libc.MNT_DETACH)


async def test_without_the_right_to_use_kvm_the_reason_is_said(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device nodes of the jail do not open, as where the file system of jails is mounted nodev."""
    monkeypatch.setattr(libc, "MS_NOSUID", libc.MS_NOSUID | libc.MS_NODEV)
    place = yard.place(host_id=JAILED)
    with pytest.raises(StartError, match=r"(?i)kvm.*denied|denied.*kvm"):
        await yard.vmm.boot(yard.spec, place)
    assert list(place.directory.iterdir()) == []


async def test_what_cannot_be_started_says_why(yard: Yard, tmp_path: Path) -> None:
    place = yard.place()
    gone = replace(yard.spec.drives[0], path=tmp_path / "gone")
    with pytest.raises(StartError, match="drives/base"):
        await yard.vmm.boot(replace(yard.spec, drives=(gone,)), place)
    with pytest.raises(StartError, match=r"(?i)kernel|elf"):
        await yard.vmm.boot(replace(yard.spec, kernel=yard.disk / "base"), place)
    deep = replace(place, directory=place.directory / ("x" * 90))
    deep.directory.mkdir()
    with pytest.raises(StartError, match="too long"):
        await yard.vmm.boot(yard.spec, deep)
    assert list(deep.directory.iterdir()) == []
    deep.directory.rmdir()


async def test_programs_that_are_none(yard: Yard, tmp_path: Path) -> None:
    program = tmp_path / "firecracker"
    programs = Programs(firecracker=program, jailer=yard.programs.jailer)
    for content, words in ((None, "no program"), ("#!/bin/sh\necho 7", "which version"), ("", "does not run")):
        if content is not None:
            program.write_text(content)
            program.chmod(0o755)
        with pytest.raises(HostCapabilityError, match=words) as caught:
            await FirecrackerVmm(programs=programs, run_dir=yard.run_dir).open()
        assert "opendsec firecracker install" in caught.value.remedy
    program.write_text("#!/bin/sh\necho Firecracker v1.9.0")
    with pytest.raises(HostCapabilityError, match="is not supported"):
        await FirecrackerVmm(programs=programs, run_dir=yard.run_dir).open()
