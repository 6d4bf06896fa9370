"""Bytes of a long piece of work as steps of a progress bar of 100."""

from __future__ import annotations

from typing import Protocol

from opendsec.cli.output import Advance


class Event(Protocol):
    """What a long answer tells on its way."""

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int | None: ...


class Percent:
    """Give `show` every event."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._shown = 0

    def show(self, event: Event) -> None:
        """Never backwards, when another phase counts anew."""
        percent = 100 * event.done // event.total if event.total else 0
        self._advance(max(0, percent - self._shown))
        self._shown = max(self._shown, percent)
