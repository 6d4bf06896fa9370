"""Calls on GPUs that are made up: which container has which instance, for how long, and who waits."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.fncall.places import Ground

from opendsec.errors import NodeError, UnsupportedError
from opendsec.fncall.engine import Engine
from opendsec.fncall.gpu import GpuDesk, GpuInstance, GpuInventory
from opendsec.linux.mount import mountinfo
from opendsec.model.fncall import FnCallResult, FnCallSpec, GpuMode, GpuRequest, TaskType

pytestmark = [
    pytest.mark.anyio,
    *(getattr(pytest.mark, name) for name in ("root", "userns", "netns", "cgroup", "memcg", "overlay", "native")),
    pytest.mark.erofs,
    pytest.mark.image,
    pytest.mark.timeout(120),
]

EXCLUSIVE, SHARED = GpuRequest(mode=GpuMode.EXCLUSIVE), GpuRequest(mode=GpuMode.SHARED)
SEEN = "import os, time\ntime.sleep(float(os.environ.get('PAUSE', 0)))\nprint(os.environ.get('CUDA_VISIBLE_DEVICES'))"


@contextlib.asynccontextmanager
async def engine_with(place: Ground, count: int) -> AsyncIterator[tuple[Engine, GpuDesk]]:
    instances = tuple(GpuInstance(uuid=f"MIG-{n}", profile="1g.10gb") for n in range(count))
    desk = GpuDesk(GpuInventory(instances=instances, simulated=True), shared_most=2)
    engine = Engine(settings=place.settings(), containers=place.containers, images=place.store, gpus=desk)
    await engine.open()
    try:
        yield engine, desk
    finally:
        await engine.close()
        assert desk.leases == ()


async def seen(engine: Engine, gpu: GpuRequest | None, *, pause: str = "0", project: str = "default") -> str:
    spec = FnCallSpec(code=SEEN, gpu=gpu, env={"PAUSE": pause})
    return (await engine.call(spec, project=project)).stdout.strip()


async def test_exclusive_holders_are_alone_and_the_others_wait(place: Ground) -> None:
    async with engine_with(place, 2) as (engine, desk):
        assert await seen(engine, None) == "None"
        assert sorted(await asyncio.gather(*(seen(engine, EXCLUSIVE, pause="0.3") for _ in range(2)))) == [
            "MIG-0",
            "MIG-1",
        ]
        assert {lease.mode for lease in desk.leases} == {GpuMode.EXCLUSIVE}
        # More calls than instances: they wait for a container of their group, none is refused.
        told = await asyncio.gather(*(seen(engine, EXCLUSIVE, pause="0.05") for _ in range(6)))
        assert set(told) == {"MIG-0", "MIG-1"}
        # All instances are held by idle containers of that group: another group gets one all the same.
        assert await seen(engine, EXCLUSIVE, project="other") in {"MIG-0", "MIG-1"}
        assert await seen(engine, SHARED) in {"MIG-0", "MIG-1"}
        with pytest.raises(UnsupportedError) as refused:
            await seen(engine, GpuRequest(profile="7g.80gb"))
        assert refused.value.detail["field"] == "gpu"


async def test_groups_that_want_the_one_instance_take_turns(place: Ground) -> None:
    async with engine_with(place, 1) as (engine, _), asyncio.timeout(60):
        projects = [f"p{n % 3}" for n in range(9)]
        told = await asyncio.gather(*(seen(engine, EXCLUSIVE, pause="0.05", project=project) for project in projects))
        assert told == ["MIG-0"] * 9


async def test_what_a_cpu_call_compiled_runs_on_a_gpu_and_functions_stay_warm(place: Ground) -> None:
    async with engine_with(place, 1) as (engine, desk):
        source = '#include <stdio.h>\n#include <stdlib.h>\nint main(){puts(getenv("CUDA_VISIBLE_DEVICES"));return 0;}'
        built = await engine.call(FnCallSpec(task_type=TaskType.COMPILE, language="c", code=source), project="default")
        assert built.artifact, built.stderr
        assert desk.leases == ()
        run = FnCallSpec(language="c", artifact=built.artifact, gpu=EXCLUSIVE)
        assert (await engine.call(run, project="default")).stdout == "MIG-0\n"
        held = desk.leases
        assert (await engine.call(run, project="default")).stdout == "MIG-0\n"
        assert desk.leases == held  # the container lives on, and so does its hold
        function = FnCallSpec(
            task_type=TaskType.FUNCTION,
            code="def f():\n import os, sys\n return [os.environ['CUDA_VISIBLE_DEVICES'], 'decimal' in sys.modules]",
            function="f",
            imports=("decimal",),
            gpu=EXCLUSIVE,
        )
        results: list[FnCallResult] = [await engine.call(function, project="default") for _ in range(3)]
        assert [json.loads(result.value or "null") for result in results] == [["MIG-0", True]] * 3


async def test_nodes_and_libraries_are_there_for_its_holder_alone(place: Ground, tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_text("the driver's")
    tmp_path.chmod(0o755)
    # A stand-in for the driver's nodes: this one can be opened everywhere.
    instance = GpuInstance(
        uuid="MIG-GPU-1/2/3", devices=("/dev/fuse",), mounts=((str(library), "/usr/lib/nvidia/libcuda.so.1"),)
    )
    desk = GpuDesk(GpuInventory(instances=(instance,)))
    engine = Engine(settings=place.settings(), containers=place.containers, images=place.store, gpus=desk)
    code = (
        "import os\nprint(sorted(os.listdir('/dev')))\nos.close(os.open('/dev/fuse', os.O_RDWR))\n"
        "print(open('/usr/lib/nvidia/libcuda.so.1').read())\nopen('/dev/null', 'w').write('x')\n"
    )
    await engine.open()
    try:
        with_gpu = await engine.call(FnCallSpec(code=code, gpu=SHARED), project="default")
        without = await engine.call(FnCallSpec(code=code), project="default")
    finally:
        await engine.close()
    assert with_gpu.ok, with_gpu.stderr
    listed, _, library_said = with_gpu.stdout.partition("\n")
    assert set(ast.literal_eval(listed)) == {*ast.literal_eval(without.stdout.splitlines()[0]), "fuse"}
    assert library_said == "the driver's\n"
    assert "FileNotFoundError" in without.stderr
    assert not [entry for entry in mountinfo() if "MIG-GPU-1" in entry.target]


async def test_a_device_that_has_gone_is_named(place: Ground) -> None:
    desk = GpuDesk(GpuInventory(instances=(GpuInstance(uuid="GPU-1", devices=("/dev/nvidia-none",)),)))
    engine = Engine(settings=place.settings(), containers=place.containers, images=place.store, gpus=desk)
    await engine.open()
    try:
        with pytest.raises(NodeError, match="nvidia-none"):
            await engine.call(FnCallSpec(code="1", gpu=SHARED), project="default")
        assert desk.leases == ()
    finally:
        await engine.close()


async def test_without_a_gpu_it_is_refused_by_name(place: Ground) -> None:
    async with place.engine() as engine:
        with pytest.raises(UnsupportedError) as refused:
            await seen(engine, SHARED)
        assert refused.value.detail["field"] == "gpu"
