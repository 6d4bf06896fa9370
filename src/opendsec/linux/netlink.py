"""The few rtnetlink messages sandboxes need: a veth pair, an address, a route, removal. See rtnetlink(7), netlink(7).

A message is bytes made by a pure function; `Netlink` sends some and waits for the kernel's answers. It knows nothing
of sandboxes and opens no namespace: a socket belongs to the network namespace it was opened in, for good.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import IPv4Address
from typing import Self

NETLINK_ROUTE = 0
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_NEWADDR, RTM_NEWROUTE = 16, 17, 18, 20, 24
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
NLMSG_ERROR = 2
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_FD = 3, 18, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
RTA_OIF, RTA_GATEWAY = 4, 5
RT_TABLE_MAIN, RTPROT_BOOT, RT_SCOPE_UNIVERSE, RTN_UNICAST = 254, 3, 0, 1
IFF_UP = 1
"""linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/veth.h"""

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED = 0x8000


def _attribute(kind: int, data: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(length, kind) + data + bytes(-length % 4)


def _name(name: str) -> bytes:
    return _attribute(IFLA_IFNAME, name.encode("ascii") + b"\0")


def _link(index: int, *, up: bool) -> bytes:
    return _LINK.pack(socket.AF_UNSPEC, 0, index, IFF_UP * up, IFF_UP * up)


def new_veth(name: str, *, peer: str, peer_index: int, peer_netns: int) -> tuple[int, int, bytes]:
    """A veth pair, this end up, the peer in another network namespace (a descriptor) under an index of its own."""
    inner = _link(peer_index, up=False) + _name(peer) + _attribute(IFLA_NET_NS_FD, struct.pack("=I", peer_netns))
    data = _attribute(IFLA_INFO_DATA | _NESTED, _attribute(VETH_INFO_PEER | _NESTED, inner))
    info = _attribute(IFLA_LINKINFO | _NESTED, _attribute(IFLA_INFO_KIND, b"veth\0") + data)
    return RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, _link(0, up=True) + _name(name) + info


def set_up(index: int) -> tuple[int, int, bytes]:
    """A link by index, switched on. (A veth's peer cannot be made so: it has no other end yet.)"""
    return RTM_NEWLINK, 0, _link(index, up=True)


def delete_link(name: str) -> tuple[int, int, bytes]:
    """A link by name; deleting one end of a veth pair deletes both."""
    return RTM_DELLINK, 0, _link(0, up=False) + _name(name)


def new_address(index: int, address: IPv4Address, prefix_length: int) -> tuple[int, int, bytes]:
    """An IPv4 address of the link with that index."""
    body = _ADDRESS.pack(socket.AF_INET, prefix_length, 0, RT_SCOPE_UNIVERSE, index)
    body += _attribute(IFA_LOCAL, address.packed) + _attribute(IFA_ADDRESS, address.packed)
    return RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body


def new_default_route(index: int, gateway: IPv4Address) -> tuple[int, int, bytes]:
    """0.0.0.0/0 by way of a neighbour on that link."""
    body = _ROUTE.pack(socket.AF_INET, 0, 0, 0, RT_TABLE_MAIN, RTPROT_BOOT, RT_SCOPE_UNIVERSE, RTN_UNICAST, 0)
    body += _attribute(RTA_GATEWAY, gateway.packed) + _attribute(RTA_OIF, struct.pack("=I", index))
    return RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, body


class Netlink:
    """A rtnetlink socket of the network namespace this thread is in when it is made."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_ROUTE)
        self._socket.settimeout(10)
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, *messages: tuple[int, int, bytes]) -> None:
        """Send all in one go; returns when the kernel has done all. Raises OSError for the first it refused."""
        packet = b""
        for kind, flags, body in messages:
            self._sequence += 1
            length = _HEADER.size + len(body)
            packet += _HEADER.pack(length, kind, NLM_F_REQUEST | NLM_F_ACK | flags, self._sequence, 0) + body
            packet += bytes(-length % 4)
        self._socket.send(packet)
        failed = 0
        for _ in messages:
            failed = failed or self._answer()
        if failed:
            raise OSError(failed, os.strerror(failed))

    def link_index(self, name: str) -> int:
        """Index of the link of that name. Raises OSError (ENODEV)."""
        self._sequence += 1
        body = _link(0, up=False) + _name(name)
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), RTM_GETLINK, NLM_F_REQUEST, self._sequence, 0) + body)
        packet = self._socket.recv(16_384)
        if _HEADER.unpack_from(packet)[1] != RTM_NEWLINK:
            number = int(-struct.unpack_from("=i", packet, _HEADER.size)[0])
            raise OSError(number, os.strerror(number), name)
        return int(_LINK.unpack_from(packet, _HEADER.size)[2])

    def _answer(self) -> int:
        """The errno of the next answer, 0 for success."""
        packet = self._socket.recv(8192)
        kind = _HEADER.unpack_from(packet)[1]
        if kind != NLMSG_ERROR:
            return errno.EPROTO
        return int(-struct.unpack_from("=i", packet, _HEADER.size)[0])
