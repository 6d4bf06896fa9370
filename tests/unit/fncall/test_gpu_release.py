"""A container that did not start gives its GPU back once it is gone, and not before."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from opendsec.backends.container import ContainerBackend
from opendsec.errors import NodeError, StartError
from opendsec.fncall import starting
from opendsec.fncall.engine import Engine
from opendsec.fncall.gpu import GpuDesk, GpuInstance, GpuInventory
from opendsec.fncall.member import Group
from opendsec.fncall.settings import FnCallSettings
from opendsec.model.image import Image, ImageConfig

pytestmark = pytest.mark.anyio


class NeverStarts:
    """Containers that fail to start, and while `stuck` to go away again."""

    capabilities: frozenset[str] = frozenset()
    stuck = False

    async def start(self, plan: object) -> None:
        raise StartError("no")

    async def destroy(self, *_: object, **__: object) -> None:
        if self.stuck:
            raise NodeError("its control group is not empty")


@pytest.mark.parametrize(("stuck", "no_slot", "held"), [(False, False, 0), (True, False, 1), (False, True, 0)])
async def test_a_gpu_goes_back_only_when_nothing_uses_it(
    tmp_path: Path, stuck: bool, no_slot: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_slot:
        monkeypatch.setattr(starting, "CALL_SLOTS", ())
    containers = NeverStarts()
    containers.stuck = stuck
    desk = GpuDesk(GpuInventory(instances=(GpuInstance(uuid="MIG-0", profile="1g"),), simulated=True))
    settings = FnCallSettings(edge="a", state_dir=tmp_path / "state", run_dir=tmp_path / "run")
    any_containers = cast("ContainerBackend", cast("Any", containers))
    engine = Engine(settings=settings, containers=any_containers, images=cast("Any", None), gpus=desk)
    await engine.open()
    image = Image(name="i", digest="sha256:i", layers=(), config=ImageConfig(), created_at=0.0)
    with pytest.raises(Exception, match=r"^(no|all containers .*)$"):
        await engine._start(Group("p", image.digest, None, "exclusive:", image))
    await engine.close()
    assert len(desk.leases) == held
