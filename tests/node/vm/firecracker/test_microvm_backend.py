"""The microVM backend over Firecracker, as far as a guest without an operating system goes: template, start, command,
pause and resume with what was in memory, snapshot and a start from it, found again, and nothing left.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

import msgspec
import pytest
from tests.capabilities import STATE_DIR
from tests.images import make_busybox_image, make_many_layers
from tests.node.vm.tiny_guest import run

from opendsec.backends.base import Handle, Parked, Running, StartPlan
from opendsec.backends.ground import FORWARDING, Ground
from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_files import PAUSED, PLACE
from opendsec.backends.microvm_layers import PACKED_FILE
from opendsec.guest.base import Guest
from opendsec.linux.network import SandboxNetwork
from opendsec.model.ids import new_sandbox_id
from opendsec.model.image import Image
from opendsec.model.spec import BackendKind, Resources, SandboxSpec
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
from opendsec.vm.base import WantedVmm
from opendsec.vm.chosen import ChosenVmm
from opendsec.vm.firecracker import MAX_DRIVES
from opendsec.vm.firecracker_machine import KEPT_MEMORY
from opendsec.vm.firecracker_saved import MEMORY
from opendsec.vm.kernels import KernelFacts, file_digest, kernels_directory
from opendsec.vm.saved import MANIFEST

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "firecracker", "native", "cgroup", "erofs", "tun", "nft")),
]


def install_kernel(kernel: Path, state: Path) -> None:
    """As `opendsec kernel install` leaves one."""
    directory = kernels_directory(state) / "tiny"
    directory.mkdir(parents=True)
    shutil.copy(kernel, directory / "vmlinux")
    facts = KernelFacts(name="tiny", release="0", source="a test", sha256=file_digest(kernel))
    (directory / "kernel.json").write_bytes(msgspec.json.encode(facts))
    (directory.parent / "default").symlink_to("tiny")


@dataclass(slots=True)
class Node:
    """An edge's backend, and what it is made of."""

    state: Path
    run: Path
    layers: LayerMounts
    image: Image
    store: ImageStore

    def backend(self) -> MicroVmBackend:
        network = SandboxNetwork(
            state_file=FORWARDING, prefix=IPv4Network("10.206.0.0/16"), links="odsf-", table="opendsec_fc_test"
        )
        return MicroVmBackend(
            vmm=ChosenVmm(state_dir=self.state, run_dir=self.run, wanted=WantedVmm.FIRECRACKER),
            layers=self.layers,
            state_dir=self.state,
            run_dir=self.run,
            kernels=self.state,
            ground=Ground(self.state, cgroup_root=f"opendsec-fc-{os.getpid()}"),
            network=network,
        )

    def plan(self, slot: int, *, snapshot: Path | None = None, memory_mb: int = 128) -> StartPlan:
        sandbox_id = new_sandbox_id("test")
        state, place = self.state / sandbox_id, self.run / sandbox_id
        state.mkdir(mode=0o700)
        place.mkdir(mode=0o711)
        resources = Resources(memory_limit_mb=memory_mb, disk_limit_mb=16)
        spec = SandboxSpec(image=self.image.name, backend=BackendKind.MICROVM, resources=resources)
        return StartPlan(
            sandbox_id=sandbox_id,
            spec=spec,
            image=self.image,
            state_dir=state,
            run_dir=place,
            slot=slot,
            snapshot=snapshot,
        )


@pytest.fixture
async def node(kernel: Path) -> AsyncIterator[Node]:
    state = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/lib"))
    place = Path(tempfile.mkdtemp(prefix="ods-", dir="/run"))
    place.chmod(0o711)
    install_kernel(kernel, state)
    (state / "vmm").symlink_to(STATE_DIR / "vmm")
    store = ImageStore(state / "store")
    layers = LayerMounts(DirectLoader(store, state / "metadata"), place / "layers")
    made = Node(state, place, layers, make_busybox_image(store), store)
    yield made
    made.layers.unmount_all()
    shutil.rmtree(place)
    shutil.rmtree(state)


async def destroy(backend: MicroVmBackend, *plans: StartPlan) -> None:
    for plan in plans:
        await backend.destroy(plan.sandbox_id, None, state_dir=plan.state_dir, run_dir=plan.run_dir, slot=plan.slot)
        assert list(plan.state_dir.iterdir()) == []
        assert list(plan.run_dir.iterdir()) == []


