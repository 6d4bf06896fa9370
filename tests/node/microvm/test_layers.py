"""Images with more files than a machine takes drives, with real Linux guests: the limit is lowered for QEMU, whose own
way with layers has none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.contract.harness import MICROVM_NEEDS, Place, Sandbox, microvm_backend, microvm_place
from tests.images import make_many_layers

from opendsec.backends.microvm import MicroVmBackend
from opendsec.backends.microvm_layers import PACKED_FILE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, *(getattr(pytest.mark, name) for name in MICROVM_NEEDS)]
LAYERS = 9
ALL = " ".join(str(number) for number in range(1, LAYERS))


@pytest.fixture
async def place(anyio_backend: str) -> AsyncIterator[Place]:
    async with microvm_place() as made:
        backend = made.backend
        assert isinstance(backend, MicroVmBackend)
        image = make_many_layers(backend._layers._loader._store, "many", LAYERS)  # type: ignore[attr-defined]
        made.images = {**made.images, "many": image}
        lowered(backend)
        yield made


def lowered(backend: MicroVmBackend) -> None:
    """The writable disk, two files as they are, and the rest."""
    backend._vmm.most_drives = 4


async def test_an_image_of_many_layers_is_what_it_is_in_a_container(place: Place) -> None:
    cat = "cd /layers; cat $(ls | sort -n); ls /gone /opaque"
    said = b"".join(b"%d\n" % number for number in range(1, LAYERS))
    target = place.state_dir.parent / "snapshot"
    target.mkdir()
    async with place.sandbox("many") as box:
        first = await box.run(cat)
        assert first.stdout == said + b"/opaque:\nnew\n", first
        assert (box.plan.state_dir / PACKED_FILE).stat().st_nlink == 2
        await box.backend.pause(box.running.handle)
        await box.backend.resume(box.running.handle)
        guest = await box.backend.reconnect(box.running.handle)
        assert guest is not None
        box.running.guest = guest
        assert (await box.run("echo 3 > /proc/sys/vm/drop_caches; " + cat)).stdout == first.stdout
        await box.backend.snapshot(box.running.handle, target)
    assert isinstance(place.backend, MicroVmBackend)
    layers = place.backend._layers
    await place.backend.close()
    for path in (place.state_dir.parent / "microvm/layers").iterdir():
        path.unlink()  # it can be made again from the image
    place.backend = microvm_backend(layers, place.state_dir.parent, place.run_dir.parent)
    await place.backend.open()
    lowered(place.backend)
    plan = replace(place.plan("many"), snapshot=target)
    copy = Sandbox(place.backend, plan, await place.backend.start(plan), last_command=100)
    assert (await copy.run("echo 3 > /proc/sys/vm/drop_caches; " + cat)).stdout == first.stdout
    await place.destroy(plan)
