"""What an edge can ask of a sandbox that is a whole machine, beside its guest agent: screen, input, serial line."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from opendsec.model.screen import Action, ScreenSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A screenshot."""

    png: bytes
    size: ScreenSize


class Console(ABC):
    """Of one running sandbox. Calls raise SandboxLostError, and NodeError when the VMM does not answer."""

    @abstractmethod
    async def picture(self) -> Picture:
        """What its display shows now."""

    @abstractmethod
    async def act(self, actions: Sequence[Action]) -> None:
        """Do what was checked (`model.screen.check_input`); as `vm.display.act`."""

    @abstractmethod
    def serial_total(self) -> int:
        """Bytes its serial console has said so far."""

    @abstractmethod
    def serial_read(self, offset: int) -> tuple[int, bytes]:
        """(offset of the first byte, bytes) from there on, or from where something is kept."""

    @abstractmethod
    async def serial_changed(self, offset: int, *, timeout_s: float) -> None:
        """Until something lies behind that offset, it has ended, or the time is over."""

    @abstractmethod
    async def serial_write(self, data: bytes) -> None:
        """To its serial console; waits while the guest takes nothing."""

    @abstractmethod
    async def vnc(self) -> socket.socket:
        """A connection of the protocol RFB to its display; any number at once."""
