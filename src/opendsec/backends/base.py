"""The one interface behind which container, microVM, full VM and FnCall are strangers to each other.

An edge holds one `Backend` per kind. A verb outside `capabilities` is refused by the edge before the backend sees it.
Backends keep no durable state of their own: everything needed to find a sandbox again is in its `Handle`, which the
edge journals and hands to `recover` after its restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from opendsec.backends.console import Console
from opendsec.errors import UnsupportedError
from opendsec.guest.base import Guest
from opendsec.model.ids import SandboxId
from opendsec.model.image import Image, ImageConfig
from opendsec.model.node import BackendReport
from opendsec.model.spec import BackendKind, SandboxSpec
from opendsec.store.disk_changes import Written


class Capability(StrEnum):
    """A verb or feature a backend may declare."""

    EXEC = "exec"
    SESSIONS = "sessions"
    PTY = "pty"
    FILES = "files"
    NETWORK = "network"
    MEMORY_LIMIT = "memory_limit"
    CPU_LIMIT = "cpu_limit"
    PIDS_LIMIT = "pids_limit"
    DISK_LIMIT = "disk_limit"
    PAUSE = "pause"
    PACK = "pack"
    SNAPSHOT = "snapshot"
    """Memory and disk are saved, and further sandboxes start from them."""
    RECOVER = "recover"
    PORTS = "ports"
    """Connections from outside to a port inside."""
    SCREEN = "screen"
    """A picture of what its display shows."""
    INPUT = "input"
    """Mouse and keyboard."""
    SERIAL = "serial"
    """The console of its operating system."""
    CLIPBOARD = "clipboard"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Everything a backend is told about one start."""

    sandbox_id: SandboxId
    spec: SandboxSpec
    image: Image
    state_dir: Path
    """Exists, empty, on the node's state file system; the backend may fill it and `destroy` empties it."""
    run_dir: Path
    """Exists, empty, on a tmpfs; for sockets."""
    slot: int
    """Small number, unique among live sandboxes of this edge; user ranges and addresses are made from it."""
    snapshot: Path | None = None
    """The files of a published snapshot of this kind of backend (`opendsec.store.snapshots`), which the sandbox goes on
    from; read-only. `image` is what the snapshot's source was started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Opaque to the edge; JSON-friendly; journalled."""

    backend: BackendKind
    sandbox_id: SandboxId
    version: int = 1
    data: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Running:
    """A started (or recovered) sandbox: its handle and a live connection to its agent."""

    handle: Handle
    guest: Guest


