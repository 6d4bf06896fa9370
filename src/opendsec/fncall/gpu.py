"""Which container of a pool holds which GPU: a pure choice over an inventory, and the desk that remembers it.

An instance is a MIG slice, or a whole device where MIG is off. An exclusive holder has its instance alone for its life;
shared holders fill one instance before the next is begun, so that whole ones stay free. MIG is never reconfigured.

Nothing is written down: an edge ends every container an earlier process left before its first call, so after a crash
nobody holds anything, and giving back what is not held is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opendsec.errors import CapacityError, InvalidSpecError, UnsupportedError
from opendsec.model.fncall import GpuMode, GpuRequest

SHARED_MOST = 8
"""Containers that share one instance at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """A device, or a slice of one."""

    uuid: str
    """As the driver names it: `GPU-…` or `MIG-…`."""
    profile: str = ""
    """MIG profile; "": a whole device."""
    name: str = ""
    memory_mb: int = 0
    """0: not known."""
    devices: tuple[str, ...] = ()
    """Device nodes a container needs, at the same path inside."""
    mounts: tuple[tuple[str, str], ...] = ()
    """(path here, path inside) of the driver's libraries and programs, read-only."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """The instances of this node."""

    instances: tuple[GpuInstance, ...]
    simulated: bool = False
    """Made up by a file (OPENDSEC_GPU_INVENTORY): there is nothing to compute on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLease:
    """What a container holds."""

    holder: str
    mode: GpuMode
    instance: GpuInstance

    @property
    def env(self) -> Mapping[str, str]:
        """What programs inside need to see this instance, and no other."""
        return {
            **self.instance.env,
            "CUDA_VISIBLE_DEVICES": self.instance.uuid,
            "NVIDIA_VISIBLE_DEVICES": self.instance.uuid,
        }

    @property
    def devices(self) -> tuple[str, ...]:
        """Device nodes to attach."""
        return self.instance.devices

    @property
    def mounts(self) -> tuple[tuple[str, str], ...]:
        """Files and directories to attach read-only."""
        return self.instance.mounts


def place(
    instances: Sequence[GpuInstance], leases: Sequence[GpuLease], request: GpuRequest, *, shared_most: int = SHARED_MOST
) -> GpuInstance:
    """The instance for one more holder.

    Raises UnsupportedError (field `gpu`, or `gpu.profile`) when no instance could ever do, CapacityError when those
    that could are held.
    """
    fitting = _fitting(instances, request)
    shared: dict[str, int] = {one.uuid: 0 for one in fitting}
    alone: set[str] = set()
    for lease in leases:
        if lease.mode is GpuMode.EXCLUSIVE:
            alone.add(lease.instance.uuid)
        elif lease.instance.uuid in shared:
            shared[lease.instance.uuid] += 1
    most = 0 if request.mode is GpuMode.EXCLUSIVE else shared_most - 1
    free = [one for one in fitting if one.uuid not in alone and shared[one.uuid] <= most]
    if not free:
        raise CapacityError(
            f"gpu: all {len(fitting)} instances that would do are held",
            detail={"field": "gpu", "mode": request.mode.value, "profile": request.profile},
            remedy="try again later",
        )
    return min(free, key=lambda one: (not shared[one.uuid], shared[one.uuid], one.memory_mb, one.uuid))


def _fitting(instances: Sequence[GpuInstance], request: GpuRequest) -> list[GpuInstance]:
    if not instances:
        raise UnsupportedError("gpu: this node has none for calls", detail={"field": "gpu"})
    fitting = [one for one in instances if request.profile in ("", one.profile)]
    if not fitting:
        there = ", ".join(sorted({one.profile or "whole devices" for one in instances}))
        raise UnsupportedError(
            f"gpu.profile: this node has no instance of {request.profile}",
            detail={"field": "gpu", "profile": request.profile},
            remedy=f"it has {there}; MIG is never reconfigured for a call",
        )
    return fitting


class GpuDesk:
    """Gives instances to containers and takes them back. Not for several threads."""

    def __init__(self, inventory: GpuInventory, *, shared_most: int = SHARED_MOST) -> None:
        uuids = [one.uuid for one in inventory.instances]
        if len(set(uuids)) != len(uuids):
            raise InvalidSpecError("a GPU instance is named twice in the inventory", detail={"field": "uuid"})
        self.inventory = inventory
        self._shared_most = shared_most
        self._leases: dict[str, GpuLease] = {}

    @property
    def leases(self) -> tuple[GpuLease, ...]:
        """What is held now."""
        return tuple(self._leases.values())

    def take(self, request: GpuRequest, *, holder: str) -> GpuLease:
        """An instance for this container, until it is given back; a holder's second question has the same answer.

        Raises as `place`.
        """
        held = self._leases.get(holder)
        if held is None:
            instance = place(self.inventory.instances, self.leases, request, shared_most=self._shared_most)
            held = self._leases[holder] = GpuLease(holder=holder, mode=request.mode, instance=instance)
        return held

    def release(self, holder: str) -> None:
        """The container is gone, and nothing of it uses the instance. May be repeated."""
        self._leases.pop(holder, None)
