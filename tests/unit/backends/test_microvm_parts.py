"""Templates (one makes, all wait, the oldest go) and the shape of machines, without a machine."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from opendsec.backends.microvm import _refer
from opendsec.backends.microvm_machines import Machines, in_turn
from opendsec.backends.microvm_shape import DATA_LABEL, Boot, Shape, identity, limits_of, shape_of, template_key
from opendsec.backends.microvm_templates import MACHINE, Templates
from opendsec.errors import InvalidSpecError, StartError
from opendsec.model.image import Image, ImageConfig
from opendsec.model.spec import Resources, SandboxSpec
from opendsec.store.loading.base import LayerFiles
from opendsec.vm.base import Accelerator, Binding, Vmm

pytestmark = pytest.mark.anyio
IMAGE = Image(name="i", digest="sha256:0", layers=(), config=ImageConfig(), created_at=0)
BOOT = Boot(kernel=Path("/k"), kernel_digest="1", initrd=Path("/i-1"), command_line="quiet")
BINDING = Binding(vmm="qemu", version="7", accelerator=Accelerator.TCG, cpu_model="max")


class Maker:
    """Counts; makes files of so many bytes, or fails."""

    def __init__(self, *, size: int = 10, error: Exception | None = None) -> None:
        self.size, self.error, self.count = size, error, 0
        self.go = asyncio.Event()

    async def __call__(self, work: Path) -> None:
        self.count += 1
        (work / "half").write_bytes(bytes(self.size))
        await self.go.wait()
        if self.error is not None:
            raise self.error


async def test_all_wait_for_the_one_who_makes_it(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    templates.open()
    make = Maker()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(templates.get("k", make)) for _ in range(5)]
        await asyncio.sleep(0)
        make.go.set()
    assert {task.result() for task in tasks} == {tmp_path / "k"}
    assert make.count == 1


class Made(Machines):
    """Its machines are files."""

    boot = BOOT
    count = 0

    async def _make(self, work: Path, image: Image, shape: Shape, layers: Sequence[LayerFiles]) -> None:
        self.count += 1
        (work / MACHINE).mkdir()
        for path in (work / MACHINE / "memory", *(work / disk for disk in shape.disks)):
            path.write_bytes(b"whole")


@pytest.mark.timeout(60)
async def test_a_template_that_lacks_a_disk_is_made_anew(tmp_path: Path) -> None:
    vmm = cast("Vmm", SimpleNamespace(binding=BINDING))
    made = Made(vmm, state_dir=tmp_path, run_dir=tmp_path, kernels=tmp_path)
    made._templates.open()
    shape = shape_of(SandboxSpec(image="i"), IMAGE)
    for name in ("first", "second"):
        base = tmp_path / name / "base"
        base.mkdir(parents=True)
        await made.take(IMAGE, shape, (), base)
        assert (base / "memory").read_bytes() == b"whole"
        assert [(base.parent / disk).read_bytes() for disk in shape.disks] == [b"whole"] * len(shape.disks)
        (template,) = (tmp_path / "microvm/templates").iterdir()
        (template / shape.disks[-1]).unlink()
    assert made.count == 2


async def test_what_is_discarded_meanwhile_fails_no_other(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    templates.open()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # it has a name, and no stat(2)
    make = Maker()
    make.go.set()
    assert await templates.get("k", make) == tmp_path / "k"


async def test_a_failure_is_everybodys_and_the_next_tries_again(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    templates.open()
    make = Maker(error=StartError("no"))
    make.go.set()
    found = await asyncio.gather(*(templates.get("k", make) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in found] == ["no"] * 3
    assert len({id(error) for error in found}) == 3  # each will bear the name of another sandbox
    assert make.count == 1
    assert list(tmp_path.iterdir()) == []
    make.error = None
    await templates.get("k", make)
    assert make.count == 2


async def test_its_bytes_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(fd: int) -> None:
        assert not (tmp_path / "k").exists()
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    templates = Templates(tmp_path)
    templates.open()
    make = Maker()
    make.go.set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        patched.setattr("opendsec.backends.microvm_templates.sync_directory", lambda path: synced.append(path.name))
        await templates.get("k", make)
    assert synced[0] == "half"
    assert synced[1].startswith(".new-")
    assert synced[2] == tmp_path.name


async def test_who_is_cancelled_leaves_it_to_the_next(tmp_path: Path) -> None:
    templates = Templates(tmp_path)
    templates.open()
    make = Maker()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(templates.get("k", make))
        await asyncio.sleep(0)
        second = group.create_task(templates.get("k", make))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait((first,))
        make.go.set()
    assert second.result() == tmp_path / "k"
    assert (make.count, [path.name for path in tmp_path.iterdir()]) == (2, ["k"])


async def test_half_made_ones_go_at_the_next_open(tmp_path: Path) -> None:
    (tmp_path / ".new-1/machine").mkdir(parents=True)
    (tmp_path / "whole").mkdir()
    templates = Templates(tmp_path)
    templates.open()
    assert templates.names() == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize(("most", "most_bytes"), [(2, 1 << 40), (100, 30_000)])
async def test_the_least_recently_used_go(tmp_path: Path, most: int, most_bytes: int) -> None:
    templates = Templates(tmp_path, most=most, most_bytes=most_bytes)
    templates.open()
    make = Maker(size=9000)
    make.go.set()
    for number, key in enumerate(("a", "b", "c", "d")):
        path = await templates.get(key, make)
        os.utime(path, (number, number))
        if key != "a":
            os.utime(await templates.get("a", make), (number + 10, number + 10))
    assert "d" in templates.names()
    assert "a" in templates.names()
    assert len(templates.names()) == 2
    await templates.discard("a")
    assert templates.names() == ["d"]


def test_shapes() -> None:
    shape = shape_of(SandboxSpec(image="i"), IMAGE)
    assert (shape.memory_mib, shape.cpus, shape.pids, shape.online) == (256, 1, 1024, False)
    asked = Resources(memory_limit_mb=300, cpu_cores_limit=1.5, disk_limit_mb=64, pids_limit=None)
    spec = SandboxSpec(image="i", resources=asked, network_rules={"*": True})
    shape = shape_of(spec, IMAGE)
    assert (shape.memory_mib, shape.cpus, shape.disk_mib, shape.pids, shape.online) == (300, 2, 64, 0, True)
    limits = limits_of(spec, shape, Accelerator.KVM)
    assert (limits.memory_bytes, limits.cpu_cores, limits.pids) == (396 << 20, 1.5, None)


@pytest.mark.parametrize(
    ("resources", "field"),
    [(Resources(memory_limit_mb=127), "memory_limit_mb"), (Resources(cpu_cores_limit=33), "cpu_cores_limit")],
)
def test_what_no_machine_can_have(resources: Resources, field: str) -> None:
    with pytest.raises(InvalidSpecError, match=field):
        shape_of(SandboxSpec(image="i", resources=resources), IMAGE)


def test_an_image_may_ask_for_a_disk_of_its_own() -> None:
    labelled = replace(IMAGE, config=ImageConfig(labels={DATA_LABEL: "/var/lib/docker"}))
    shape = shape_of(SandboxSpec(image="i"), labelled)
    assert (shape.data_disk, shape.disks) == ("/var/lib/docker", ("disk.img", "data.img"))
    with pytest.raises(InvalidSpecError, match=DATA_LABEL):
        shape_of(SandboxSpec(image="i"), replace(IMAGE, config=ImageConfig(labels={DATA_LABEL: "relative"})))


def test_a_template_is_never_wrong() -> None:
    shape = shape_of(SandboxSpec(image="i"), IMAGE)
    keys = {
        template_key(IMAGE, shape, BOOT, BINDING),
        template_key(IMAGE, replace(shape, memory_mib=512), BOOT, BINDING),
        template_key(IMAGE, replace(shape, online=True), BOOT, BINDING),
        template_key(IMAGE, shape, replace(BOOT, kernel_digest="2"), BINDING),
        template_key(IMAGE, shape, replace(BOOT, initrd=Path("/i-2")), BINDING),
        template_key(IMAGE, shape, BOOT, replace(BINDING, version="8")),
        template_key(IMAGE, shape, BOOT, replace(BINDING, cpu_model="other")),
    }
    assert len(keys) == 7
    assert template_key(IMAGE, shape, BOOT, BINDING) in keys


def test_identities() -> None:
    one = identity(token=bytes(range(32)), inner=None, host=None, resolvers=("10.0.0.1",))
    assert (one.address, one.gateway, one.resolvers, one.mac) == ("", "", (), "")
    assert (one.machine_id, one.generation) == (bytes(range(16)).hex(), bytes(range(16, 32)).hex())


def test_ids_are_taken_in_turn() -> None:
    numbers = range(70_000, 70_016)
    taken = in_turn(numbers)
    assert sorted(next(taken) for _ in numbers) == list(numbers)
    again = [next(taken) for _ in numbers]
    assert sorted(again) == list(numbers)


def test_what_is_referred_to_is_linked_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, base = tmp_path / "machine", tmp_path / "base"
    for directory in (machine, base):
        directory.mkdir()
    for name in ("devices", "memory"):
        (machine / name).write_text(name)
    _refer(machine, base)
    assert {path.name: path.stat().st_nlink for path in base.iterdir()} == {"devices": 2, "memory": 2}

    far = tmp_path / "far"
    far.mkdir()

    def link(old: Path, new: Path) -> None:
        if old.name == "memory":
            raise OSError(errno.EXDEV, "another file system")
        real(old, new)

    real = os.link
    monkeypatch.setattr(os, "link", link)
    _refer(machine, far)
    assert far.is_symlink()
    assert (far / "memory").read_text() == "memory"
