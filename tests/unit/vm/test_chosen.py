"""Which VMM a node takes, by what KVM is and what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.edge.settings import read_settings
from opendsec.errors import HostCapabilityError, InvalidSpecError
from opendsec.guest.base import GuestLostError
from opendsec.vm import chosen
from opendsec.vm.base import Place, Rates, Vmm, WantedVmm
from opendsec.vm.chosen import UNLIMITED, ChosenVmm
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_start import Programs
from opendsec.vm.kvm import Kvm, KvmAnswer
from opendsec.vm.qemu import QemuVmm

PROGRAMS = Programs(firecracker=Path("/f"), jailer=Path("/j"))


@pytest.mark.parametrize(
    ("wanted", "kvm", "installed", "kind", "degraded"),
    [
        (WantedVmm.AUTO, Kvm.HARDWARE, True, FirecrackerVmm, ""),
        (WantedVmm.AUTO, Kvm.HARDWARE, False, QemuVmm, "opendsec firecracker install"),
        (WantedVmm.AUTO, Kvm.INTERPRETED, True, QemuVmm, ""),
        (WantedVmm.AUTO, Kvm.NONE, True, QemuVmm, ""),
        (WantedVmm.QEMU, Kvm.HARDWARE, True, QemuVmm, ""),
        (WantedVmm.FIRECRACKER, Kvm.HARDWARE, True, FirecrackerVmm, ""),
        (WantedVmm.FIRECRACKER, Kvm.INTERPRETED, True, FirecrackerVmm, ""),
    ],
)
def test_the_vmm_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, wanted: WantedVmm, kvm: Kvm, installed: bool, kind: type, degraded: str
) -> None:
    choice, reason = _choose(monkeypatch, wanted, kvm, installed=installed)
    assert type(choice) is kind
    assert degraded in reason
    assert bool(degraded) == bool(reason)


@pytest.mark.parametrize(("kvm", "installed"), [(Kvm.NONE, True), (Kvm.HARDWARE, False)])
def test_who_names_firecracker_gets_nothing_else(monkeypatch: pytest.MonkeyPatch, kvm: Kvm, installed: bool) -> None:
    with pytest.raises(HostCapabilityError) as caught:
        _choose(monkeypatch, WantedVmm.FIRECRACKER, kvm, installed=installed)
    assert caught.value.remedy


def test_the_setting() -> None:
    assert read_settings({}).vmm is WantedVmm.AUTO
    assert read_settings({"OPENDSEC_EDGE_VMM": "qemu"}).vmm is WantedVmm.QEMU
    with pytest.raises(InvalidSpecError, match="OPENDSEC_EDGE_VMM"):
        read_settings({"OPENDSEC_EDGE_VMM": "xen"})


def test_the_rates() -> None:
    assert read_settings({}).vm_rates == Rates()
    said = {f"OPENDSEC_EDGE_VM_{name}": "3" for name in ("DISK_MB", "DISK_OPERATIONS", "NETWORK_MB")}
    assert read_settings(said).vm_rates == Rates(disk_bytes=3 << 20, disk_operations=3, network_bytes=3 << 20)
    with pytest.raises(InvalidSpecError, match="OPENDSEC_EDGE_VM_DISK_MB"):
        read_settings({"OPENDSEC_EDGE_VM_DISK_MB": "fast"})


async def _no_version(_: FirecrackerVmm) -> str:
    raise HostCapabilityError("there is no /dev/userfaultfd", remedy="boot another kernel")


@pytest.mark.anyio
async def test_firecracker_that_does_not_open_is_a_reason_and_no_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[QemuVmm] = []

    async def open_qemu(vmm: QemuVmm) -> None:
        opened.append(vmm)

    monkeypatch.setattr(FirecrackerVmm, "open", _no_version)
    monkeypatch.setattr(QemuVmm, "open", open_qemu)
    monkeypatch.setattr(chosen, "find_programs", lambda _: PROGRAMS)
    monkeypatch.setattr(chosen, "usable_kvm", lambda _: KvmAnswer(kvm=Kvm.HARDWARE, sentence="so it is"))
    vmm = ChosenVmm(state_dir=tmp_path, run_dir=tmp_path)
    await vmm.open()
    assert [vmm.vmm] == opened
    assert "no /dev/userfaultfd; boot another kernel" in vmm.degraded
    assert UNLIMITED not in vmm.degraded
    limited = ChosenVmm(state_dir=tmp_path, run_dir=tmp_path, rates=Rates(disk_operations=1))
    await limited.open()
    assert UNLIMITED in limited.degraded
    with pytest.raises(HostCapabilityError, match="userfaultfd"):
        await ChosenVmm(state_dir=tmp_path, run_dir=tmp_path, wanted=WantedVmm.FIRECRACKER).open()
    # A machine of the other one's is not taken for gone.
    place = Place(directory=tmp_path)
    assert await vmm.find(place) is None
    (tmp_path / "vm.json").write_text("{}")
    with pytest.raises(GuestLostError, match="another VMM"):
        await vmm.find(place)


@pytest.mark.anyio
async def test_a_machine_of_qemu_is_found_by_a_node_that_has_firecracker_by_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def nothing(_: Vmm) -> None:
        return

    async def found(vmm: Vmm, _: Place) -> str | None:
        return type(vmm).__name__ if isinstance(vmm, QemuVmm) else None

    for kind in (FirecrackerVmm, QemuVmm):
        monkeypatch.setattr(kind, "open", nothing)
        monkeypatch.setattr(kind, "find", found)
    monkeypatch.setattr(chosen, "find_programs", lambda _: PROGRAMS)
    monkeypatch.setattr(chosen, "usable_kvm", lambda _: KvmAnswer(kvm=Kvm.HARDWARE, sentence="so it is"))
    vmm = ChosenVmm(state_dir=tmp_path, run_dir=tmp_path)
    await vmm.open()
    assert isinstance(vmm.vmm, FirecrackerVmm)
    assert await vmm.find(Place(directory=tmp_path)) is None
    (tmp_path / "vmm.json").write_text("{}")
    assert str(await vmm.find(Place(directory=tmp_path))) == "QemuVmm"


def _choose(monkeypatch: pytest.MonkeyPatch, wanted: WantedVmm, kvm: Kvm, *, installed: bool) -> tuple[object, str]:
    def find(_: Path) -> Programs:
        if not installed:
            raise HostCapabilityError("Firecracker is not installed", remedy="opendsec firecracker install")
        return PROGRAMS

    monkeypatch.setattr(chosen, "find_programs", find)
    monkeypatch.setattr(chosen, "usable_kvm", lambda _: KvmAnswer(kvm=kvm, sentence="so it is", remedy="change it"))
    return ChosenVmm(state_dir=Path("/s"), run_dir=Path("/r"), wanted=wanted)._choose()
