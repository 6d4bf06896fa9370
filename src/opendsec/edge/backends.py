"""Which backends an edge can have, and how each is made. Part of the composition root: nothing is probed here.

A backend's module is loaded when it is asked for, so an edge pays for what it offers and a module that cannot be loaded
concerns those who want it. To add one: a function that makes it, and its line in `FACTORIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opendsec.backends.base import Backend
from opendsec.backends.ground import Ground
from opendsec.model.spec import BackendKind
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import NO_RATES, Rates, WantedVmm


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What backends are made of."""

    layers: LayerMounts
    """The layers of images as they are mounted on this host."""
    store: Path | None
    """The image store where it is a directory."""
    state_dir: Path
    """Of this edge, on ext4, xfs or btrfs."""
    host_state_dir: Path
    """Of the platform on this host: what all its edges may share and find again (kernels, templates, answers of
    probes)."""
    run_dir: Path
    """Of this edge, on a tmpfs."""
    ground: Ground
    """What the backends of one edge share: its number, and the top control group."""
    vmm: WantedVmm = WantedVmm.AUTO
    """What runs microVMs."""
    vm_rates: Rates = NO_RATES
    """What each of them may use of the node."""


def _dummy(_means: Means) -> Backend:
    from opendsec.backends.dummy import DummyBackend

    return DummyBackend()


def _container(means: Means) -> Backend:
    from opendsec.backends.container import ContainerBackend

    return ContainerBackend(layers=means.layers, state_dir=means.state_dir, run_dir=means.run_dir, ground=means.ground)


def _microvm(means: Means) -> Backend:
    from opendsec.backends.microvm import MicroVmBackend
    from opendsec.vm.chosen import ChosenVmm

    return MicroVmBackend(
        vmm=ChosenVmm(state_dir=means.host_state_dir, run_dir=means.run_dir, wanted=means.vmm, rates=means.vm_rates),
        layers=means.layers,
        state_dir=means.state_dir,
        run_dir=means.run_dir,
        kernels=means.host_state_dir,
        ground=means.ground,
    )


def _fullvm(means: Means) -> Backend:
    from opendsec.backends.fullvm import FullVmBackend

    return FullVmBackend(
        layers=means.layers,
        state_dir=means.state_dir,
        host_state_dir=means.host_state_dir,
        run_dir=means.run_dir,
        ground=means.ground,
    )


FACTORIES: Mapping[BackendKind, Callable[[Means], Backend]] = {
    BackendKind.CONTAINER: _container,
    BackendKind.DUMMY: _dummy,
    BackendKind.FULLVM: _fullvm,
    BackendKind.MICROVM: _microvm,
}
AUTO = tuple(kind for kind in FACTORIES if kind is not BackendKind.DUMMY)
"""What an edge offers that is told nothing: everything but the dummy; what does not work here says so in its report."""


def make_backends(kinds: Iterable[BackendKind], means: Means) -> dict[BackendKind, Backend]:
    """One of each kind there is a factory for."""
    return {kind: FACTORIES[kind](means) for kind in kinds if kind in FACTORIES}
