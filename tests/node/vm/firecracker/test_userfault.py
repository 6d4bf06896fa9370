"""Memory that is given page by page: from a store that is slow, dies, lies or hangs, and when the giver itself dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.vm.firecracker.slow_file import Told, served
from tests.node.vm.firecracker.yard import JAILED, Yard
from tests.node.vm.tiny_guest import run

from opendsec.errors import SandboxLostError, StartError
from opendsec.guest.base import GuestLostError
from opendsec.linux import process
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_machine import FirecrackerVm, Record
from opendsec.vm.firecracker_start import Programs
from opendsec.vm.remote import is_remote
from opendsec.vm.userfault_client import SOCKET, MemoryServer

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.firecracker, pytest.mark.fuse]

SOURCE = Path(__file__).with_name("toucher.c")
PAGE = 4096
PATIENT_S, IMPATIENT_S = 30.0, 1.0


@pytest.fixture
async def yard(request: pytest.FixtureRequest, programs: Programs, kernel: Path) -> AsyncIterator[Yard]:
    """The parameter is its patience with the store."""
    async with Yard(programs, kernel, read_s=getattr(request, "param", PATIENT_S)) as made:
        yield made


@pytest.fixture
async def far(yard: Yard, saved: Path) -> AsyncIterator[tuple[Path, Told]]:
    """The saved machine on a file system that does as it is told."""
    target = yard.folder()
    with served(saved, target) as told:
        yield target, told
        for vm in yard.living():  # they have its files open
            await vm.kill()


async def ended(vm: FirecrackerVm) -> str:
    """Why it was; it must be soon."""
    async with asyncio.timeout(30):
        await vm.wait_ended()
    with pytest.raises(SandboxLostError) as caught:
        await vm.pause()
    return caught.value.message


@pytest.mark.parametrize("host_id", [0, JAILED], ids=["root", "jailed"])
async def test_memory_from_afar_comes_late_and_right(yard: Yard, far: tuple[Path, Told], host_id: int) -> None:
    store, told = far
    assert is_remote(store)
    assert not is_remote(yard.disk)
    vm = await yard.restore(store, host_id=host_id)
    before = told.reads
    assert await yard.wrong_pages(vm) == 0
    assert told.reads > before, "all of it was read before it was asked for"
    await vm.pause()
    changes = yard.folder()
    await vm.save(changes)
    again = await yard.restore(changes, host_id=host_id)
    assert await yard.wrong_pages(again) == 0
    await again.kill()
    await vm.kill()


async def test_a_slow_store_delays_its_own_machines_only(yard: Yard, far: tuple[Path, Told], saved: Path) -> None:
    store, told = far
    told.wait_s = 0.2
    slow = asyncio.ensure_future(yard.restore(store))
    near = await yard.restore(saved)
    begin = time.monotonic()
    assert await yard.wrong_pages(near) == 0
    fast_s = time.monotonic() - begin
    vm = await slow
    begin = time.monotonic()
    assert await yard.wrong_pages(vm, pages=64) == 0
    assert told.reads > 1
    assert time.monotonic() - begin > 0.2
    assert fast_s < 60
    await vm.kill()


async def test_a_store_that_fails_ends_the_machine_and_says_so(yard: Yard, far: tuple[Path, Told]) -> None:
    store, told = far
    vm = await yard.restore(store)
    guest = await yard.guest(vm)
    told.fail_after = 0
    with pytest.raises(GuestLostError):
        await run(guest, 1, "check 2048 7")
    assert "Input/output error" in await ended(vm)


async def _keep_busy(yard: Yard) -> None:
    """Requests without a pause, as of an edge that starts machine after machine."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(yard.run_dir / SOCKET))
            other.send(b"?")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("yard", [IMPATIENT_S], indirect=True)
async def test_a_store_that_hangs_ends_the_machine_in_time(yard: Yard, far: tuple[Path, Told]) -> None:
    store, told = far
    vm = await yard.restore(store)
    guest = await yard.guest(vm)
    told.hang_after = 0
    starting = asyncio.ensure_future(_keep_busy(yard))
    async with asyncio.timeout(60):
        with pytest.raises(GuestLostError):
            await run(guest, 1, "check 2048 7")
    starting.cancel()
    assert f"did not arrive within {IMPATIENT_S:g} seconds" in await ended(vm)
    told.let_go()


async def test_a_store_that_lies_is_not_believed(yard: Yard, far: tuple[Path, Told], saved: Path) -> None:
    store, _ = far
    with (saved / "mem").open("r+b") as file:
        file.seek((16 << 20) + 100 * PAGE)  # the hundredth of the filled pages
        file.write(b"\0" * 8)
    vm = await yard.restore(store)
    guest = await yard.guest(vm)
    with pytest.raises(GuestLostError):
        await run(guest, 1, "check 2048 7")
    assert "damaged" in await ended(vm)


