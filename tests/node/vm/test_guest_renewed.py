"""Guests restored from one memory become different ones; what went wrong at a set-up is said."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.guest.agents import ENV, Shell, drain
from tests.node.vm.guests import IDENTITY, SETUP, Machine, copy_disks, new_machine

from opendsec.guest.base import GuestError, StartCommand
from opendsec.guest.channel import Channel
from opendsec.guest.machine import Identity, RootLayer
from opendsec.vm.qmp import monitor

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.qemu,
    pytest.mark.vmkernel,
    pytest.mark.timeout(300),  # emulated, on a machine that does other things too
]

SHOW = "hostname; cat /etc/hostname /etc/machine-id /run/opendsec/generation; ip -4 -o addr show eth0; ip route; cat /f"
RANDOM = "head -c 16 /dev/urandom | xxd -p; head -c 16 /dev/random | xxd -p"


def other(number: int) -> Identity:
    return replace(
        IDENTITY,
        host_name=f"clone-{number}",
        machine_id=f"{number:032x}",
        generation=f"generation-{number}",
        mac=f"52:54:00:00:00:{number:02x}",
        address=f"10.0.2.{100 + number}/24",
        resolvers=("10.0.2.3",),
    )


async def saved(machine: Machine, target: Path) -> None:
    """Everything but the disks, with QEMU's own means."""
    async with monitor(machine.monitor) as qmp:
        await qmp.execute("stop")
        await qmp.execute("migrate", {"uri": f"exec:cat >{target}"})
        while (status := (await qmp.execute("query-migrate"))["status"]) != "completed":
            assert status not in {"failed", "cancelled"}
            await asyncio.sleep(0.05)


async def started_clone(source: Machine, folder: Path, state: Path) -> Machine:
    copy_disks(source, folder)
    clone = Machine(folder, source.images, source.memory_mib, ("-incoming", f"exec:cat {state}"))
    clone.launch()
    while not clone.monitor.exists():
        await asyncio.sleep(0.01)
    async with monitor(clone.monitor) as qmp:
        while (await qmp.execute("query-status"))["status"] == "inmigrate":
            await asyncio.sleep(0.02)
        await qmp.execute("cont")
    return clone


async def test_clones_of_one_memory_are_renewed_and_their_commands_go_on(machine: Machine, channel: Channel) -> None:
    shell = Shell(channel, 1)
    command = StartCommand(script="echo before; sleep 1; echo after; exit 3", env=ENV)
    assert (await shell.run("echo mine >/etc/resolv.conf; echo kept >/f")).exit.exit_code == 0
    await channel.start(50, command)
    state = machine.folder / "state"
    await saved(machine, state)
    machine.close()
    await channel.wait_closed()
    await asyncio.sleep(4)
    seen = []
    for number in (1, 2):
        clone = await started_clone(machine, machine.folder / f"clone{number}", state)
        try:
            seen.append(await looked_into(clone, number))
        finally:
            clone.close()
    assert len({value for one in seen for value in one}) == 4, "random bytes"


async def looked_into(clone: Machine, number: int) -> list[bytes]:
    """Checks one clone; its random bytes."""
    channel = await clone.channel()
    assert "ready" in channel.capabilities
    await channel.renew(other(number))
    shell = Shell(channel, 100)
    said = await shell.run(SHOW)
    name, in_file, machine_id, generation, address, *rest = said.stdout.decode().splitlines()
    assert (name, in_file, machine_id) == (f"clone-{number}", f"clone-{number}", f"{number:032x}")
    assert generation == f"generation-{number}"
    assert f"inet 10.0.2.{100 + number}/24" in address
    assert rest[0].startswith("default via 10.0.2.2")
    assert rest[-1] == "kept"
    assert f"52:54:00:00:00:{number:02x}" in (await shell.run("ip link show eth0")).stdout.decode()
    assert f"localhost clone-{number}\n".encode() in (await shell.run("cat /etc/hosts")).stdout
    assert (await shell.run("cat /etc/resolv.conf")).stdout == b"mine\n", "a file the sandbox has changed is its own"
    before = time.time()
    assert before - 3 <= float((await shell.run("date +%s")).stdout) <= time.time() + 1, (
        "it was later by the state's age"
    )
    await channel.attach(50, 0, 0)
    ended = await drain(channel, 50)
    assert (ended.stdout, ended.exit.exit_code) == (b"before\nafter\n", 3)
    values = (await shell.run(RANDOM)).stdout.split()
    await channel.aclose()
    return values


async def test_what_is_wrong_with_a_setup_is_said_and_the_machine_refused(tmp_path: Path, guest_images: Path) -> None:
    bad = new_machine(tmp_path / "bad", guest_images, memory_mib=128)
    bad.launch()
    try:
        channel = await bad.channel()
        assert "ready" not in channel.capabilities
        for refused in (
            channel.start(1, StartCommand(script="true", env=ENV)),
            channel.stat("/"),
            channel.renew(IDENTITY),
        ):
            with pytest.raises(GuestError) as caught:
                await refused
            assert caught.value.code == "setup"
        with pytest.raises(GuestError, match="no drive missing") as caught:
            await channel.setup(
                replace(SETUP, layers=(RootLayer(meta="base", data="base-data"), RootLayer(meta="missing")))
            )
        with pytest.raises(GuestError, match="cannot be repeated"):
            await channel.setup(SETUP)
        assert channel.usage is None
        await channel.shutdown(100)
        assert bad.wait() == 0
    finally:
        bad.close()
