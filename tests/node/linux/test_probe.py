"""Probes answer without raising, leave nothing, and say what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.linux.probe import CONTAINER_NEEDS, Remembered, names, probe, probe_all

pytestmark = pytest.mark.root


def test_every_question_has_an_answer_and_leaves_nothing(tmp_path: Path) -> None:
    answers = probe_all(state_dir=tmp_path / "not" / "there")
    assert [answer.name for answer in answers] == list(names())
    assert all(answer.sentence for answer in answers)
    assert not [answer for answer in answers if answer.ok and answer.remedy]
    assert list(tmp_path.iterdir()) == []
    assert set(CONTAINER_NEEDS) <= set(names())


def test_a_yes_is_remembered_and_a_no_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "run" / "probed"
    assert Remembered(kept, state_dir=tmp_path).probe("root").ok
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not probe("root").ok
    assert Remembered(kept, state_dir=tmp_path).probe("root").ok
    kept.unlink()
    for _ in range(2):
        assert not Remembered(kept, state_dir=tmp_path).probe("root").ok


def test_an_unknown_question_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        probe("no such thing")


@pytest.mark.erofs
def test_erofs_cannot_lie_on_tmpfs() -> None:
    shm = Path("/dev/shm")
    before = set(os.listdir(shm))
    answer = probe("erofs", state_dir=shm)
    assert not answer.ok
    assert "ext4" in answer.remedy
    assert set(os.listdir(shm)) == before


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_kwargs: None)
    answer = probe("nft")
    assert (answer.ok, answer.remedy) == (False, "apt-get install nftables")


def test_an_old_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.1.0-13-amd64")
    answer = probe("kernel")
    assert not answer.ok
    assert "6.12" in answer.remedy


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe("root").remedy == "run it as root"


@pytest.mark.fanotify
def test_nobody_is_asked_on_tmpfs() -> None:
    answer = probe("fanotify", state_dir=Path("/dev/shm"))
    assert not answer.ok
    assert "ext4" in answer.remedy
