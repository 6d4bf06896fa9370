"""What a real container keeps from its inside: the host, its neighbours, and the agent itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.contract.harness import Place, Sandbox

from opendsec.backends.base import Capability
from opendsec.backends.container_policy import FIRST_HOST_ID
from opendsec.guest.base import GuestError
from opendsec.linux import process
from opendsec.linux.cgroup import find_mounts

pytestmark = pytest.mark.anyio
CONTAINER_ONLY = True


async def refused(box: Sandbox, script: str) -> None:
    """It fails inside."""
    result = await box.run(script)
    assert result.exit.exit_code not in (0, None), result.stdout


def agent_pid(box: Sandbox) -> int:
    return int(box.running.handle.data["pid"])


async def test_root_inside_is_nobody_outside(box: Sandbox) -> None:
    command = await box.start("echo ready; sleep 1000")
    await box.wait_for(command, b"ready")
    outside = Path(f"/proc/{agent_pid(box)}").stat().st_uid
    assert outside >= FIRST_HOST_ID
    pids = [agent_pid(box), *process.children(agent_pid(box))]
    assert len(pids) >= 2
    for pid in pids:
        assert f"Uid:\t{outside}\t{outside}\t{outside}\t{outside}\n" in Path(f"/proc/{pid}/status").read_text()
    await box.guest.kill(command, 0)


async def test_every_namespace_is_its_own(box: Sandbox) -> None:
    for name in ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user"):
        assert os.readlink(f"/proc/{agent_pid(box)}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


async def test_only_its_own_processes_are_seen(box: Sandbox) -> None:
    result = await box.run("ls -d /proc/[0-9]*")
    assert 1 <= len(result.stdout.split()) <= 5


async def test_the_agent_is_out_of_reach(box: Sandbox) -> None:
    await box.run("kill -9 1; kill -STOP 1; kill -TERM -1")
    assert (await box.run("echo alive")).stdout == b"alive\n"
    for path in ("/proc/1/exe", "/proc/1/mem", "/proc/1/environ", "/proc/1/fd/3", "/proc/1/root/etc/passwd"):
        await refused(box, f"head -c 1 {path}")
    await refused(box, "ls /proc/1/fd")


async def test_nothing_of_the_host_is_in_the_file_system(box: Sandbox) -> None:
    await box.run("ln -s /../../../../../etc/passwd /tmp/link; ln -s / /tmp/root; mkdir /tmp/d")
    stat, data = await box.guest.open_read("/tmp/link")
    content = b"".join([chunk async for chunk in data])
    assert b"Agent:/home/agent" in content
    assert stat.size == len(content)
    _, data = await box.guest.open_read("/tmp/root/../../etc/../../../etc/passwd")
    assert b"".join([chunk async for chunk in data]) == content
    with pytest.raises(GuestError):
        await box.guest.stat(f"/tmp/root{box.plan.state_dir}")


@pytest.mark.parametrize(
    "script",
    [
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /sys",
        "umount /proc",
        "hostname other",
        "ip link add x type dummy",
        "unshare -r true",
        "unshare -m true",
        "chroot / mount -t proc proc /proc",
        "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "echo 1 > /sys/kernel/mm/ksm/run",
        "head -c 1 /proc/kcore",
        "head -c 1 /proc/kpagecgroup",
        "head -c 1 /dev/kmsg",
        "dmesg",
        "swapoff -a && false",
        "date -s 2000-01-01; test $(date +%Y) = 2000",
        "touch /dev/new",
        "nice -n -5 true 2>&1 | grep -q . && false",
    ],
)
async def test_what_root_inside_cannot_do(box: Sandbox, script: str) -> None:
    await refused(box, script)


@pytest.mark.parametrize(
    "script",
    [
        "chown agent /tmp; cp /bin/sh /tmp/x; chmod 4755 /tmp/x",
        "chroot /",
        "echo x > /dev/null; head -c 4 /dev/zero; head -c 4 /dev/urandom",
        "echo x > /dev/shm/x",
        "echo '10.0.0.1 other' >> /etc/hosts; grep other /etc/hosts",
        "hostname | grep -x sandbox",
        "nc -l -p 80 -e true & sleep 0.1; nc 127.0.0.1 80 < /dev/null",
        "su agent -c id | grep agent",
        "mkfifo /tmp/fifo",
        "ls /sys/class/net /proc/self/ns",
        "test $(cat /proc/sys/net/ipv4/ip_unprivileged_port_start) = 0",
        "id | grep 'uid=0(root)'",
        'test "$(ulimit -c)" = 0',
    ],
)
async def test_what_works_inside(box: Sandbox, script: str) -> None:
    result = await box.run(script)
    assert result.exit.exit_code == 0, result.stderr


async def test_the_network_is_a_loopback_and_nothing_else(box: Sandbox) -> None:
    result = await box.run("cat /proc/net/dev; cat /proc/net/route")
    interfaces = [line.split(b":")[0].strip() for line in result.stdout.splitlines() if b":" in line]
    assert interfaces == [b"lo"]
    await refused(box, "ping -c 1 -W 1 192.0.2.1")
    for name in ("all", "default"):
        assert (await box.run(f"ls /proc/sys/net/ipv4/conf/{name}")).exit.exit_code == 0


@pytest.mark.nft
async def test_an_open_network_has_an_address_and_a_route(place: Place) -> None:
    if Capability.NETWORK not in place.backend.capabilities:
        pytest.skip(f"capability: network: {place.backend.report().reasons}")
    async with place.sandbox(rules={"*": True}) as box:
        result = await box.run("ip -4 address show eth0; ip route")
        assert b"inet 10.208." in result.stdout
        assert b"default via 10.208." in result.stdout
        assert f"odsc-{box.plan.slot}" in os.listdir("/sys/class/net")
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith("odsc-")]


async def test_dialling_reaches_a_port_inside(box: Sandbox) -> None:
    command = await box.start("echo ready; nc -l -p 8080 -e cat")
    await box.wait_for(command, b"ready")
    stream = None
    for _ in range(200):
        try:
            stream = await box.guest.dial(8080)
            break
        except GuestError:
            await box.run("sleep 0.02")
    assert stream is not None
    await stream.write(b"hello")
    await stream.write_eof()
    received = b""
    while chunk := await stream.read():
        received += chunk
    assert received == b"hello"
    await stream.aclose()
    await box.finish(command, stdout=b"ready\n")
    with pytest.raises(GuestError):
        await box.guest.dial(8081)


async def test_neighbours_have_different_users(place: Place) -> None:
    async with place.sandbox() as first, place.sandbox() as second:
        assert Path(f"/proc/{agent_pid(first)}").stat().st_uid != Path(f"/proc/{agent_pid(second)}").stat().st_uid
        command = await second.start("echo ready; sleep 1000")
        await second.wait_for(command, b"ready")
        await refused(first, f"kill -0 {agent_pid(second)}")


async def test_nothing_stays_after_destroy(place: Place) -> None:
    async with place.sandbox() as box:
        await box.run("mkdir -p /tmp/$(yes d/ | head -200 | tr -d '\\n'); chmod 000 /tmp/d; touch /etc/new; rm /bin/vi")
        name, pid = box.plan.sandbox_id, agent_pid(box)
    assert process.identify(pid) is None
    mounts = find_mounts()
    for mount in (mounts.unified, *mounts.legacy.values()):
        assert mount is not None
        assert not list(mount.glob(f"*/*/{name}"))
