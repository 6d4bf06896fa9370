"""Which container gets which GPU, and what the driver's words mean."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from opendsec.errors import CapacityError, HostCapabilityError, InvalidSpecError, UnsupportedError
from opendsec.fncall.gpu import GpuDesk, GpuInstance, GpuInventory
from opendsec.fncall.gpu_inventory import parse_list, read_cdi, read_simulated, with_nodes
from opendsec.model.fncall import GpuMode, GpuRequest

SHARED, EXCLUSIVE = GpuRequest(mode=GpuMode.SHARED), GpuRequest(mode=GpuMode.EXCLUSIVE)


def instance(uuid: str, profile: str = "1g.10gb", memory_mb: int = 10_240) -> GpuInstance:
    return GpuInstance(uuid=uuid, profile=profile, memory_mb=memory_mb)


def desk(*instances: GpuInstance, shared_most: int = 2) -> GpuDesk:
    return GpuDesk(GpuInventory(instances=instances, simulated=True), shared_most=shared_most)


def test_shared_holders_fill_one_before_the_next_is_begun() -> None:
    table = desk(instance("a"), instance("b"), instance("c"))
    taken = [table.take(SHARED, holder=str(n)).instance.uuid for n in range(3)]
    assert taken == ["a", "a", "b"]
    assert table.take(EXCLUSIVE, holder="alone").instance.uuid == "c"
    assert table.take(SHARED, holder="3").instance.uuid == "b"
    with pytest.raises(CapacityError) as full:
        table.take(SHARED, holder="4")
    assert full.value.detail["field"] == "gpu"
    table.release("alone")
    assert table.take(SHARED, holder="4").instance.uuid == "c"


def test_an_exclusive_holder_is_alone_for_its_life() -> None:
    table = desk(instance("a"))
    held = table.take(EXCLUSIVE, holder="one")
    assert table.take(EXCLUSIVE, holder="one") is held
    for request in (SHARED, EXCLUSIVE):
        with pytest.raises(CapacityError):
            table.take(request, holder="two")
    table.release("one")
    table.release("one")
    table.release("never")
    shared = table.take(SHARED, holder="two")
    with pytest.raises(CapacityError):
        table.take(EXCLUSIVE, holder="three")
    assert shared.env["CUDA_VISIBLE_DEVICES"] == "a"


def test_a_profile_is_kept_and_what_is_not_there_is_refused_by_name() -> None:
    table = desk(instance("small"), instance("large", "3g.40gb", 40_960))
    wanted = GpuRequest(mode=GpuMode.EXCLUSIVE, profile="3g.40gb")
    assert table.take(wanted, holder="one").instance.uuid == "large"
    assert table.take(EXCLUSIVE, holder="two").instance.uuid == "small"
    with pytest.raises(UnsupportedError) as refused:
        table.take(GpuRequest(profile="7g.80gb"), holder="three")
    assert refused.value.detail["field"] == "gpu"
    assert "1g.10gb, 3g.40gb" in refused.value.remedy
    with pytest.raises(UnsupportedError):
        desk().take(SHARED, holder="x")


def test_any_profile_takes_the_smallest() -> None:
    assert desk(instance("z", memory_mb=5), instance("a", memory_mb=9)).take(EXCLUSIVE, holder="x").instance.uuid == "z"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_nobody_shares_with_an_exclusive_holder(seed: int) -> None:
    chance = random.Random(seed)
    table = desk(*(instance(f"i{n}", chance.choice(["1g.10gb", "2g.20gb"])) for n in range(5)), shared_most=3)
    holders: list[str] = []
    for step in range(400):
        if holders and chance.random() < 0.45:
            table.release(holders.pop(chance.randrange(len(holders))))
        else:
            request = GpuRequest(mode=chance.choice(list(GpuMode)), profile=chance.choice(["", "1g.10gb"]))
            try:
                table.take(request, holder=str(step))
            except CapacityError:
                continue
            except UnsupportedError:
                assert "1g.10gb" not in {one.profile for one in table.inventory.instances}
                continue
            holders.append(str(step))
        by_instance: dict[str, list[GpuMode]] = {}
        for lease in table.leases:
            by_instance.setdefault(lease.instance.uuid, []).append(lease.mode)
        for modes in by_instance.values():
            assert modes == [GpuMode.EXCLUSIVE] or (set(modes) == {GpuMode.SHARED} and len(modes) <= 3)
        assert {lease.holder for lease in table.leases} == set(holders)


LISTED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.40gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-8d0a2f3e-1111-2222-3333-444455556666)
"""


def test_the_driver_s_list() -> None:
    found = parse_list(LISTED)
    assert [(one.profile, one.memory_mb) for one in found] == [("1g.10gb", 10_240), ("3g.40gb", 40_960), ("", 0)]
    assert found[0].uuid == "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
    assert {one.name for one in found} == {"NVIDIA A100-SXM4-80GB"}
    assert parse_list("No devices were found\n") == ()


def test_nodes_and_libraries_come_from_cdi(tmp_path: Path) -> None:
    whole = GpuInstance(uuid="GPU-1")
    with pytest.raises(HostCapabilityError) as missing:
        with_nodes([whole], read_cdi([tmp_path, tmp_path / "none"]))
    assert "nvidia-ctk cdi generate" in missing.value.remedy
    (tmp_path / "a.json").write_text(
        """{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
            "devices": [{"name": "GPU-1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
            "containerEdits": {"deviceNodes": [{"path": "/dev/nvidiactl"}],
              "mounts": [{"hostPath": "/usr/lib/x/libcuda.so.1", "containerPath": "/usr/lib/x/libcuda.so.1"}]}}"""
    )
    (tmp_path / "b.json").write_text('{"kind": "vendor.com/other", "devices": [{"name": "GPU-1"}]}')
    (one,) = with_nodes([whole], read_cdi([tmp_path]))
    assert one.devices == ("/dev/nvidiactl", "/dev/nvidia0")
    assert one.mounts == (("/usr/lib/x/libcuda.so.1", "/usr/lib/x/libcuda.so.1"),)
    assert one.env == {"LD_LIBRARY_PATH": "/usr/lib/x"}
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(HostCapabilityError):
        read_cdi([tmp_path])


def test_an_inventory_that_is_made_up_says_so(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text('{"instances": [{"uuid": "MIG-x", "profile": "1g.10gb", "memory_mb": 10240}]}')
    inventory = read_simulated(path)
    assert inventory.simulated
    assert inventory.instances[0].devices == ()
    assert GpuDesk(inventory).take(EXCLUSIVE, holder="x").env["GPU_SIMULATED"] == "1"
    for text in ("", "{", '{"instances": [{}]}', '{"instances": [{"uuid": "a", "speed": 1}]}'):
        path.write_text(text)
        with pytest.raises(InvalidSpecError) as refused:
            read_simulated(path)
        assert refused.value.detail["field"] == "OPENDSEC_GPU_INVENTORY"
    with pytest.raises(InvalidSpecError):
        desk(instance("a"), instance("a"))
