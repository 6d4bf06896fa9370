"""A real PC of QEMU's without a guest: input, and what a dead edge has left."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.backends.fullvm_meeting import meet
from opendsec.errors import NodeError
from opendsec.guest.base import GuestGoneError
from opendsec.linux import process
from opendsec.model.screen import Action, ActionKind
from opendsec.vm.display import act, take_picture
from opendsec.vm.q35 import AGENT_SOCKET, OVERLAY, QMP_SOCKET, STATE, Q35Machine
from opendsec.vm.qmp import Monitor

pytestmark = [pytest.mark.anyio, pytest.mark.qemu]
PROGRAM = Path("/usr/bin/qemu-system-x86_64")


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Q35Machine]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / QMP_SOCKET))
        listener.listen(16)
        argv = ["-M", "q35", "-accel", "tcg", "-m", "64M", "-nodefaults", "-no-user-config", "-display", "none", "-S"]
        argv += ["-device", "VGA", "-chardev", "socket,id=q,fd=9,server=on,wait=off", "-mon", "chardev=q,mode=control"]
        pid, pidfd = process.spawn(PROGRAM, argv=argv, fds={9: listener.fileno()})
    found = Q35Machine(pid, pidfd, tmp_path)
    try:
        yield found
    finally:
        await found.kill()


async def test_a_long_text_keeps_nobody_from_the_machine(machine: Q35Machine) -> None:
    await machine.resume()
    typing = asyncio.ensure_future(act(machine, [Action(kind=ActionKind.TYPE, text="x" * 2000)]))
    try:
        await asyncio.sleep(0.1)
        png, _ = await take_picture(machine)
        assert png
        assert not typing.done()  # it takes 80 s
        await machine.pause()
        assert await machine.is_paused()
        with pytest.raises(NodeError, match="not running"):
            await typing
    finally:
        typing.cancel()
        await asyncio.wait((typing,))


async def test_what_qemu_refuses_is_an_error_of_the_node(machine: Q35Machine) -> None:
    with pytest.raises(NodeError, match="QEMU does not do what it is asked: nothing-like-it"):
        await machine._execute("nothing-like-it")


async def test_a_save_whose_edge_has_died_stops_the_machine_no_more(machine: Q35Machine) -> None:
    await machine.resume()
    reader, writer = socket.socketpair()  # nobody reads: the save does not end by itself
    with reader, writer:
        async with machine.monitor() as qmp:
            await qmp.execute("stop")
            await qmp.give("state", writer.fileno())
            await qmp.execute("migrate", {"uri": "fd:state"})
        writer.close()
        assert await machine.is_paused()
        await machine.resume()
        async with machine.monitor() as qmp:
            async with asyncio.timeout(20):
                while (await qmp.execute("query-migrate"))["status"] not in ("cancelled", "failed"):
                    await asyncio.sleep(0.05)
        assert not await machine.is_paused()


async def test_a_save_leaves_the_monitor_free_and_what_needs_a_turn_waits_for_it(
    machine: Q35Machine, tmp_path: Path
) -> None:
    await machine.resume()
    await _set(machine, **{"max-bandwidth": 1024})  # it would take minutes
    state, target = tmp_path / "state", tmp_path / "target"
    state.mkdir()
    target.mkdir()
    (state / OVERLAY).write_bytes(b"disk")

    async def save() -> None:
        async with machine.turn():
            await machine.save(target, state)

    saving = asyncio.ensure_future(save())
    typing = asyncio.ensure_future(asyncio.sleep(0))
    try:
        async with asyncio.timeout(60):
            while not await machine.is_paused():
                assert not saving.done()
                await asyncio.sleep(0.01)
        png, _ = await take_picture(machine)
        assert png
        with pytest.raises(NodeError, match="it is being saved or packed") as raised:
            async with machine.turn(timeout_s=0.05):
                pass
        assert raised.value.retryable
        typing = asyncio.ensure_future(act(machine, [Action(kind=ActionKind.TYPE, text="x")]))
        await asyncio.sleep(0)
        assert not saving.done()
        await _set(machine, **{"max-bandwidth": 0})
        async with asyncio.timeout(60):
            await saving
            await typing  # and was not refused: the machine runs again
    finally:
        for task in (saving, typing):
            task.cancel()
        await asyncio.wait((saving, typing))
    assert not await machine.is_paused()
    assert (target / OVERLAY).read_bytes() == b"disk"
    assert (target / STATE).stat().st_size > 0


async def test_nothing_saved_is_a_file_the_machine_could_still_write(
    machine: Q35Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    give = Monitor.give

    async def keeping(self: Monitor, name: str, fd: int) -> None:
        kept.append(os.dup(fd))
        await give(self, name, fd)

    monkeypatch.setattr(Monitor, "give", keeping)
    (tmp_path / OVERLAY).write_bytes(b"disk")
    target = tmp_path / "target"
    target.mkdir()
    try:
        await machine.save(target, tmp_path)
        (fd,) = kept
        saved = (target / STATE).read_bytes()
        assert len(saved) == os.fstat(fd).st_size > 0
        os.pwrite(fd, b"something else", 0)
        assert (target / STATE).read_bytes() == saved
        assert sorted(path.name for path in target.iterdir()) == sorted((OVERLAY, STATE))
    finally:
        for fd in kept:
            os.close(fd)


async def test_a_save_that_is_given_up_lets_the_machine_go_on(machine: Q35Machine, tmp_path: Path) -> None:
    await machine.resume()
    await _set(machine, **{"max-bandwidth": 1024})
    (tmp_path / OVERLAY).write_bytes(b"disk")
    target = tmp_path / "target"
    target.mkdir()
    saving = asyncio.ensure_future(machine.save(target, tmp_path))
    async with asyncio.timeout(60):
        while (await machine._query("query-migrate")).get("status") != "active":
            await asyncio.sleep(0.01)
    saving.cancel()
    await asyncio.wait((saving,))
    async with asyncio.timeout(60):
        while (await machine._query("query-migrate"))["status"] != "cancelled":
            await asyncio.sleep(0.01)
    assert not await machine.is_paused()


async def test_an_agent_nobody_sees_is_waited_for_and_then_it_is_said_why(machine: Q35Machine, tmp_path: Path) -> None:
    await machine.resume()
    assert not await machine.agent_is_there()  # this one has no port at all
    with pytest.raises(GuestGoneError, match="its operating system runs none"):
        await meet(machine, tmp_path / AGENT_SOCKET, boot_s=0.1)
    waiting = asyncio.ensure_future(meet(machine, tmp_path / AGENT_SOCKET))
    process.send_signal(machine.pidfd)
    with pytest.raises(GuestGoneError, match="its machine has ended"):
        await waiting


async def _set(machine: Q35Machine, **parameters: int) -> None:
    async with machine.monitor() as qmp:
        await qmp.execute("migrate-set-parameters", parameters)
