"""The monitor of a real QEMU: answers, refusals, events, descriptors, and an end in the middle of a call."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from opendsec.linux import process
from opendsec.vm.qmp import Monitor, MonitorError, MonitorLostError, monitor

pytestmark = [pytest.mark.anyio, pytest.mark.qemu]
PROGRAM = Path("/usr/bin/qemu-system-x86_64")
uvloop.run(asyncio.sleep(0))  # its first loop opens a pipe that stays with the process


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[tuple[Path, int]]:
    """The monitor's socket and the pidfd of a QEMU without a machine."""
    path = tmp_path / "qmp.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(4)
        argv = ["-M", "none", "-nodefaults", "-no-user-config", "-display", "none"]
        argv += ["-chardev", "socket,id=q,fd=9,server=on,wait=off", "-mon", "chardev=q,mode=control"]
        pid, pidfd = process.spawn(PROGRAM, argv=argv, fds={9: listener.fileno()})
    try:
        yield path, pidfd
    finally:
        process.send_signal(pidfd)
        await process.wait_ended(pidfd, timeout_s=20)
        process.reap(pid)
        os.close(pidfd)


async def test_answers_refusals_and_events(machine: tuple[Path, int]) -> None:
    for _ in range(2):  # a monitor serves one connection after the other
        async with monitor(machine[0]) as qmp:
            assert "status" in await qmp.execute("query-status")
            with pytest.raises(MonitorError, match="nothing-like-it") as caught:
                await qmp.execute("nothing-like-it")
            assert caught.value.reason == "CommandNotFound"
            with qmp.capture("STOP", "RESUME") as events:
                await qmp.execute("cont")
                await qmp.execute("stop")
                assert (await events.next(accept=lambda event: event["event"] == "STOP"))["event"] == "STOP"
                with pytest.raises(MonitorLostError, match="in time"):
                    await events.next(timeout_s=0.05)


async def test_any_number_ask_at_once(machine: tuple[Path, int]) -> None:
    """QEMU's own queue has room for one or two; whoever is beyond waits, too, and within its time."""

    async def ask() -> str:
        async with monitor(machine[0]) as qmp:
            return str((await qmp.execute("query-status"))["status"])

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask()) for _ in range(24)]
    assert {one.result() for one in asked} == {"running"}
    async with monitor(machine[0]), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(_lost_in_time(machine[0]))


async def _lost_in_time(path: Path) -> None:
    with pytest.raises(MonitorLostError, match="connect"):
        async with monitor(path, timeout_s=0.1):
            pass


async def test_descriptors_are_given(machine: tuple[Path, int]) -> None:
    reader, writer = os.pipe()
    try:
        async with monitor(machine[0]) as qmp:
            await qmp.give("out", writer)
            os.close(writer)
            await qmp.execute("closefd", {"fdname": "out"})
            assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


def test_descriptors_are_given_on_the_loop_servers_run_on(tmp_path: Path) -> None:
    async def give() -> None:
        path = tmp_path / "qmp.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(4)
            argv = ["-M", "none", "-nodefaults", "-no-user-config", "-display", "none"]
            argv += ["-chardev", "socket,id=q,fd=9,server=on,wait=off", "-mon", "chardev=q,mode=control"]
            pid, pidfd = process.spawn(PROGRAM, argv=argv, fds={9: listener.fileno()})
        try:
            async with monitor(path) as qmp:
                number = await qmp.add_fd(pidfd)
                assert [one["fdset-id"] for one in await qmp.execute("query-fdsets")] == [number]
        finally:
            process.send_signal(pidfd)
            await process.wait_ended(pidfd, timeout_s=20)
            process.reap(pid)
            os.close(pidfd)

    uvloop.run(give())


async def test_an_end_in_the_middle_is_a_lost_monitor(machine: tuple[Path, int]) -> None:
    async def wait(qmp: Monitor) -> None:
        with pytest.raises(MonitorLostError):
            await qmp.wait_event("SHUTDOWN")

    async with monitor(machine[0]) as qmp:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait(qmp))
            await asyncio.sleep(0)
            process.send_signal(machine[1])
        with pytest.raises(MonitorLostError):
            await qmp.execute("query-status")
    with pytest.raises(MonitorLostError, match="connect"):
        async with monitor(machine[0]):
            pass
