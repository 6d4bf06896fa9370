"""Tap devices: network links whose other end is a program, here a VMM. See Documentation/networking/tuntap.

A persistent one outlives whoever made it, so a VMM opens it by name and a crash leaves nothing that `ip link del` (or
`netlink.delete_link`) does not remove. Kernel failures are OSError.
"""

from __future__ import annotations

import fcntl
import os
import struct

DEVICE = "/dev/net/tun"
MAX_NAME = 15
_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
"""linux/if_tun.h"""
_REQUEST = struct.Struct("16sH22x")


def make_tap(name: str) -> None:
    """A persistent tap device of this name, down. EBUSY while a program has it open. Idempotent otherwise."""
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"{name!r} is no name of a link")
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, _REQUEST.pack(name.encode("ascii"), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)
