"""The edge's own last yes or no to a new sandbox. Pure: facts in, a refusal with every reason (or none) out.

Limits of a sandbox are caps, not reservations, so nothing is summed up: what counts is what the node has left right
now.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendsec.backends.base import Capability
from opendsec.errors import InvalidSpecError, UnschedulableError, UnsupportedError
from opendsec.linux.slots import SANDBOX_SLOTS
from opendsec.model.image import Image
from opendsec.model.spec import BackendKind, Resources, SandboxSpec

MAX_SLOTS = len(SANDBOX_SLOTS)
"""So many slots are for sandboxes of one edge; others of its ranges of user ids are for calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the node has, measured a moment ago."""

    memory_total_mb: int
    memory_available_mb: int
    disk_free_mb: int
    cpu_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Below or above these nothing more is admitted."""

    memory_floor_mb: int = 512
    disk_floor_mb: int = 1024
    max_live: int = MAX_SLOTS
    max_creating: int = 4096
    """Starts under way or waiting for their turn."""


def refusals(facts: NodeFacts, limits: AdmissionLimits, *, live: int, creating: int) -> tuple[str, ...]:
    """Why this node takes nothing more now; empty when it does. `live` includes `creating`."""
    reasons = []
    if facts.memory_available_mb < limits.memory_floor_mb:
        reasons.append(f"{facts.memory_available_mb} MiB of memory available, the floor is {limits.memory_floor_mb}")
    if facts.disk_free_mb < limits.disk_floor_mb:
        reasons.append(f"{facts.disk_free_mb} MiB of disk free, the floor is {limits.disk_floor_mb}")
    if live >= min(limits.max_live, MAX_SLOTS):
        reasons.append(f"{live} sandboxes live, at most {min(limits.max_live, MAX_SLOTS)}")
    if creating >= limits.max_creating:
        reasons.append(f"{creating} sandboxes being created, at most {limits.max_creating}")
    return tuple(reasons)


def check(facts: NodeFacts, limits: AdmissionLimits, *, live: int, creating: int) -> None:
    """Raise UnschedulableError with every reason, or admit."""
    reasons = refusals(facts, limits, live=live, creating=creating)
    if reasons:
        raise UnschedulableError(
            "this edge takes no more sandboxes now: " + "; ".join(reasons), detail={"reasons": list(reasons)}
        )


def check_supported(spec: SandboxSpec, capabilities: frozenset[Capability]) -> None:
    """Raise UnsupportedError naming the field the backend cannot honour. A default nobody asked for is not refused."""
    wanted = (
        ("memory_limit_mb", spec.resources.memory_limit_mb is not None, Capability.MEMORY_LIMIT),
        ("cpu_cores_limit", spec.resources.cpu_cores_limit is not None, Capability.CPU_LIMIT),
        ("pids_limit", spec.resources.pids_limit not in (None, Resources().pids_limit), Capability.PIDS_LIMIT),
        ("disk_limit_mb", spec.resources.disk_limit_mb is not None, Capability.DISK_LIMIT),
        ("screen", spec.screen is not None, Capability.SCREEN),
        ("network_rules", any(spec.network_rules.values()), Capability.NETWORK),
        ("snapshot", spec.snapshot is not None, Capability.SNAPSHOT),
    )
    for name, asked, capability in wanted:
        if asked and capability not in capabilities:
            raise UnsupportedError(
                f"{name}: the {spec.backend.value} backend of this node has no {capability.value}",
                detail={"field": name, "capability": capability.value},
                remedy="leave it out, or see `opendsec doctor`",
            )


def check_memory(spec: SandboxSpec, facts: NodeFacts) -> None:
    """Raise UnschedulableError for a virtual machine with more memory than this host has: it is the guest's from its
    start, and no cap. Another edge may have it; asking this one again is of no use."""
    asked = spec.resources.memory_limit_mb or 0
    if spec.backend in (BackendKind.MICROVM, BackendKind.FULLVM) and asked > facts.memory_total_mb:
        raise UnschedulableError(
            f"memory_limit_mb: {asked} MiB were asked for, and this host has {facts.memory_total_mb}",
            detail={"field": "memory_limit_mb"},
            remedy="ask for less: a virtual machine has its memory from the start",
            retryable=False,
        )


def check_image(spec: SandboxSpec, image: Image) -> None:
    """Raise InvalidSpecError when the image is of the wrong kind for the backend: full VMs start from whole disks, and
    nothing else does."""
    wanted = spec.backend is BackendKind.FULLVM
    if spec.backend is BackendKind.DUMMY or wanted is (image.config.machine is not None):
        return
    detail = {"field": "image", "image": spec.image, "backend": spec.backend.value}
    if wanted:
        raise InvalidSpecError(
            f"image: {spec.image!r} is made of layers of files, and a full VM starts from a whole disk",
            detail=detail,
            remedy="run it with the backend container or microvm; or make a disk of it with "
            f"`opendsec image build-disk NAME --from {spec.image}`, or import one with `opendsec image import --disk`",
        )
    raise InvalidSpecError(
        f"image: {spec.image!r} is a whole disk, which the {spec.backend.value} backend cannot start from",
        detail=detail,
        remedy="run it with the backend fullvm",
    )
