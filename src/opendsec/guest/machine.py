"""What an agent that is init of a virtual machine is told: of what to make the sandbox's root, and who it is.

Drives are named as `Drive.name` of the VM (its serial number, /sys/block/*/serial),
`part@NAME` for a partition of a read-only disk,
`@N` for the N-th disk in the guest's own order (from 0), or `pmem@N` for the N-th persistent memory device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RootLayer:
    """One EROFS image of the root."""

    meta: str
    """Drive with the file system; of an image in one file, all of it."""
    data: str = ""
    """Drive with the contents, of an image in two files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraDisk:
    """An ext4 file system of its own below the root, for what an overlay cannot hold: Docker's data root."""

    drive: str
    mount_point: str
    """Absolute; made when it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What no two machines may share; told at SETUP, and again by RENEW after every restore."""

    host_name: str = "sandbox"
    machine_id: str = ""
    """32 hexadecimal digits, what /etc/machine-id says; empty: the image's own stays, and so does the last one told."""
    generation: str = ""
    """What /run/opendsec/generation says: another one for every restore; empty: no such line."""
    mac: str = ""
    """Of eth0; empty: as the VMM made it."""
    address: str = ""
    """IPv4 address of eth0 with its prefix, `10.0.0.2/30`; empty: eth0 is down."""
    gateway: str = ""
    is_new: bool = False
    """Another sandbox had this memory before, and what is counted of it (USAGE) begins at 0; RENEW only."""
    resolvers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSetup:
    """SETUP. The file systems are made by the host; the guest mounts them and makes none."""

    layers: tuple[RootLayer, ...]
    """Lowest first, at least one, at most 200."""
    writable: str
    """Drive with an ext4 file system for all that is written; `upper` and `work` are made on it."""
    disks: tuple[ExtraDisk, ...] = ()
    identity: Identity = Identity()
    pids_limit: int = 0
    """Processes and threads of all commands together; 0: as many as the kernel allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestUsage:
    """USAGE: counters of the machine, as of before the last EXIT on this connection (or its HELLO)."""

    oom_kills: int
    pids_denied: int
    disk_full: bool
    """The writable drive has no room (below 64 KiB or without inodes)."""
    memory_bytes: int
    """Used by programs: all memory but what is free or can be had at once."""
    cpu_us: int
