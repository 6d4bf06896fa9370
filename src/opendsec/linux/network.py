"""The network of sandboxes that may have one: a veth pair each, IPv4 through the host's address translation.

    sandbox eth0 10.209.x.y/31 ── ods-<slot> 10.209.x.(y-1)/31 host ── masquerade ── outside

One pair of addresses per slot from `prefix`, one nftables table for all. Allowed is what a sandbox opens to the
outside, and the answers. Dropped are: sandbox to any address of the host (its services, its link-local addresses),
sandbox to sandbox, everything link-local beyond (169.254.0.0/16: cloud metadata), IPv6, and connections from outside
to a sandbox. The host itself may connect to a sandbox. Sandboxes without a network never come here: they have a
loopback interface and nothing else.

The table and `net.ipv4.ip_forward` are set when the first network is attached, and put back by `close` if no sandbox
uses them any more; the former value lies in `state_file` meanwhile, so that a restarted edge, or another edge of the
machine, knows it too. Other
tables of the host keep their say: where Docker has set iptables' FORWARD policy to DROP, allow the links there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from opendsec.linux import libc
from opendsec.linux.netlink import Netlink, delete_link, new_address, new_default_route, new_veth, set_up
from opendsec.linux.process import run
from opendsec.linux.tap import make_tap

DEFAULT_PREFIX = IPv4Network("10.209.0.0/16")
FAMILY = "ods"
"""How the links of every edge begin."""
TABLES = "opendsec"
"""How their tables begin."""
PEER = "eth0"
LOOPBACK_INDEX = 1
PEER_INDEX = 2
"""In a fresh network namespace only the loopback has an index, 1."""
NFT_TIMEOUT_S = 10.0
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_RULES = """\
add table inet {table}
delete table inet {table}
table inet {table} {{
 chain input {{
  type filter hook input priority filter; policy accept;
  iifname "{links}*" ct state established,related accept
  iifname "{links}*" drop
 }}
 chain forward {{
  type filter hook forward priority filter; policy accept;
  iifname "{links}*" fib saddr . iif oif missing drop
  oifname "{links}*" ct state established,related accept
  oifname "{links}*" drop
  iifname "{links}*" meta nfproto ipv6 drop
  iifname "{links}*" ip daddr 169.254.0.0/16 drop
 }}
 chain postrouting {{
  type nat hook postrouting priority srcnat; policy accept;
  ip saddr {prefix} oifname != "{links}*" masquerade
 }}
}}
"""


class SandboxNetwork:
    """Networks of one edge. Edges in one network namespace need different `links`, `prefix`es and `table`s, and the
    same `state_file`.

    `links` starts the host's interface names (`ods…`, at most 9 characters), `table` is the nftables table's name
    (`opendsec…`).
    """

    def __init__(
        self,
        *,
        state_file: Path,
        prefix: IPv4Network = DEFAULT_PREFIX,
        links: str = "ods-",
        table: str = "opendsec",
    ) -> None:
        if not (links.startswith(FAMILY) and len(links) <= 9 and table.startswith(TABLES)):
            raise ValueError(f"links: is not {FAMILY} and up to 6 characters more, or table not {TABLES} and more")
        self._state_file = state_file
        self._prefix = prefix
        self._links = links
        self._table = table
        self._ready = False
        self._preparing = asyncio.Lock()

    def addresses(self, slot: int) -> tuple[IPv4Address, IPv4Address]:
        """(the host's end, the sandbox's end). Raises ValueError for a slot beyond the prefix."""
        if not 0 <= slot < self._prefix.num_addresses // 2:
            raise ValueError(f"slot {slot} has no addresses in {self._prefix}")
        first = self._prefix.network_address + 2 * slot
        return first, first + 1

    def rules(self) -> str:
        """The nftables table, for `nft -f`."""
        return _RULES.format(table=self._table, links=self._links, prefix=self._prefix)

    async def attach(self, slot: int, pidfd: int) -> IPv4Address:
        """Give the network namespace of that process an interface; its address. Raises OSError, ValueError."""
        await self._prepare()
        host, inner = self.addresses(slot)
        with Netlink() as netlink:
            await asyncio.to_thread(_attach, netlink, f"{self._links}{slot}", host, inner, pidfd)
        return inner

    def tap(self, slot: int | None) -> str:
        """Name of the slot's link when it is a VMM's; of one that is up nowhere and has no address with None."""
        return f"{self._links}{'boot' if slot is None else slot}"

    async def attach_tap(self, slot: int | None) -> IPv4Address | None:
        """Make the slot's link as a tap device, under the same rules as any other; the address of its inside.

        With None: a link that leads nowhere, for a machine that only boots. Raises OSError, ValueError.
        """
        await self._prepare()
        if slot is None:
            await asyncio.to_thread(make_tap, self.tap(None))
            return None
        host, inner = self.addresses(slot)
        await asyncio.to_thread(_attach_tap, self.tap(slot), host)
        return inner

    def may_be_attached(self, slot: int | None) -> bool:
        """Whether the slot's link exists; one cheap look."""
        return os.path.lexists(f"/sys/class/net/{self.tap(slot)}")

    def detach(self, slot: int | None) -> None:
        """Remove the slot's link if it is still there (a pair goes with the namespace by itself)."""
        with Netlink() as netlink:
            try:
                netlink.request(delete_link(self.tap(slot)))
            except OSError as error:
                if error.errno != errno.ENODEV:
                    raise

    async def close(self) -> None:
        """Take back the table, unless a sandbox of this edge still has a network, and the former forwarding, unless
        another edge has a table.
        """
        if self._in_use() or not self._state_file.exists():
            return
        gone = f"add table inet {self._table}\ndelete table inet {self._table}\n"
        await run(["nft", "-f", "-"], timeout_s=NFT_TIMEOUT_S, stdin=gone.encode("ascii"))
        self._ready = False
        left = await run(["nft", "list", "tables", "inet"], timeout_s=NFT_TIMEOUT_S)
        if f"table inet {TABLES}".encode("ascii") not in left.stdout:
            _FORWARD.write_text(self._state_file.read_text(encoding="ascii"), encoding="ascii")
            self._state_file.unlink()

    async def _prepare(self) -> None:
        async with self._preparing:
            if self._ready and self._state_file.exists():  # no other edge has put the forwarding back
                return
            if not self._state_file.exists():
                self._state_file.write_text(_FORWARD.read_text(encoding="ascii"), encoding="ascii")
            await run(["nft", "-f", "-"], timeout_s=NFT_TIMEOUT_S, stdin=self.rules().encode("ascii"))
            _FORWARD.write_text("1\n", encoding="ascii")
            self._ready = True

    def _in_use(self) -> bool:
        return any(name.startswith(self._links) for _, name in socket.if_nameindex())


