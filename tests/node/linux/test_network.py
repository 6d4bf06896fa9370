"""Packets decide: what a sandbox's network lets through and what not, in namespaces of the test's own.

sandbox ── "host" (this test's namespace for the time being) ── "outside", with a server
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from opendsec.linux import libc
from opendsec.linux.netlink import Netlink, new_address, new_veth, set_up
from opendsec.linux.network import SandboxNetwork

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.netns, pytest.mark.nft]

OUTSIDE, HOST_OUTER = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@contextlib.contextmanager
def namespace(*, lives_s: int = 60) -> Iterator[int]:
    """A process in a network namespace of its own; its pidfd."""
    script = f"echo; exec sleep {lives_s}"
    with subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        pidfd = os.pidfd_open(holder.pid)
        try:
            yield pidfd
        finally:
            os.close(pidfd)
            holder.kill()


@contextlib.contextmanager
def inside(pidfd: int) -> Iterator[None]:
    """This thread is in that namespace."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    libc.setns(pidfd, libc.CLONE_NEWNET)
    try:
        yield
    finally:
        libc.setns(own, libc.CLONE_NEWNET)
        os.close(own)


def lo_up() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=120)


@contextlib.contextmanager
def server(address: str, port: int = 80) -> Iterator[list[str]]:
    """Answers each connection with the peer's address; the addresses seen."""
    seen: list[str] = []
    listener = socket.create_server((address, port))
    listener.settimeout(0.1)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                connection, peer = listener.accept()
                seen.append(peer[0])
                connection.sendall(peer[0].encode())
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        listener.close()


def ask(address: str, port: int = 80) -> str | None:
    """What the server there says; None: no way."""
    try:
        with socket.create_connection((address, port), timeout=0.4) as connection:  # the kernel answers, at once
            connection.settimeout(30)
            return connection.recv(100).decode()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Host:
    """Namespaces by pidfd; the test itself is in `host`."""

    host: int
    outside: int


@pytest.fixture
def world() -> Iterator[Host]:
    """The test runs in a namespace of its own with a way to the outside."""
    with namespace() as host_ns, namespace() as outside_ns, inside(host_ns):
        lo_up()
        with inside(outside_ns):
            lo_up()
            outside_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            outside = Netlink()
        with Netlink() as own, outside, contextlib.ExitStack() as stack:
            stack.callback(os.close, outside_fd)
            own.request(new_veth("outer", peer="eth0", peer_index=2, peer_netns=outside_fd))
            own.request(new_address(own.link_index("outer"), HOST_OUTER, 24))
            outside.request(set_up(2), new_address(2, OUTSIDE, 24))
        yield Host(host_ns, outside_ns)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=120)


def network(tmp_path: Path) -> SandboxNetwork:
    return SandboxNetwork(
        state_file=tmp_path / "ip_forward", prefix=IPv4Network("10.210.0.0/16"), links="ods-n", table="opendsec_test"
    )


async def test_the_outside_answers_and_sees_the_host(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    with namespace() as sandbox:
        await net.attach(0, sandbox)
        with inside(world.outside), server(str(OUTSIDE)) as seen, inside(sandbox):
            assert ask(str(OUTSIDE)) == str(HOST_OUTER)
            assert seen == [str(HOST_OUTER)]
        net.detach(0)
    await net.close()


async def test_no_service_of_the_host_is_in_reach(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    with namespace() as sandbox:
        await net.attach(0, sandbox)
        with server("0.0.0.0"):
            assert ask(str(HOST_OUTER)) == str(HOST_OUTER)  # the server is there
            with inside(sandbox):
                assert ask(str(HOST_OUTER)) is None
                assert ask(str(net.addresses(0)[0])) is None
        net.detach(0)
    await net.close()


async def test_sandboxes_do_not_reach_each_other_but_the_host_does(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    with namespace() as first, namespace() as second:
        await net.attach(0, first)
        address = str(await net.attach(1, second))
        with inside(second), server(address) as seen:
            with inside(world.host):
                assert ask(address) == str(net.addresses(1)[0])
            with inside(first):
                assert ask(address) is None
            assert len(seen) == 1
        net.detach(0)
        net.detach(1)
        net.detach(1)  # gone already: no error
    await net.close()


async def test_the_outside_does_not_reach_a_sandbox(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    with namespace() as sandbox:
        address = str(await net.attach(0, sandbox))
        with inside(world.outside):
            ip("route", "add", "10.210.0.0/16", "via", str(HOST_OUTER))
        with inside(sandbox), server(address) as seen, inside(world.outside):
            assert ask(address) is None
            assert seen == []
        net.detach(0)
    await net.close()


async def test_link_local_addresses_are_out_of_reach(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    with inside(world.outside):
        ip("address", "add", "169.254.169.254/32", "dev", "lo")
    ip("route", "add", "169.254.169.254", "via", str(OUTSIDE))
    with namespace() as sandbox:
        await net.attach(0, sandbox)
        with inside(world.outside), server("169.254.169.254"):
            with inside(world.host):
                assert ask("169.254.169.254") is not None
            with inside(sandbox):
                assert ask("169.254.169.254") is None
        net.detach(0)
    await net.close()


async def test_nobody_sends_under_another_address(world: Host, tmp_path: Path) -> None:
    """Inside of a machine a sandbox gives itself whatever address it likes."""
    net = network(tmp_path)
    with namespace() as sandbox:
        own = str(await net.attach(0, sandbox))
        others = str(net.addresses(1)[1])
        with inside(sandbox):
            ip("address", "add", "198.51.100.9/32", "dev", "eth0")
            ip("address", "add", f"{others}/32", "dev", "eth0")
        with inside(world.outside):
            listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with listener:
            listener.bind((str(OUTSIDE), 9))
            listener.settimeout(30)
            with inside(sandbox):
                for address in ("198.51.100.9", others, own):
                    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                        sender.bind((address, 0))
                        sender.sendto(address.encode(), (str(OUTSIDE), 9))
            assert listener.recv(100) == own.encode()  # the last one sent is the first to come
        net.detach(0)
    await net.close()


async def test_forwarding_is_put_back(world: Host, tmp_path: Path) -> None:
    net = network(tmp_path)
    FORWARD.write_text("0\n")
    with namespace() as sandbox:
        await net.attach(0, sandbox)
        assert FORWARD.read_text() == "1\n"
        await net.close()  # in use: nothing happens
        assert FORWARD.read_text() == "1\n"
        again = network(tmp_path)  # another edge process
        net.detach(0)
        await again.close()
    assert FORWARD.read_text() == "0\n"
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert "opendsec_test" not in tables


async def test_forwarding_is_put_back_by_the_last_of_several_edges(world: Host, tmp_path: Path) -> None:
    first = network(tmp_path)
    second = SandboxNetwork(
        state_file=tmp_path / "ip_forward", prefix=IPv4Network("10.222.0.0/16"), links="ods9-", table="opendsec_test9"
    )
    FORWARD.write_text("0\n")
    with namespace() as one, namespace() as two:
        await first.attach(0, one)
        await second.attach(0, two)
        first.detach(0)
        await first.close()
        assert FORWARD.read_text() == "1\n"
        with inside(world.outside), server(str(OUTSIDE)), inside(two):
            assert ask(str(OUTSIDE)) == str(HOST_OUTER)
        second.detach(0)
        await second.close()
    assert FORWARD.read_text() == "0\n"
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert "opendsec_test" not in tables


async def test_a_slot_without_addresses_is_refused(tmp_path: Path) -> None:
    net = network(tmp_path)
    with pytest.raises(ValueError, match="no addresses"):
        net.addresses(32_768)
