"""A full VM that runs: its machine, its console, and the connection to its agent; and what is done with all three."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from opendsec.backends.fullvm_console import MachineConsole
from opendsec.backends.fullvm_guest import SilentGuest
from opendsec.backends.fullvm_meeting import meet
from opendsec.backends.fullvm_ports import dial_forwarded
from opendsec.backends.fullvm_renewal import renew_awake
from opendsec.errors import SandboxLostError
from opendsec.guest.base import Guest, GuestStream
from opendsec.vm.q35 import AGENT_SOCKET, Q35Machine


@dataclass(slots=True, kw_only=True)
class Live:
    """One."""

    machine: Q35Machine
    console: MachineConsole
    agent: bool
    guest: Guest | None = None
    forwarded: set[int] = field(default_factory=set)

    async def met(self, run: Path) -> Guest:
        """A new connection to its agent, by its sockets in `run`; without one, what stands for it. Raises as `meet`."""
        if self.guest is not None:
            await self.guest.aclose()  # the port takes one connection after the other
            self.guest = None
        self.guest = await meet(self.machine, run / AGENT_SOCKET) if self.agent else self._silent()
        return self.guest

    def _silent(self) -> Guest:
        async def dial(port: int) -> GuestStream:
            return await dial_forwarded(self.machine, self.forwarded, port)

        return SilentGuest(self.machine.wait_ended, dial)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """An agent that stands still cannot greet: a paused machine goes on for these milliseconds."""
        async with self.machine.turn(timeout_s=None):
            paused = self.agent and await self.machine.is_paused()
            if paused:
                await self.machine.resume()
            try:
                yield
            finally:
                if paused:
                    with contextlib.suppress(SandboxLostError):
                        await self.machine.pause()

    async def set_clock(self) -> None:
        """Of one that may have stood still, and goes on."""
        guest = self.guest
        if guest is not None and guest.is_machine and not guest.closed and not await self.machine.is_paused():
            await renew_awake(guest)

    async def switch_off(self, grace_s: float) -> None:
        """Nobody hears the power button where our agent is the only init."""
        if self.guest is not None and self.guest.is_machine and not self.guest.closed:
            await self.guest.shutdown(round(grace_s * 1000))
        else:
            await self.machine.press_power()
