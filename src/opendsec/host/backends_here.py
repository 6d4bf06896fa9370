"""Which backends this host has, and why not, for `opendsec doctor`. What each needs is looked at here, as far as it is
no part of the container probes; what follows from the answers is pure.

KVM is tried, not believed: a device node that opens may lead to an interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opendsec.errors import HostCapabilityError
from opendsec.linux import probe
from opendsec.model.spec import BackendKind
from opendsec.store.programs import find_program
from opendsec.vm.kvm import Kvm, usable_kvm
from opendsec.vm.q35_line import UEFI_CODE, UEFI_VARIABLES

QEMU_PROGRAMS = ("qemu-system-x86_64", "qemu-img")
_CONTAINER = (*probe.CONTAINER_NEEDS, "native")
_NEEDS: dict[BackendKind, tuple[str, ...]] = {
    BackendKind.CONTAINER: _CONTAINER,
    BackendKind.MICROVM: ("root", "native", "cgroup", "qemu", "vmkernel"),
    BackendKind.FULLVM: ("root", "cgroup", "qemu"),
    BackendKind.FNCALL: _CONTAINER,
}
"""Answers a backend cannot do without."""
_LACKS: dict[BackendKind, tuple[tuple[str, str], ...]] = {
    BackendKind.MICROVM: (("kvm", "guests are emulated, 5 to 30 times slower"),),
    BackendKind.FULLVM: (
        ("kvm", "guests are emulated, 5 to 30 times slower"),
        ("uefi", "disks that start with UEFI cannot be started"),
        ("tpm", "machines have no TPM"),
    ),
}
"""Answers it can do without, and what it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a backend works here."""

    backend: BackendKind
    broken: tuple[str, ...]
    """Names of the answers that forbid it."""
    degraded: tuple[str, ...]
    """What works, and not as it should."""

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def sentence(self) -> str:
        """For people."""
        if self.broken:
            return f"does not work here: {', '.join(self.broken)}"
        return "works here" + (f", degraded: {'; '.join(self.degraded)}" if self.degraded else "")


def verdicts(answers: Iterable[probe.Answer]) -> tuple[Verdict, ...]:
    """One for each backend. Pure; an answer that is missing forbids what needs it."""
    good = {answer.name for answer in answers if answer.ok}
    return tuple(
        Verdict(
            backend=kind,
            broken=tuple(dict.fromkeys(name for name in needs if name not in good)),
            degraded=tuple(cost for name, cost in _LACKS.get(kind, ()) if name not in good),
        )
        for kind, needs in _NEEDS.items()
    )


def vm_answers(state_dir: Path) -> list[probe.Answer]:
    """KVM, QEMU, UEFI firmware and TPM of this host."""
    return [kvm(state_dir), qemu(), uefi(), tpm()]


def kvm(state_dir: Path) -> probe.Answer:
    """Does KVM run guests at the processor's speed?"""
    remembered = state_dir / "kvm.json"
    found = usable_kvm(remembered if state_dir.is_dir() else None)
    return probe.Answer(name="kvm", ok=found.kvm is Kvm.HARDWARE, sentence=found.sentence, remedy=found.remedy)


def qemu() -> probe.Answer:
    """Are QEMU's programs there?"""
    return _programs("qemu", QEMU_PROGRAMS, "QEMU is installed")


def tpm() -> probe.Answer:
    """Can machines be given a TPM?"""
    return _programs("tpm", ("swtpm",), "swtpm is installed: machines may have a TPM")


def uefi(files: Sequence[str] = (UEFI_CODE, UEFI_VARIABLES)) -> probe.Answer:
    """Is there firmware for disks that start with UEFI?"""
    missing = [file for file in files if not Path(file).is_file()]
    if missing:
        sentence = f"no UEFI firmware: {', '.join(missing)} is missing"
        return probe.Answer(name="uefi", ok=False, sentence=sentence, remedy="apt-get install ovmf")
    return probe.Answer(name="uefi", ok=True, sentence="UEFI firmware (OVMF) is installed")


def _programs(name: str, programs: Sequence[str], good: str) -> probe.Answer:
    try:
        for program in programs:
            find_program(program)
    except HostCapabilityError as error:
        return probe.Answer(name=name, ok=False, sentence=error.message, remedy=error.remedy)
    return probe.Answer(name=name, ok=True, sentence=good)
