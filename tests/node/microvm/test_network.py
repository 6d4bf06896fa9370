"""Networks of microVMs, after a start from a snapshot too: an address of its own each, the way out, and nobody else.

sandbox ── the host ── "outside", a namespace of this test's with a server
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from tests.contract.harness import MICROVM_NEEDS, Place, Sandbox
from tests.node.linux.test_network import inside, lo_up, namespace, server

from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_shape import MAC, identity, mac_of
from opendsec.linux import process
from opendsec.linux.netlink import Netlink, delete_link, new_address, new_veth, set_up
from opendsec.model.ids import new_sandbox_id

pytestmark = [pytest.mark.anyio, *(getattr(pytest.mark, name) for name in (*MICROVM_NEEDS, "netns"))]
OUTSIDE, HOST_OUTER = IPv4Address("198.51.100.1"), IPv4Address("198.51.100.2")
PORT = 8080
LINK = "mvm-outer"
ASK = f"nc -w 10 {OUTSIDE} {PORT} </dev/null"
ONLINE = {"*": True}


@pytest.fixture
def outside() -> Iterator[None]:
    """A server beyond the host, which says by which address it is asked."""
    with namespace(lives_s=600) as pidfd, Netlink() as own, contextlib.ExitStack() as stack:
        with inside(pidfd):
            lo_up()
            there = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            stack.callback(os.close, there)
            remote = stack.enter_context(Netlink())
        own.request(new_veth(LINK, peer="eth0", peer_index=2, peer_netns=there))
        stack.callback(own.request, delete_link(LINK))
        own.request(new_address(own.link_index(LINK), HOST_OUTER, 24))
        remote.request(set_up(2), new_address(2, OUTSIDE, 24))
        with inside(pidfd):
            stack.enter_context(server(str(OUTSIDE), PORT))
        yield


@contextlib.asynccontextmanager
async def copy_of(place: Place, snapshot: Path, *, slot: int | None = None) -> AsyncIterator[Sandbox]:
    """A start from it, in that slot or in one that has not been used for longest."""
    if slot is not None:
        place.slots.remove(slot)
        place.slots.insert(0, slot)
    plan = replace(place.plan(rules=ONLINE), snapshot=snapshot)
    try:
        yield Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
    finally:
        await place.destroy(plan)


async def is_itself(box: Sandbox) -> str:
    """It has its own addresses and no others, one way out, and the outside answers, at once; its IPv4 address."""
    backend = box.backend
    assert isinstance(backend, MicroVmBackend)
    assert backend._network is not None
    host, inner = backend._network.addresses(box.plan.slot)
    said = await box.run("ip -4 -o addr show eth0 | awk '{print $4}'; ip route | awk '{print $1, $3}' | sort -r")
    assert said.stdout.decode() == f"{inner}/31\ndefault {host}\n{host}/31 eth0\n", said
    card = (await box.run("cat /sys/class/net/eth0/address")).stdout.decode().strip()
    assert card == mac_of(box.plan.sandbox_id)
    assert card not in {MAC, mac_of(new_sandbox_id("other"))}
    assert (await box.run(ASK)).stdout == str(HOST_OUTER).encode()
    return str(inner)


async def a_new_card_address_is_told(box: Sandbox) -> None:
    """The host has the old one in its table, and has the new one before anything is sent."""
    backend = box.backend
    assert isinstance(backend, MicroVmBackend)
    assert backend._network is not None
    host, inner = backend._network.addresses(box.plan.slot)
    mac = "02:00:00:00:00:09"
    await box.guest.renew(identity(token=bytes(32), inner=inner, host=host, resolvers=(), mac=mac))
    asked = ("ip", "neigh", "show", str(inner), "dev", backend._network.tap(box.plan.slot))
    async with asyncio.timeout(60):
        while mac not in (table := (await process.run(asked, timeout_s=20)).stdout.decode()):
            assert "lladdr 02:" in table, table
            await asyncio.sleep(0.05)
    assert (await box.run(ASK)).stdout == str(HOST_OUTER).encode()


async def test_copies_of_a_snapshot_have_networks_of_their_own(outside: None, place: Place) -> None:
    target = place.state_dir.parent / "online"
    target.mkdir()
    async with place.sandbox(rules=ONLINE) as source:
        slot = source.plan.slot
        await is_itself(source)
        await source.run("ip addr add 203.0.113.7/24 dev eth0 label eth0:more; ip route add 203.0.113.128/25 dev eth0")
        await source.start(f"while :; do {ASK}; done >/dev/null 2>&1")  # frames are in flight when it is saved
        await source.backend.snapshot(source.running.handle, target)
        old = await source.run("ip -4 -o addr show eth0 | wc -l")
        assert old.stdout == b"2\n", "the source keeps what it has made"
    async with copy_of(place, target, slot=slot) as same:  # its neighbour is another link now
        assert (await same.run(ASK)).stdout == str(HOST_OUTER).encode()
        flip = await same.run("ip link set eth0 down && ip link set eth0 up && ip route | wc -l", timeout_ms=60_000)
        assert flip.stdout == b"2\n", flip  # its own two networks: the kernel did not hang, the way out is gone
    async with copy_of(place, target) as one, copy_of(place, target) as two:
        addresses = [await is_itself(one), await is_itself(two)]
        assert len(set(addresses)) == 2
        for box, other in ((one, addresses[1]), (two, addresses[0])):
            assert (await box.run(f"ping -c 1 -W 1 {other}")).exit.exit_code != 0
        await two.backend.pause(two.running.handle)
        await two.backend.resume(two.running.handle)
        guest = await two.backend.reconnect(two.running.handle)
        assert guest is not None
        two.running.guest = guest
        assert await is_itself(two) == addresses[1]
        await a_new_card_address_is_told(two)
    shutil.rmtree(target)