async def test_a_file_that_shrinks_is_no_source_of_zeros(yard: Yard, saved: Path) -> None:
    vmm = FirecrackerVmm(programs=yard.programs, run_dir=yard.run_dir, remote=lambda _: True)
    await vmm.open()
    vm = yard.keep(await vmm.restore(saved, yard.spec, yard.place()))
    guest = await yard.guest(vm)
    os.truncate(saved / "mem", (16 << 20) + 64 * PAGE)
    with pytest.raises(GuestLostError):
        await run(guest, 1, "check 2048 7")
    assert "the file ends" in await ended(vm)
    await vm.kill()
    await vmm.close()


async def test_when_the_giver_dies_its_machines_end_and_new_ones_get_a_new_one(
    yard: Yard, far: tuple[Path, Told]
) -> None:
    store, _ = far
    places = [yard.place(), yard.place()]
    vms = [yard.keep(await yard.vmm.restore(store, yard.spec, place)) for place in places]
    givers = {record.served_by.pid for place in places if (record := Record.read(place.directory)) and record.served_by}
    assert len(givers) == 1, "one process for all machines of an edge"
    await vms[1].release()
    other = FirecrackerVmm(programs=yard.programs, run_dir=yard.run_dir)  # of the edge that is started next
    await other.open()
    found = await other.find(places[1])
    assert found is not None
    yard.keep(found)
    os.kill(givers.pop(), signal.SIGKILL)
    for vm in (vms[0], found):
        assert "gives it its saved memory has ended" in await ended(vm)
        await vm.kill()
    again = await yard.restore(store)
    assert await yard.wrong_pages(again) == 0
    await again.kill()
    await other.close()


async def test_a_machine_found_after_its_giver_is_ended(yard: Yard, far: tuple[Path, Told]) -> None:
    store, _ = far
    place = yard.place()
    vm = yard.keep(await yard.vmm.restore(store, yard.spec, place))
    record = Record.read(place.directory)
    assert record is not None
    assert record.served_by is not None
    await vm.release()
    giver = record.served_by.pid
    await yard.vmm.close()  # the edge goes, and then the giver
    os.kill(giver, signal.SIGKILL)
    async with asyncio.timeout(60):
        while process.reap(giver) is None and process.identify(giver) is not None:
            await asyncio.sleep(0.01)
    found = await yard.vmm.find(place)
    assert found is not None
    assert "gives it its saved memory has ended" in await ended(yard.keep(found))


@pytest.mark.parametrize("yard", [IMPATIENT_S], indirect=True)
async def test_a_machine_killed_while_it_waits_for_memory_leaves_nothing(yard: Yard, far: tuple[Path, Told]) -> None:
    store, told = far
    told.hang_after = 0
    with pytest.raises((StartError, GuestLostError)):  # some versions touch memory while they load, some later
        await (await yard.restore(store)).connect(timeout_s=0.5)
    for vm in yard.living():
        await vm.kill()
    told.let_go()
    assert yard.processes() == []


class Toucher:
    """`toucher.c`, whose memory the memory server gives."""

    def __init__(self, program: Path, path: Path, size: int) -> None:
        self.process = subprocess.Popen(
            [program, path, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def ask(self, words: str) -> int:
        """Blocking; ValueError when it was ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{words}\n")
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            file.close()
        os.close(self.pidfd)


async def test_pages_given_back_are_zero_and_changed_ones_are_the_changes(yard: Yard, tmp_path: Path) -> None:
    """What a balloon does: pages the guest gave back must not come back as they were saved."""
    program = tmp_path / "toucher"
    subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, SOURCE], check=True, timeout=120)
    base, changes, table = yard.disk / "b", yard.disk / "c", yard.disk / "t"
    pages = 256
    base.write_bytes(b"".join((1000 + page).to_bytes(8, "little").ljust(PAGE, b"\0") for page in range(pages)))
    changes.write_bytes(b"".join((5000 + page).to_bytes(8, "little").ljust(PAGE, b"\0") for page in range(pages)))
    table.write_bytes(bytes([0b10000000]) + bytes(pages // 8 - 1))  # page 7 only, though the file holds all
    server = MemoryServer(yard.run_dir)
    path = yard.run_dir / "t.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        toucher = Toucher(program, path, pages * PAGE)
        await server.serve(
            pidfd=toucher.pidfd, listener=listener, directory=yard.run_dir, layers=(changes, base), table=table
        )
    try:
        async with asyncio.timeout(30):
            answers = [
                await asyncio.to_thread(toucher.ask, words)
                for words in (
                    "r 0",
                    "r 7",
                    "r 255",
                    "w 3 77",
                    "r 3",
                    "f 2 3",
                    "r 2",
                    "r 3",
                    "r 5",
                    "f 100 20",
                    "r 110",
                    "r 120",
                )
            ]
        assert answers == [1000, 5007, 1255, 77, 77, 1000, 0, 0, 1005, 1000, 0, 1120]
        assert not (yard.run_dir / "lost").exists()
    finally:
        toucher.close()
        await server.close()
        path.unlink()
