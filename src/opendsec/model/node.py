"""Sandboxes and nodes as they are: states, end reasons, reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from opendsec.model.ids import SandboxId
from opendsec.model.image import ImagePart
from opendsec.model.spec import SandboxSpec


class SandboxState(StrEnum):
    """One word for where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


LIVE_STATES = frozenset(
    {
        SandboxState.CREATING,
        SandboxState.RUNNING,
        SandboxState.PAUSING,
        SandboxState.PAUSED,
        SandboxState.RESUMING,
        SandboxState.STOPPING,
    }
)


class SandboxEnd(StrEnum):
    """Why a sandbox ended."""

    STOPPED = "stopped"
    EXPIRED_IDLE = "expired_idle"
    EXPIRED_MAX = "expired_max"
    OOM = "oom"
    GUEST_LOST = "guest_lost"
    NODE_LOST = "node_lost"
    EVICTED = "evicted"
    START_FAILED = "start_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStatus:
    """What is true of a sandbox now."""

    sandbox_id: SandboxId
    project: str
    edge: str
    state: SandboxState
    spec: SandboxSpec
    image_digest: str = ""
    """Of the composition: follows from its layers and config."""
    image_parts: tuple[ImagePart, ...] = ()
    """The images it was started from, lowest first, each with the exact content its name meant at the create; the
    `pinned` reference of each starts the same again."""
    created_at: float
    """Unix time, seconds."""
    ready_at: float | None = None
    ended_at: float | None = None
    end_reason: SandboxEnd | None = None
    end_detail: str = ""
    running_commands: int = 0
    idle_expires_at: float | None = None
    max_expires_at: float | None = None
    memory_bytes: int | None = None
    """Charged to the sandbox's cgroup now; None when not asked for or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """Whether a backend works on this node, and if not, why."""

    available: bool
    reasons: tuple[str, ...] = ()
    """Why it is not."""
    capabilities: tuple[str, ...] = ()
    live: int = 0
    preparing: bool = False
    """It is not known yet whether it works."""
    degraded: tuple[str, ...] = ()
    """What works, and not as it should (emulation instead of hardware, say)."""
    binding: str = ""
    """What its snapshots are bound to (VMM, version, accelerator, processor model); another edge with the same one can
    start from them. Empty: it makes none, or they go everywhere."""


MAX_REPORTED_IMAGES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """An edge's answer to 'how are you?'."""

    edge: str
    version: str
    accepting: bool
    reasons: tuple[str, ...] = ()
    """Why not accepting."""
    backends: Mapping[str, BackendReport] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """The first names of its store, at most MAX_REPORTED_IMAGES: a report is asked for every second."""
    image_count: int = 0
    """How many there are in all."""
    live: int = 0
    creating: int = 0
    memory_total_mb: int = 0
    memory_available_mb: int = 0
    disk_free_mb: int = 0
    cpu_count: int = 0
    started_at: float = 0.0
