"""The leak check notices what it is there for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from tests import leaks
from tests.leaks import Belongings, left_behind


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SETTLE_S", 0.0)


def open_pipe() -> Callable[[], None]:
    ends = os.pipe()

    def close() -> None:
        for end in ends:
            os.close(end)

    return close


def start_child() -> Callable[[], None]:
    child = subprocess.Popen(["sleep", "60"])

    def end() -> None:
        child.kill()
        child.wait(60)

    return end


@pytest.mark.parametrize(("make", "named"), [(open_pipe, "descriptors: "), (start_child, "children: ")])
def test_what_is_left_is_named_until_it_is_gone(make: Callable[[], Callable[[], None]], named: str) -> None:
    before = Belongings.of_process()
    remove = make()
    try:
        left = left_behind(before, Belongings.of_process)
        assert any(line.startswith(named) for line in left)
    finally:
        remove()
    assert left_behind(before, Belongings.of_process) == []


def test_nothing_is_left_when_nothing_was_made() -> None:
    assert left_behind(Belongings.of_machine(), Belongings) == []


def test_a_child_that_had_no_command_yet_was_there() -> None:
    before = Belongings(children=frozenset({"17 (zombie)"}))
    now = Belongings(children=frozenset({"17 qemu-system-x86_64 -accel tcg", "18 sleep 60"}))
    assert now.beyond(before) == ["children: 18 sleep 60"]
