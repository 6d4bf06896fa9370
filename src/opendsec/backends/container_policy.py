"""What a container sandbox may do and sees: the constants, and the launch plan made from them. Pure.

Capabilities are Docker's default set without those that a namespace owned by the host makes pointless: NET_RAW and
NET_BIND_SERVICE (the network namespace is the host's; low ports and ping are open to everyone by sysctl), MKNOD
(device nodes cannot be opened), AUDIT_WRITE (the audit socket belongs to the host). What is left lets `apt-get
install`, `sudo`, `su`, set-id programs, chroot and a debugger on one's own processes work.

Masks hide what /proc shows to everyone about the host; what only host root may read there is closed already, because
root inside is another user.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.backends.base import StartPlan
from opendsec.linux.launch import Bind, IdMap, LaunchPlan, Tmpfs

FIRST_HOST_ID = 268_435_456
IDS_PER_SANDBOX = 65_536
MAX_SLOT = (2**32 - FIRST_HOST_ID) // IDS_PER_SANDBOX - 2
HOSTNAME = "sandbox"

_CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "SYS_CHROOT": 18,
    "SETFCAP": 31,
}
"""linux/capability.h"""
CAPS = sum(1 << number for number in _CAPABILITIES.values())

MASKS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
)

RLIMITS: Mapping[int, tuple[int, int]] = {
    # A limit of exactly 1 is the only one that also stops a core dump from being piped to a program of the host's.
    resource.RLIMIT_CORE: (1, 1),
    resource.RLIMIT_NOFILE: (65_536, 1_048_576),
}
SHARED_MEMORY = Tmpfs(target="/dev/shm", options="size=64m,mode=1777")  # noqa: S108 a path inside


def host_root(slot: int) -> int:
    """The host's user id of root inside. Raises ValueError for a slot that has no range."""
    if not 0 <= slot <= MAX_SLOT:
        raise ValueError(f"slot {slot} is not between 0 and {MAX_SLOT}")
    return FIRST_HOST_ID + slot * IDS_PER_SANDBOX


def host_range(slot: int) -> range:
    """All the host's user ids of that slot. Raises ValueError for a slot that has no range."""
    return range(host_root(slot), host_root(slot) + IDS_PER_SANDBOX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What a container has that keeps nothing between its uses: a root nobody writes to or rises from, and these."""

    tmpfs: tuple[Tmpfs, ...]
    """The only places where anything can be written."""
    caps: int
    """Of root inside; nobody else has any."""
    sysctls: Mapping[str, str]
    rlimits: Mapping[int, tuple[int, int]]
    binds: tuple[Bind, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPlan(StartPlan):
    """A start that is locked down further than a sandbox is."""

    lock: Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Descriptors every sandbox of this node is started with."""

    dev: int
    sys: int
    guest: int


def launch_plan(
    *,
    slot: int,
    lower: tuple[int, ...],
    upper: Path,
    work: Path,
    cgroup2: int,
    cgroup1: tuple[int, ...],
    listen: int,
    shared: Shared,
    lock: Lock | None = None,
) -> LaunchPlan:
    """Everything the launcher needs for one sandbox. `lower` is topmost first."""
    return LaunchPlan(
        lower=lower,
        upper=upper,
        work=work,
        idmap=IdMap(0, host_root(slot), IDS_PER_SANDBOX),
        cgroup2=cgroup2,
        cgroup1=cgroup1,
        listen=listen,
        guest=shared.guest,
        hostname=HOSTNAME,
        binds=(
            Bind(fd=shared.dev, target="/dev", read_only=True, devices=True),
            Bind(fd=shared.sys, target="/sys", read_only=True),
            *(lock.binds if lock else ()),
        ),
        tmpfs=lock.tmpfs if lock else (SHARED_MEMORY,),
        masks=MASKS,
        caps=lock.caps if lock else CAPS,
        rlimits={**RLIMITS, **lock.rlimits} if lock else RLIMITS,
        root="ro,nosuid" if lock else "",
        sysctls=lock.sysctls if lock else {},
    )