async def test_the_whole_life_of_sandboxes(node: Node) -> None:
    backend = node.backend()
    await backend.open()
    plans = [node.plan(0), node.plan(1)]
    first, second = [await backend.start(plan) for plan in plans]
    assert first.guest is not None
    assert second.guest is not None
    assert await run(first.guest, 2, "fill 500 1") == (0, b"500")
    assert await run(second.guest, 2, "fill 500 2") == (0, b"500")
    for turn in (1, 2):  # parked, and what was in memory is there again
        await backend.pause(first.handle)
        assert isinstance(await backend.recover(first.handle), Parked)
        await backend.resume(first.handle)
        assert await run(await _guest(backend, first.handle), 2 + turn, "check 500 1") == (0, b"0")
    target = node.state / "snapshot"
    target.mkdir()
    await backend.snapshot(second.handle, target)
    assert await run(await _guest(backend, second.handle), 9, "check 500 2") == (0, b"0")
    target = target.rename(node.state / "published")
    await goes_on_from_its_snapshot(backend, second.handle, plans[1])
    plans.append(node.plan(2, snapshot=target))
    third = await backend.start(plans[-1])
    assert third.guest is not None
    assert await run(third.guest, 3, "check 500 2") == (0, b"0")
    await backend.close()

    again = node.backend()  # the edge was started anew
    await again.open()
    found = await again.recover(third.handle)
    assert isinstance(found, Running)
    assert found.guest is not None
    assert await run(found.guest, 4, "check 500 2") == (0, b"0")
    await again.stop(third.handle, grace_s=0)
    assert await again.recover(third.handle) is None
    for handle in (first.handle, second.handle):
        assert isinstance(await again.recover(handle), Running)
    await destroy(again, *plans)
    await again.close()


async def goes_on_from_its_snapshot(backend: MicroVmBackend, handle: Handle, plan: StartPlan) -> None:
    """What it changes is saved over the published memory, also once that is removed, and after another snapshot."""
    for turn in (1, 2):
        assert await run(await _guest(backend, handle), 20 + turn, f"fill 10 {turn}") == (0, b"10")
        await backend.pause(handle)
        saved = json.loads((plan.state_dir / PAUSED / MANIFEST).read_bytes())
        assert Path(saved["base"]).parent == plan.state_dir
        assert (plan.state_dir / PAUSED / MEMORY).stat().st_blocks * 512 < 8 << 20
        await backend.resume(handle)
        assert await run(await _guest(backend, handle), 30 + turn, f"check 10 {turn}") == (0, b"0")
        another = plan.state_dir.parent / "another"
        another.mkdir()
        await backend.snapshot(handle, another)
        shutil.rmtree(another)
        assert len(list(plan.state_dir.glob(f"{KEPT_MEMORY}*"))) == 1
    assert await run(await _guest(backend, handle), 40, "check 500 2") == (0, b"0")


async def test_templates_are_made_by_users_of_their_own(node: Node) -> None:
    backend = node.backend()
    await backend.open()
    plans = [node.plan(slot, memory_mb=memory_mb) for slot, memory_mb in enumerate((128, 129, 130))]
    for plan in plans:
        await backend.start(plan)
    users = {path.stat().st_uid for path in node.state.glob("microvm/templates/*/disk.img")}
    assert len(users) == 3, "the writable disk is its VMM's"
    assert not users & {plan.state_dir.joinpath("disk.img").stat().st_uid for plan in plans}
    await destroy(backend, *plans)
    await backend.close()


async def test_an_image_of_more_layers_than_drives(node: Node) -> None:
    node.image = make_many_layers(node.store, "many", 9)
    backend = node.backend()
    await backend.open()
    assert backend._vmm.most_drives == MAX_DRIVES
    backend._vmm.most_drives = 5  # this guest has interrupts for so many; test_firecracker.py has all
    plan = node.plan(0)
    made = await backend.start(plan)
    assert made.guest is not None
    vm = json.loads((plan.run_dir / PLACE / "vm.json").read_bytes())
    drives = vm["shape"]["drives"]
    assert (len(drives), drives[-2:]) == (5, [["layers", True], ["disk", False]])
    assert await run(made.guest, 2, "fill 500 1") == (0, b"500")
    await backend.pause(made.handle)
    assert (plan.state_dir / PACKED_FILE).stat().st_nlink == 2
    await backend.resume(made.handle)
    assert await run(await _guest(backend, made.handle), 3, "check 500 1") == (0, b"0")
    await destroy(backend, plan)
    await backend.close()


async def _guest(backend: MicroVmBackend, handle: Handle) -> Guest:
    guest = await backend.reconnect(handle)
    assert guest is not None
    return guest