@dataclass(slots=True, kw_only=True)
class Parked:
    """A recovered sandbox of a backend that parks: it is paused, and nothing of it runs."""

    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counters of a sandbox; None where this host cannot tell."""

    memory_bytes: int | None = None
    oom_kills: int | None = None
    """Processes of this sandbox killed for its memory limit so far."""
    pids_denied: int | None = None
    """Forks refused for its pids limit so far."""
    disk_full: bool | None = None
    """The writable layer has no room (below 64 KiB or without inodes) now."""
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a sandbox has written, on top of what."""

    tree: Path
    """An overlay's upper directory on this host: whiteouts are character devices 0:0, a directory that hides what is
    below it has `trusted.overlay.opaque`, and owners are ids as inside."""
    lower: tuple[int, ...]
    """Descriptors of the directories of the image's layers, topmost first; they belong to the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskChanges:
    """What a sandbox that is a machine with a disk has written."""

    written: Written
    whole: bool
    """Its file systems were made whole on the disk first; else it is as after a power cut."""


class Backend(ABC):
    """One kind of isolation on this node."""

    kind: BackendKind
    parks: bool = False
    """Whether `pause` ends what runs, and the connection with it, once the state is on the disk. The edge then takes
    the end of the connection for no failure, and asks `reconnect` for a new one after `resume`. From the moment
    `resume` lets anything run, the saved state must not be believed any more: what runs changes the disk."""

    offers: frozenset[Capability] = frozenset()
    """What it has on a host that has all it asks for (docs/reference/backends.md); `capabilities` is never more."""
    opens_at_leisure: bool = False
    """`open` may take seconds: an edge starts without waiting for it unless sandboxes of it live."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """What works here and now, by probing once at `open`."""

    @abstractmethod
    async def open(self) -> None:
        """Probe and prepare (templates, helper processes). Called before anything else; again only after it has failed.

        Raises HostCapabilityError with the remedy; nothing is left of it then, nor when it is cancelled: what was
        missing may be there when it is called next.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release what `open` made. Sandboxes stay."""

    @abstractmethod
    def report(self) -> BackendReport: ...

    @abstractmethod
    async def start(self, plan: StartPlan) -> Running:
        """Start it and return when its agent has answered.

        Raises StartError (nothing of it is left) or InvalidSpecError.
        Cancelling leaves nothing behind either, or leaves what `destroy` of the same plan's id removes.
        """

    @abstractmethod
    async def recover(self, handle: Handle) -> Running | Parked | None:
        """Find a sandbox of an earlier edge process again. None: it is gone (call `destroy`).

        A paused one is found paused (Parked where the backend parks, unless its pause had not come that far; then, and
        after an edge that died within `changes` or `snapshot`, a backend that parks finds it running).
        Raises GuestLostError when it lives but does not answer within a minute or so: try again (a new edge asks many
        at once, and this is to hold up no other), or stop it.
        """

    @abstractmethod
    async def reconnect(self, handle: Handle) -> Guest | None:
        """A new connection after one was lost. None: the agent is gone for good. Raises GuestLostError as `recover`,
        GuestGoneError for a None with the words to tell."""

    @abstractmethod
    async def pause(self, handle: Handle) -> None:
        """Stop using CPU; keep identity and memory. Idempotent."""

    @abstractmethod
    async def resume(self, handle: Handle) -> None:
        """Undo `pause`. Idempotent."""

    def changes(self, handle: Handle, *, image: Image) -> AbstractAsyncContextManager[Changes | DiskChanges]:
        """What the sandbox has written, while it stands still: no process of it runs until the block is left.

        A paused one stays paused; pause, resume and reconnect wait for the end of the block; stop and destroy do not.
        Whoever finds a sandbox after this process died calls `resume` unless it was paused. `image` is what it was
        started from. Raises UnsupportedError unless declared, SandboxLostError, ImageInvalidError.
        """
        del image
        raise UnsupportedError(f"the {self.kind.value} backend cannot pack", sandbox_id=handle.sandbox_id)

    def lacks(self, config: ImageConfig) -> Mapping[Capability, str]:
        """What sandboxes of an image with this configuration do not have, of what is declared, and why not."""
        del config
        return {}

    def console(self, handle: Handle) -> Console:
        """Screen, input and serial line. Raises UnsupportedError unless declared."""
        raise UnsupportedError(f"the {self.kind.value} backend has no screen", sandbox_id=handle.sandbox_id)

    @abstractmethod
    async def snapshot(self, handle: Handle, target: Path) -> None:
        """Save memory and disk below `target`, an empty directory on the state file system; then it goes on as it was.
        Pause, resume and reconnect wait for the end of this; stop and destroy do not.

        The files bind themselves to what can read them (VMM, version, accelerator, processor model): `start` with a
        plan that names them refuses anything else with the reason (SnapshotInvalidError). A connection may be lost
        over this; commands are not. UnsupportedError unless declared, DiskFullError, SandboxLostError.
        """

    @abstractmethod
    async def stop(self, handle: Handle, *, grace_s: float) -> None:
        """End every process of it. Returns when they are gone. Idempotent, valid in every state."""

    @abstractmethod
    async def destroy(
        self, sandbox_id: SandboxId, handle: Handle | None, *, state_dir: Path, run_dir: Path, slot: int
    ) -> None:
        """Remove everything: processes, mounts, cgroups, network, files of both directories (not the directories).

        Idempotent. `handle` is None after a start that was cut short: the backend then finds what may be there by id
        and slot.
        """

    @abstractmethod
    def usage(self, handle: Handle) -> Usage:
        """Counters now; cheap (a few small reads), called around commands that failed."""
