"""What doctor concludes about backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.host import backends_here
from opendsec.host.backends_here import Verdict, uefi, verdicts
from opendsec.linux import probe
from opendsec.model.spec import BackendKind

ALL = {*probe.CONTAINER_NEEDS, "native", "qemu", "vmkernel", "kvm", "uefi", "tpm"}


def of(good: set[str], kind: BackendKind) -> Verdict:
    answers = [probe.Answer(name=name, ok=name in good, sentence="", remedy="") for name in ALL]
    return next(one for one in verdicts(answers) if one.backend is kind)


def test_a_host_that_has_everything() -> None:
    for kind in (BackendKind.CONTAINER, BackendKind.MICROVM, BackendKind.FULLVM, BackendKind.FNCALL):
        assert of(ALL, kind).sentence == "works here"


@pytest.mark.parametrize(
    ("lacking", "kind", "broken"),
    [
        ("vmkernel", BackendKind.MICROVM, ("vmkernel",)),
        ("qemu", BackendKind.FULLVM, ("qemu",)),
        ("native", BackendKind.CONTAINER, ("native",)),
        ("vmkernel", BackendKind.CONTAINER, ()),
        ("native", BackendKind.FULLVM, ()),
    ],
)
def test_what_is_missing_is_named_where_it_counts(lacking: str, kind: BackendKind, broken: tuple[str, ...]) -> None:
    verdict = of(ALL - {lacking}, kind)
    assert verdict.broken == broken
    assert verdict.ok is not bool(broken)
    assert not broken or lacking in verdict.sentence


def test_without_kvm_virtual_machines_are_degraded() -> None:
    for kind in (BackendKind.MICROVM, BackendKind.FULLVM):
        verdict = of(ALL - {"kvm", "tpm"}, kind)
        assert verdict.ok
        assert "emulated" in verdict.sentence
    assert "no TPM" in of(ALL - {"tpm"}, BackendKind.FULLVM).sentence
    assert of(ALL - {"kvm"}, BackendKind.CONTAINER).degraded == ()


def test_programs_and_files_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backends_here, "QEMU_PROGRAMS", ("no-such-qemu",))
    answer = backends_here.qemu()
    assert (answer.ok, answer.sentence) == (False, "the program no-such-qemu is not installed")
    assert answer.remedy == "apt-get install no-such-qemu"
    assert "apt-get install ovmf" in uefi([str(tmp_path / "none")]).remedy
    assert uefi([str(Path(__file__))]).ok
