"""A guest is like any other sandbox: the root it was told to make, commands, sessions, terminals, files, limits."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.node.guest.agents import ENV, ROOT, Shell, drain
from tests.node.vm.guests import IDENTITY, SETUP, Machine

from opendsec.guest import protocol
from opendsec.guest.base import GuestError, StartCommand
from opendsec.guest.channel import Channel
from opendsec.guest.machine_fields import encode_identity

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.qemu,
    pytest.mark.vmkernel,
    pytest.mark.timeout(300),  # emulated, on a machine that does other things too
]


async def test_the_root_is_made_of_its_layers_and_its_own_files(shell: Shell) -> None:
    said = await shell.run("cat /opt/both; wc -l </opt/second; cd /etc; cat hosts hostname machine-id; touch /new")
    assert said.stdout.decode() == (
        "work\n1000\n127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        f"sandbox\n{SETUP.identity.machine_id}\n"
    )
    assert said.exit.exit_code == 0


async def test_nothing_of_the_boot_is_in_sight(shell: Shell) -> None:
    said = await shell.run("ls -d /l /w /f /g /c /n /init; cut -d' ' -f2 /proc/mounts; cat /proc/cmdline")
    words = said.stdout.decode().split()
    assert "/w" not in words
    assert {"/", "/proc", "/sys", "/sys/fs/cgroup", "/dev", "/dev/pts", "/dev/shm"} <= set(words)
    assert said.stderr.count(b"No such file") == 7


async def test_user_namespaces_can_be_made_and_nested_overlays_mounted(shell: Shell) -> None:
    said = await shell.run("unshare -U -r id -u")
    assert (said.stdout, said.stderr) == (b"0\n", b"")
    options = "lowerdir=/opt,upperdir=u,workdir=w"
    said = await shell.run(
        f"cd /var/lib/docker && mkdir u w m && mount -t overlay -o {options} none m && cat m/both && umount m"
    )
    assert (said.stdout, said.stderr) == (b"work\n", b"")


async def test_users_signals_exit_codes_sessions_and_terminals(shell: Shell) -> None:
    assert (await shell.run("id -un; exit 7", user="ann")).stdout == b"ann\n"
    assert (await shell.run("exit 7")).exit.exit_code == 7
    assert (await shell.run("kill -11 $$")).exit.signal == signal.SIGSEGV
    await shell.run("cd /opt; x=5", session="one")
    assert (await shell.run("pwd; echo $x", session="one")).stdout == b"/opt\n5\n"
    said = await shell.run("tty; stty size", pty=(33, 77))
    assert said.stdout.split() == [b"/dev/pts/0", b"33", b"77"]


async def test_a_whole_tree_is_ended_at_its_timeout(shell: Shell) -> None:
    said = await shell.run("setsid sh -c 'sleep 1000 & sleep 1000' & sleep 1000", timeout_ms=300, grace_ms=100)
    assert said.exit.reason == 1
    assert b"sleep" not in (await shell.run("ps")).stdout


async def test_programs_cannot_halt_the_machine(shell: Shell) -> None:
    said = await shell.run("poweroff -f; reboot -f; echo on")
    assert said.stdout == b"on\n"
    assert said.stderr.count(b"not permitted") == 2


async def test_files_go_in_and_out_and_ports_are_reached(channel: Channel, shell: Shell) -> None:
    content = os.urandom(3_000_000)

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    await channel.write_file("/tmp/big", pieces(), user="ann")
    stat, chunks = await channel.open_read("/tmp/big")
    assert (stat.uid, b"".join([chunk async for chunk in chunks])) == (1000, content)
    await channel.start(shell.new_id(), StartCommand(script="nc -l -p 99 -e cat", env=ENV))
    async with asyncio.timeout(60):
        stream = await _dialled(channel)
        await stream.write(b"there and back")
        assert await stream.read() == b"there and back"
        await stream.aclose()


async def _dialled(channel: Channel):  # type: ignore[no-untyped-def]
    while True:
        try:
            return await channel.dial(99)
        except GuestError:
            await asyncio.sleep(0.05)


async def test_running_out_of_memory_is_told_as_such(channel: Channel, shell: Shell) -> None:
    await shell.run("true")
    before = channel.usage
    assert before is not None  # told before that command's end
    said = await shell.run("exec hog")
    assert said.exit.signal == signal.SIGKILL
    assert channel.usage is not None
    assert channel.usage.oom_kills == before.oom_kills + 1
    assert (await shell.run("echo on")).stdout == b"on\n"


async def test_a_limit_of_processes_is_told_as_such(channel: Channel, shell: Shell) -> None:
    # The outer shell stays, so that its timeout ends the tree: what an ended command leaves behind goes on.
    script = "(for i in $(seq 100); do sleep 100 & done); while :; do :; done"
    said = await shell.run(script, timeout_ms=2500, grace_ms=0)
    assert b"fork" in said.stderr
    assert channel.usage is not None
    assert channel.usage.pids_denied > 0


async def test_a_full_disk_is_told_as_such(channel: Channel, shell: Shell) -> None:
    said = await shell.run("dd if=/dev/zero of=/fill bs=1M")
    assert b"No space left" in said.stderr
    assert channel.usage is not None
    assert channel.usage.disk_full
    await shell.run("rm /fill")
    await shell.run("true")
    assert not channel.usage.disk_full


async def test_setup_cannot_be_repeated(channel: Channel, shell: Shell) -> None:
    with pytest.raises(GuestError, match="cannot be repeated") as caught:
        await channel.setup(SETUP)
    assert caught.value.code == "setup"
    assert (await shell.run("echo on")).stdout == b"on\n"


async def test_nothing_is_lost_when_the_host_is_killed(machine: Machine, channel: Channel, shell: Shell) -> None:
    command_id = shell.new_id()
    await channel.aclose()
    script = "for i in $(seq 300); do echo line $i; usleep 5000; done; exit 4"
    host = f"""
