"""The order and the last words of doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from opendsec.host import doctor
from opendsec.linux import probe


def answer(name: str, *, ok: bool) -> probe.Answer:
    return probe.Answer(name=name, ok=ok, sentence=f"{name} is so", remedy="" if ok else "do this")


def test_the_summary_names_what_decides_and_else_what_would_add_something() -> None:
    some = [answer("userns", ok=True), answer("kvm", ok=False)]
    assert doctor.summary(some[:1], []) == "Container sandboxes can run here."
    assert doctor.summary(some, []).endswith("would add a feature, a backend or density: kvm.")
    assert doctor.summary(some, ["native"]).endswith("put right: native.")


def test_the_summary_stands_last_after_the_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENDSEC_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("OPENDSEC_STORE", raising=False)
    monkeypatch.setattr(probe, "probe_all", lambda **_: [answer("userns", ok=True)])
    for name in ("native_programs", "guest_kernel", "firecracker"):
        monkeypatch.setattr(doctor, name, lambda name=name: answer(name, ok=False))
    monkeypatch.setattr(doctor, "vm_answers", lambda _: [])
    with pytest.raises(typer.Exit):
        doctor.doctor(as_json=False)
    shown = capsys.readouterr().out
    assert shown.index("userns is so") < shown.index("Backends:") < shown.index("Container sandboxes can run here.")
