"""The speed probe of KVM on this host, whatever it has: each verdict, and what is remembered of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from opendsec.vm import kvm
from opendsec.vm.kvm import Kvm, usable_kvm

pytestmark = [pytest.mark.root]


def test_no_device_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kvm, "DEVICE", tmp_path / "kvm")
    answer = usable_kvm(tmp_path / "remembered")
    assert answer.kvm is Kvm.NONE
    assert "kvm_intel" in answer.remedy
    assert not (tmp_path / "remembered").exists()


@pytest.mark.kvm
def test_a_device_one_may_not_open_is_none() -> None:
    os.seteuid(65534)
    try:
        answer = usable_kvm()
    finally:
        os.seteuid(0)
    assert answer.kvm is Kvm.NONE
    assert "may not be used" in answer.sentence
    assert "root" in answer.remedy


def test_a_device_that_is_no_kvm_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "DEVICE", Path("/dev/null"))
    answer = usable_kvm()
    assert answer.kvm is Kvm.NONE
    assert "does not make a machine" in answer.sentence


@pytest.mark.kvm
def test_the_guest_counts_to_its_end_and_the_time_it_took_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "ITERATIONS", 40)
    assert usable_kvm().kvm is Kvm.HARDWARE, "40 rounds are few for an interpreter too"
    monkeypatch.setattr(kvm, "MOST_S", 0.0)
    assert usable_kvm().kvm is Kvm.INTERPRETED


@pytest.mark.kvm
def test_a_guest_that_does_something_else_is_not_taken_for_one_that_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm, "_LOOP", bytes.fromhex("0f0b"))  # ud2, without a handler: the guest shuts down
    answer = usable_kvm()
    assert answer.kvm is Kvm.INTERPRETED
    assert "gave up" in answer.sentence


@pytest.mark.kvm
def test_an_answer_lasts_until_the_next_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "remembered"
    first = usable_kvm(kept)
    monkeypatch.setattr(kvm, "DEVICE", tmp_path / "gone")
    assert usable_kvm(kept) == first
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"boot_id": "another"}))
    assert usable_kvm(kept).kvm is Kvm.NONE
    kept.write_text("{")
    assert usable_kvm(kept).kvm is Kvm.NONE