def raise_loopback(pidfd: int) -> None:
    """Switch on the loopback interface of that process's network namespace. Raises OSError."""
    with _netns_of(pidfd) as (_, inside):
        inside.request(set_up(LOOPBACK_INDEX))


def socket_within(pidfd: int) -> socket.socket:
    """A TCP socket that belongs to the network namespace of that process. Raises OSError."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc.setns(pidfd, libc.CLONE_NEWNET)
        try:
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        finally:
            libc.setns(own, libc.CLONE_NEWNET)
    finally:
        os.close(own)


def _attach(netlink: Netlink, link: str, host: IPv4Address, inner: IPv4Address, pidfd: int) -> None:
    """`netlink` is the host's. In a thread, because the kernel's lock for links may be taken for a while."""
    with _netns_of(pidfd) as (netns, inside):
        netlink.request(new_veth(link, peer=PEER, peer_index=PEER_INDEX, peer_netns=netns))
        netlink.request(new_address(netlink.link_index(link), host, 31))
        inside.request(set_up(PEER_INDEX), new_address(PEER_INDEX, inner, 31), new_default_route(PEER_INDEX, host))


def _attach_tap(link: str, host: IPv4Address) -> None:
    make_tap(link)
    with Netlink() as netlink:
        index = netlink.link_index(link)
        netlink.request(new_address(index, host, 31), set_up(index))


@contextlib.contextmanager
def _netns_of(pidfd: int) -> Iterator[tuple[int, Netlink]]:
    """(the namespace's descriptor, a socket in it) of a process. This thread is in it for microseconds only."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc.setns(pidfd, libc.CLONE_NEWNET)
        try:
            netns = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            netlink = Netlink()
        finally:
            libc.setns(own, libc.CLONE_NEWNET)
    finally:
        os.close(own)
    try:
        with netlink:
            yield netns, netlink
    finally:
        os.close(netns)