import asyncio, sys
from opendsec.guest.base import StartCommand
from opendsec.guest.channel import connect
async def main():
    channel = await connect({str(machine.socket)!r}, 60)
    await channel.start({command_id}, StartCommand(script={script!r}, env={ENV!r}))
    print("started", flush=True)
    async for event in channel.events({command_id}): pass
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", host], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
        process.kill()
    again = await machine.channel()
    try:
        assert command_id in [command.id for command in await again.list_commands()]
        await again.attach(command_id, 0, 0)
        said = await drain(again, command_id)
        assert said.stdout == b"".join(b"line %d\n" % number for number in range(1, 301))
        assert said.exit.exit_code == 4
    finally:
        await again.aclose()


async def test_a_host_that_comes_back_at_once_is_answered(machine: Machine, channel: Channel) -> None:
    await channel.aclose()
    for number in range(60):
        again = await machine.channel()
        assert await again.ping() < 30
        await again.aclose()
        await asyncio.sleep((0, 0, 0.001, 0.05, 0.1)[number % 5])


@pytest.mark.parametrize(
    "garbage", [b"\0" * 5000, b"\xff" * 70_000, os.urandom(100_000)], ids=["zeros", "ones", "noise"]
)
async def test_garbage_on_the_line_is_survived(machine: Machine, channel: Channel, garbage: bytes) -> None:
    await channel.aclose()

    def disturb() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(30)
            line.connect(str(machine.socket))
            line.sendall(garbage)
            time.sleep(0.2)

    await asyncio.to_thread(disturb)
    again = await machine.channel()
    assert "ready" in again.capabilities
    await again.aclose()


async def test_the_clock_is_what_the_host_says_and_nonsense_is_refused(channel: Channel, shell: Shell) -> None:
    at_2040 = 2_208_988_800
    fields = encode_identity(IDENTITY, clock_ns=at_2040 * 10**9, entropy=os.urandom(64))
    await channel._answered_call(protocol.RENEW, fields)
    assert at_2040 <= int((await shell.run("date +%s")).stdout) < at_2040 + 600
    for wrong, words in (
        (replace(IDENTITY, address="10.0.2.999/24"), "eth0"),
        (replace(IDENTITY, host_name="x" * 70), "host name"),
        (replace(IDENTITY, mac="none"), "eth0"),
    ):
        with pytest.raises(GuestError, match=words) as caught:
            await channel.renew(wrong)
        assert caught.value.code == "setup"
    await channel.renew(replace(IDENTITY, address="", gateway=""))
    assert b"inet " not in (await shell.run("ip -4 addr show eth0")).stdout
    assert (await shell.run("ip route")).stdout == b""
    assert abs(float((await shell.run("date +%s")).stdout) - time.time()) < 60
