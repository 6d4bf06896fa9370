"""Which VMM runs the microVMs of this node: Firecracker where KVM runs guests at the processor's speed and it is
installed and opens, else QEMU; or the one that is named. Decided once, by `open`; what the other one saved is refused
by name, and machines that still run under it are found and go on under it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from opendsec.errors import HostCapabilityError
from opendsec.guest.base import GuestLostError
from opendsec.vm.base import NO_RATES, Binding, Drive, MachineSpec, Place, Rates, Vm, Vmm, WantedVmm
from opendsec.vm.firecracker import FirecrackerVmm
from opendsec.vm.firecracker_install import INSTALL, find_programs
from opendsec.vm.firecracker_machine import RECORD as FIRECRACKER_RECORD
from opendsec.vm.kvm import Kvm, KvmAnswer, usable_kvm
from opendsec.vm.qemu import QemuVmm
from opendsec.vm.qemu_machine import RECORD as QEMU_RECORD

REMEMBERED = "kvm.json"
UNLIMITED = "QEMU does not keep the node's limits of disk and network rates"


class ChosenVmm(Vmm):
    """`state_dir` is the platform's on this host (programs, what is known of KVM), `run_dir` the edge's own.
    Firecracker keeps the `rates`, QEMU does not, and says so (`degraded`).
    """

    def __init__(
        self, *, state_dir: Path, run_dir: Path, wanted: WantedVmm = WantedVmm.AUTO, rates: Rates = NO_RATES
    ) -> None:
        self._state_dir = state_dir
        self._run_dir = run_dir
        self._wanted = wanted
        self._rates = rates
        self._chosen: Vmm | None = None
        self._other: Vmm | None = None

    @property
    def vmm(self) -> Vmm:
        """The one it is; after `open`."""
        if self._chosen is None:
            raise RuntimeError("the VMM is not open")
        return self._chosen

    @property
    def binding(self) -> Binding:
        return self.vmm.binding

    async def open(self) -> None:
        chosen, reason = await asyncio.to_thread(self._choose)
        try:
            await chosen.open()
        except HostCapabilityError as error:
            if self._wanted is not WantedVmm.AUTO or isinstance(chosen, QemuVmm):
                raise
            chosen, reason = self._qemu(), _instead(error)
            await chosen.open()
        self._chosen = chosen
        self.most_drives = chosen.most_drives
        unlimited = UNLIMITED if isinstance(chosen, QemuVmm) and self._rates != NO_RATES else ""
        self.degraded = "; ".join(part for part in (chosen.degraded, reason, unlimited) if part)

    def _choose(self) -> tuple[Vmm, str]:
        """The driver, and what would be better about another. Blocking. Raises HostCapabilityError."""
        if self._wanted is WantedVmm.QEMU:
            return self._qemu(), ""
        answer = usable_kvm(self._state_dir / REMEMBERED)
        if self._wanted is WantedVmm.FIRECRACKER:
            _must_open(answer)
            return self._firecracker(), ""
        if answer.kvm is not Kvm.HARDWARE:
            return self._qemu(), ""
        try:
            return self._firecracker(), ""
        except HostCapabilityError as error:
            return self._qemu(), _instead(error)

    def _qemu(self) -> QemuVmm:
        return QemuVmm(state_dir=self._state_dir)

    def _firecracker(self) -> FirecrackerVmm:
        programs = find_programs(self._state_dir)
        return FirecrackerVmm(programs=programs, run_dir=self._run_dir, rates=self._rates)

    def command_line(self) -> str:
        return self.vmm.command_line()

    def serial_of(self, drive: Drive) -> str:
        return self.vmm.serial_of(drive)

    async def boot(self, spec: MachineSpec, place: Place) -> Vm:
        return await self.vmm.boot(spec, place)

    async def restore(self, saved: Path, spec: MachineSpec, place: Place, *, paused: bool = False) -> Vm:
        return await self.vmm.restore(saved, spec, place, paused=paused)

    async def find(self, place: Place) -> Vm | None:
        found = await self.vmm.find(place)
        if found is None and (place.directory / (QEMU_RECORD, FIRECRACKER_RECORD)[self._is_qemu]).exists():
            return await (await self._opened_other()).find(place)
        return found

    @property
    def _is_qemu(self) -> bool:
        return isinstance(self.vmm, QemuVmm)

    async def _opened_other(self) -> Vmm:
        """The driver of machines that were started before this one was chosen. Raises GuestLostError: they live, and
        cannot be reached.
        """
        if self._other is None:
            try:
                other = await asyncio.to_thread(self._firecracker) if self._is_qemu else self._qemu()
                await other.open()
            except HostCapabilityError as error:
                raise GuestLostError(f"it was started under another VMM, which does not open now: {error}") from error
            self._other = other
        return self._other

    async def close(self) -> None:
        for vmm in (self._chosen, self._other):
            if vmm is not None:
                await vmm.close()


def _instead(error: HostCapabilityError) -> str:
    return f"QEMU runs the machines, which cost more than Firecracker's: {error.message}; {error.remedy or INSTALL}"


def _must_open(answer: KvmAnswer) -> None:
    """Whoever names Firecracker gets it wherever KVM opens, for guests that need no operating system as well."""
    if answer.kvm is Kvm.NONE:
        raise HostCapabilityError(answer.sentence, detail={"probe": "kvm"}, remedy=answer.remedy)
