"""What saved machines are bound to tells hosts apart that hide different features of one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.vm import firecracker_saved, processor

CPU = "processor\t: {number}\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nstepping\t: 1\nflags\t\t: {flags}\n\n"


def test_features_count_and_the_number_of_processors_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(*flags: str) -> str:
        info = tmp_path / "cpuinfo"
        info.write_text("".join(CPU.format(number=number, flags=each) for number, each in enumerate(flags)))
        monkeypatch.setattr(processor, "_CPU_INFO", info)
        return firecracker_saved.binding_of("1.12.1").cpu_model

    assert bound("fpu avx512f") == bound("fpu avx512f", "fpu avx512f")
    assert bound("fpu avx512f") != bound("fpu")
    assert bound("fpu").startswith("GenuineIntel Xeon 1 flags ")
