"""Freezing by a command of the guest's: one that ends before its word, or says nothing, leaves a disk not whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from opendsec.backends import fullvm_stillness
from opendsec.backends.fullvm_stillness import quiet
from opendsec.guest.base import CommandEvent, Exit, Guest, StartCommand
from opendsec.guest.running import Running

pytestmark = pytest.mark.anyio


class Freezing:
    """As much of a guest as is asked; its command says `words`, and ends at once, or when its input does."""

    is_machine = False

    def __init__(self, words: bytes, *, ends: bool) -> None:
        self.words, self.ends = words, ends
        self.running = Running()
        self.released = False

    async def start(self, _: int, __: StartCommand) -> None:
        if self.words:
            self.running.on_output(1, memoryview(bytes(8) + self.words))
        if self.ends:
            self._end()

    def events(self, _: int) -> AsyncIterator[CommandEvent]:
        return self.running.events()

    async def write_stdin(self, _: int, __: int, ___: bytes, *, eof: bool) -> None:
        assert eof
        self._end()

    def release(self, _: int) -> None:
        self.released = True

    def _end(self) -> None:
        self.running.on_exit(Exit(exit_code=1, stdout_total=len(self.words)))


@pytest.mark.parametrize(
    ("words", "ends", "whole"),
    [(b"whole\n", False, True), (b"partly\n", False, False), (b"killed", True, False), (b"", True, False)],
)
async def test_how_a_freeze_ends(words: bytes, ends: bool, whole: bool) -> None:
    guest = Freezing(words, ends=ends)
    async with quiet(cast("Guest", guest)) as found:
        assert found is whole
    assert guest.released


async def test_a_guest_that_says_nothing_in_time_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fullvm_stillness, "ANSWER_S", 0.05)
    guest = Freezing(b"", ends=False)
    async with quiet(cast("Guest", guest)) as found:
        assert found is False
    assert guest.released, "its input has ended, and so has it"
