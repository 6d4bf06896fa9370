"""Meeting the agent inside a machine: greeted again and again, for as long as it may reasonably be on its way.

QEMU knows whether anything inside has the agent's port open. Nobody has while the operating system boots, which may
take long where it is emulated; somebody who has and says nothing is hung, and is waited for much shorter. Time in which
the machine stands still does not count. It refuses to wait for the agent of a machine that is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from opendsec.guest.base import Guest, GuestGoneError, GuestLostError
from opendsec.guest.channel import connect
from opendsec.vm.q35 import Q35Machine

BOOT_S = 900.0
"""For a whole system to boot, emulated and on a busy host."""
SILENT_S = 120.0
"""For an agent that has its port open to say anything, on a busy host."""
GREETING_S, AGAIN_S = 20.0, 0.2
"""How long one greeting is given, and the pause before the next."""
ENDED = "its machine has ended: its operating system switched it off, or QEMU died"


async def meet(machine: Q35Machine, path: Path, *, boot_s: float = BOOT_S, silent_s: float = SILENT_S) -> Guest:
    """The agent at that socket. Raises GuestGoneError, with why it is not waited for any longer; NodeError."""
    work, end = (
        asyncio.ensure_future(_greeted(machine, path, boot_s, silent_s)),
        asyncio.ensure_future(machine.wait_ended()),
    )
    try:
        await asyncio.wait((work, end), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise GuestGoneError(ENDED)
        return work.result()
    finally:
        work.cancel()
        end.cancel()


async def _greeted(machine: Q35Machine, path: Path, boot_s: float, silent_s: float) -> Guest:
    """An agent that is started anew knows nothing of what was said to the one before."""
    waited = silent = 0.0
    while True:
        began = time.monotonic()
        try:
            return await connect(path, min(GREETING_S, boot_s, silent_s))
        except GuestLostError as error:
            last = error
        await asyncio.sleep(AGAIN_S)
        if await machine.is_paused():
            continue
        took = time.monotonic() - began
        waited += took
        silent = silent + took if await machine.agent_is_there() else 0.0
        if silent >= silent_s:
            raise GuestGoneError(f"its guest agent has not answered for {silent:.0f} s, and is there: {last}")
        if waited >= boot_s:
            raise GuestGoneError(f"no guest agent has answered for {waited:.0f} s: its operating system runs none")


async def once(connecting: Coroutine[Any, Any, Guest]) -> Guest:
    """What it gives, or GuestLostError after one greeting: the caller asks for many, and asks again."""
    try:
        async with asyncio.timeout(GREETING_S):
            return await connecting
    except TimeoutError:
        raise GuestLostError(f"the guest agent did not answer within {GREETING_S:g} s") from None
