"""A real PC of QEMU's without a guest: input, and what a dead edge has left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.errors import NodeError
from opendsec.linux import process
from opendsec.model.screen import Action, ActionKind
from opendsec.vm.display import act, take_picture
from opendsec.vm.q35 import QMP_SOCKET, Q35Machine

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
