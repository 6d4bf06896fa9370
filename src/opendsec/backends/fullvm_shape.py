"""What a full VM is made of: decided of a plan, and of what a snapshot says of the machine it was. Pure.

Refused by name: an image that is no disk, a disk smaller than its image, and what only an agent inside could do where
there is none.
"""

from __future__ import annotations

import os
import secrets

import msgspec

from opendsec.backends.base import Handle, StartPlan
from opendsec.backends.fullvm_guest import NO_AGENT, REMEDY
from opendsec.errors import HostCapabilityError, InvalidSpecError, UnsupportedError
from opendsec.model.image import Layer, LayerRole, Machine
from opendsec.model.screen import parse_size
from opendsec.vm.base import Accelerator
from opendsec.vm.q35 import AGENT_SOCKET
from opendsec.vm.q35_line import Q35Spec, cpus_of, disk_bytes
from opendsec.vm.q35_saved import Saved

DEFAULT_SCREEN = (1280, 800)
MAX_SOCKET_PATH = 107
"""unix(7)"""


def machine_of(plan: StartPlan) -> Machine:
    """What the image says, if this backend can do what is asked. Raises InvalidSpecError, UnsupportedError naming the
    field, HostCapabilityError."""
    machine = plan.image.config.machine
    if machine is None:
        raise InvalidSpecError(
            f"image: {plan.image.name!r} is no disk; a full VM starts from one",
            detail={"field": "image"},
            remedy=f"make one of it with `opendsec image build-disk NAME --from {plan.image.name}`",
        )
    if len(os.fsencode(plan.run_dir / AGENT_SOCKET)) > MAX_SOCKET_PATH:
        raise HostCapabilityError(
            f"{plan.run_dir}/{AGENT_SOCKET} is longer than a socket's path can be ({MAX_SOCKET_PATH} bytes)",
            detail={"probe": "run_dir"},
            remedy="use a shorter OPENDSEC_RUN_DIR",
        )
    given = {"env": plan.spec.env, "workdir": plan.spec.workdir, "init_user": plan.spec.init_user}
    for name, value in given.items():
        if value and not machine.agent:
            raise UnsupportedError(f"{name}: {NO_AGENT}", detail={"field": name}, remedy=REMEDY)
    return machine


def shape_of(plan: StartPlan, machine: Machine, saved: Saved | None, accelerator: Accelerator) -> Q35Spec:
    """The machine; one that goes on from a saved one has its screen, address and disk. Raises InvalidSpecError."""
    limits = plan.spec.resources
    return Q35Spec(
        machine=machine,
        accelerator=accelerator,
        memory_mib=limits.memory_limit_mb or machine.memory_mb,
        cpus=cpus_of(machine, limits.cpu_cores_limit),
        screen=_screen(plan.spec.screen) if saved is None else saved.screen,
        mac=_new_mac() if saved is None else saved.mac,
        disks=len(plan.image.layers),
        disk_bytes=disk_bytes(machine, limits.disk_limit_mb) if saved is None else saved.disk_bytes,
        restored=saved is not None,
    )


def _screen(asked: str | None) -> tuple[int, int]:
    if asked is None:
        return DEFAULT_SCREEN
    size = parse_size(asked)
    return size.width, size.height


def _new_mac() -> str:
    """Of QEMU's range. Networks are one for each machine, so it need not be anybody else's."""
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in secrets.token_bytes(3))


def shape_in(handle: Handle) -> Q35Spec:
    """As it was written into the handle."""
    return msgspec.json.decode(str(handle.data["spec"]), type=Q35Spec)


def encode_layers(layers: tuple[Layer, ...]) -> str:
    """For a handle: who finds the machine again holds its image's files again."""
    return " ".join(f"{layer.digest}={layer.size_bytes}" for layer in layers)


def layers_in(handle: Handle) -> tuple[Layer, ...]:
    """Those of its image; none where an earlier version wrote the handle."""
    pairs = (one.partition("=") for one in str(handle.data.get("layers", "")).split())
    return tuple(Layer(digest=digest, size_bytes=int(size), role=LayerRole.DISK) for digest, _, size in pairs)
