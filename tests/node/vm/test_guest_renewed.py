"""Guests restored from one memory become different ones, whatever was done to their card; what went wrong is said."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.guest.agents import ENV, Shell, drain
from tests.node.vm.guests import IDENTITY, SETUP, Machine, copy_disks, new_machine

from opendsec.guest.base import GuestError, Output, StartCommand
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
BOOT_ID = "/proc/sys/kernel/random/boot_id"
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


async def boot_id_of(shell: Shell) -> uuid.UUID:
    text = (await shell.run(f"cat {BOOT_ID}")).stdout.decode()
    found = uuid.UUID(text.strip())
    assert (text, found.version) == (f"{found}\n", 4)
    return found


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


async def said(channel: Channel, command_id: int, word: bytes) -> None:
    """Wait until a command has said this."""
    heard = b""
    async for event in channel.events(command_id):
        heard += event.data if isinstance(event, Output) else b""
        if word in heard:
            return
    raise AssertionError(heard)


async def test_nobody_waits_for_a_renewal_that_hangs_and_the_next_one_takes_its_place(channel: Channel) -> None:
    shell = Shell(channel, 500)
    for attempt in range(5):  # the agent gives it up after 10 s, which a busy host may need for a command
        number = 600 + attempt
        await channel.start(number, StartCommand(argv=("hold",), env=ENV))
        await said(channel, number, b"traced")
        hanging = asyncio.create_task(channel.renew(IDENTITY))
        await said(channel, number, b"held")
        await channel.ping()
        assert (await shell.run("echo here")).stdout == b"here\n"
        was_hanging = not hanging.done()
        await channel.renew(other(9))
        with pytest.raises(GuestError) as caught:
            await hanging
        await channel.kill(number, 0)
        if was_hanging and caught.value.code == "cancelled":
            break
    else:
        raise AssertionError("commands waited for the network")
    assert b"10.0.2.109/24" in (await shell.run("ip -4 -o addr show eth0")).stdout
    assert (await shell.run("cat /run/opendsec/generation")).stdout == b"generation-9\n"


async def test_a_card_is_renewed_under_any_name_and_left_alone_in_a_namespace_of_its_own(channel: Channel) -> None:
    shell = Shell(channel, 700)
    assert (await shell.run("ip link set eth0 down && ip link set eth0 name lan0")).exit.exit_code == 0
    await channel.renew(other(5))
    shown = (await shell.run("ip addr show lan0; ip route")).stdout.decode()
    for part in ("52:54:00:00:00:05", "inet 10.0.2.105/24", ",UP", "default via 10.0.2.2 dev lan0"):
        assert part in shown
    away = "unshare -n sleep 1000 & sleep 1; ip link set lan0 netns $! && ! ip link show lan0"
    assert (await shell.run(away)).exit.exit_code == 0
    await channel.renew(other(6))
    assert (await shell.run("cat /run/opendsec/generation")).stdout == b"generation-6\n"
    assert (await shell.run("kill $(pidof sleep); until ip link show lan0; do sleep 0.1; done")).exit.exit_code == 0
    assert (await shell.run("ip link set lan0 down && ip link set lan0 name eth0")).exit.exit_code == 0
    await channel.renew(IDENTITY)
    assert b"10.0.2.15/24" in (await shell.run("ip -4 -o addr show eth0")).stdout


async def test_the_boot_id_cannot_be_written_and_is_in_nobodys_way(channel: Channel) -> None:
    shell = Shell(channel, 800)
    assert (await shell.run(f"echo x >{BOOT_ID}")).exit.exit_code != 0
    assert (await shell.run(f"chmod 600 {BOOT_ID}")).exit.exit_code != 0
    here, elsewhere = await boot_id_of(shell), (await shell.run(f"unshare -m cat {BOOT_ID}")).stdout.decode()
    assert str(here) in elsewhere
    inside = "unshare -U -r -m -p -f --mount-proc sh -c 'echo $$; ls /proc/1/exe'"
    assert (await shell.run(inside, user="ann")).exit.exit_code == 0, "user namespaces have a /proc of their own"


async def test_clones_of_one_memory_are_renewed_and_their_commands_go_on(machine: Machine, channel: Channel) -> None:
    shell = Shell(channel, 1)
    command = StartCommand(script="echo before; sleep 1; echo after; exit 3", env=ENV)
    before = await boot_id_of(shell)
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
    assert len({value for one in seen for value in one}) == 6, "random bytes, and boot ids"
    assert before.bytes not in [value for one in seen for value in one]


async def looked_into(clone: Machine, number: int) -> list[bytes]:
    """Checks one clone; its random bytes, and its boot id."""
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
    values = [*(await shell.run(RANDOM)).stdout.split(), (await boot_id_of(shell)).bytes]
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
