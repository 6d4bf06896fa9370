"""The one interface behind which VMMs are strangers to each other: Firecracker, QEMU's microvm machine.

A driver boots a machine from a kernel, restores one from saved files, and finds one again that an earlier process
started. Everything of one machine lies in one directory (`Place.directory`: sockets, console, and what `find` needs),
so that a machine needs nothing of the process that started it. Decisions about sandboxes, images and templates are the
backend's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opendsec.guest.base import Guest


class Accelerator(StrEnum):
    """What executes the guest's instructions."""

    KVM = "kvm"
    TCG = "tcg"
    """Emulation: right, and 5 to 30 times slower."""


class WantedVmm(StrEnum):
    """Which VMM runs microVMs, as a node is told (`vm.chosen`)."""

    AUTO = "auto"
    FIRECRACKER = "firecracker"
    QEMU = "qemu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one machine may use of the node at most; None: no limit. Bytes and operations in a second, of each disk and
    of each direction of its network."""

    disk_bytes: int | None = None
    disk_operations: int | None = None
    network_bytes: int | None = None


NO_RATES = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One block device."""

    name: str
    """Up to 20 of a-z, 0-9 and `-`: the guest finds the device by it (/sys/block/*/serial; see `Vmm.serial_of`)."""
    path: Path
    """A raw file."""
    read_only: bool = True
    parted: bool = False
    """A read-only disk of partitions, of which the guest finds each by its own name (`part@NAME`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One network interface; the tap device exists already."""

    tap: str
    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """One machine, whoever runs it. A restored one must name drives and card as the saved one did, with files of its
    own."""

    kernel: Path
    initrd: Path
    """Holds the guest agent as /init."""
    command_line: str
    memory_mib: int
    cpus: int = 1
    drives: tuple[Drive, ...] = ()
    card: Card | None = None
    acpi: bool = False
    """The kernel finds its devices by ACPI tables only."""
    balloon: bool = False
    """Free pages are given back to the host, where the driver can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a VMM lives on this host."""

    directory: Path
    """Exists, on a tmpfs, short enough for sockets; the driver owns its content."""
    cgroup_procs: tuple[int, ...] = ()
    """Descriptors of `cgroup.procs` files the VMM is put into before it executes a guest's instruction."""
    host_id: int = 0
    """User and group the VMM runs as, where the driver can drop root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What saved machines are bound to. Restoring refuses any difference, naming it."""

    vmm: str
    version: str
    accelerator: Accelerator
    cpu_model: str
    """Of the processor as guests see it."""


class Vm(ABC):
    """One running machine. Calls raise SandboxLostError when its VMM is gone, NodeError when it does not answer."""

    pid: int

    @abstractmethod
    async def connect(self, *, timeout_s: float) -> Guest:
        """A new connection to the guest agent; it replaces an earlier one. Raises GuestLostError, and
        SnapshotInvalidError of a machine whose VMM finds only now that it cannot go on from what was saved.
        """

    @abstractmethod
    def console(self) -> str:
        """What its guest has printed while it booted, cut to 64 KiB. Raises SandboxLostError."""

    @abstractmethod
    async def pause(self) -> None:
        """Its processors stand still. Idempotent."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo `pause`. Idempotent."""

    @abstractmethod
    async def save(self, target: Path, *, whole: bool = False) -> None:
        """Memory and devices of a paused machine as files below `target`, an empty directory; not its drives. It stays
        paused. Where the driver can, only what changed since it was restored is written and the file restored from is
        referred to, by its path; with `whole`, nothing outside of `target` is. Raises DiskFullError.
        """

    def keep_base(self, directory: Path) -> None:
        """The files it was saved to last are about to move: keep in `directory` what its next save builds on, in place
        of what was kept there before. Nothing where the driver does not build on them, or the file system has no links;
        then the next save is whole. Blocking. Raises OSError.
        """
        return

    @abstractmethod
    async def kill(self) -> None:
        """End the VMM at once; returns when it is gone. Idempotent."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the VMM is gone, whoever has its pid now."""

    @abstractmethod
    async def wait_ended(self) -> None:
        """Until the VMM is gone, for whatever reason."""

    @abstractmethod
    async def release(self) -> None:
        """This process needs the machine no more, which goes on: give back descriptors and connections."""


class Vmm(ABC):
    """One VMM on this host."""

    degraded: str = ""
    """After `open`: why it is slower than it could be; "": it is not."""
    most_drives: int | None = None
    """After `open`: of one machine, read-only and writable together; None: read-only ones cost nothing."""

    @property
    @abstractmethod
    def binding(self) -> Binding:
        """What machines saved here are bound to; after `open`."""

    def command_line(self) -> str:
        """What the kernel of its guests is told (`guest_setup.command_line`); after `open`."""
        raise NotImplementedError

    @abstractmethod
    async def open(self) -> None:
        """Probe. Raises HostCapabilityError with the remedy: no program, no accelerator that works, ..."""

    async def close(self) -> None:
        """Let go of what `open` made. Machines stay."""
        return

    def serial_of(self, drive: Drive) -> str:
        """What the guest is told to find the drive by: its name, where the driver can give it one."""
        return drive.name

    @abstractmethod
    async def boot(self, spec: MachineSpec, place: Place) -> Vm:
        """Start a machine; its guest may still be booting. Raises StartError, and then nothing of it is left."""

    @abstractmethod
    async def restore(self, saved: Path, spec: MachineSpec, place: Place, *, paused: bool = False) -> Vm:
        """A further machine from what `Vm.save` wrote, running; memory is private to it, and read as it is touched.
        With `paused` it has not executed an instruction yet when this returns, and waits for `Vm.resume`.

        Raises SnapshotInvalidError (another binding, damaged files), StartError; nothing of it is left then. Without
        `paused` it may return while the VMM still reads, and `Vm.connect` says how that ended.
        """

    @abstractmethod
    async def find(self, place: Place) -> Vm | None:
        """A machine an earlier process started there. None: it is gone."""
