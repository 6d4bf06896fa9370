"""The file systems of a guest made whole on its disk, and kept so for a moment, while the disk is copied.

An agent that is init does it by itself. One that is a program among others runs a shell that freezes (`fsfreeze`, as
every Debian has it) all that is mounted from a disk to be written, the last mounted first, until its input ends, or
until a minute of the guest's time is over: a host that dies leaves nobody frozen for ever. Where that cannot be done
the disk is as after a power cut, and whoever asked is told.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from opendsec.backends.fullvm_renewal import LAST_COMMAND
from opendsec.guest.base import Exit, Guest, GuestError, GuestLostError, Output, StartCommand

log = logging.getLogger(__name__)

MOST_S = 60
"""Of the guest's own time, which stands still while its machine does."""
ANSWER_S = 30.0
_WHOLE, _PARTLY = b"whole\n", b"partly\n"
_SCRIPT = r"""
held= seen=' ' places= said=whole
thaw() { for one in $held; do fsfreeze --unfreeze "$(printf %b "$one")"; done; held=; }
trap thaw EXIT
trap 'exit 1' HUP INT TERM
sync
while read -r device place kind options rest; do
  case $device in /dev/*) ;; *) continue ;; esac
  case ,$options, in *,ro,*) continue ;; esac
  case $seen in *" $device "*) continue ;; esac
  seen="$seen$device " places="$place $places"
done </proc/mounts
for one in $places; do
  if fsfreeze --freeze "$(printf %b "$one")"; then held="$one $held"; else said=partly; fi
done
echo $said
timeout "$1" cat >/dev/null
"""


@asynccontextmanager
async def quiet(guest: Guest) -> AsyncIterator[bool]:
    """True: all its file systems are whole on the disk and stay so for the block. Not all of them: False. Its machine
    is to stand still meanwhile."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(ANSWER_S):
                freezing = guest.frozen(timeout_ms=MOST_S * 1000) if guest.is_machine else _frozen(guest)
                whole = await stack.enter_async_context(freezing)
        except (GuestError, GuestLostError, TimeoutError) as error:
            log.warning("guest_not_frozen", extra={"fields": {"reason": str(error) or "it took too long"}})
            yield False
            return
        try:
            yield whole is not False
        finally:
            try:
                await stack.aclose()
            except (GuestError, GuestLostError) as error:  # it thaws by itself, and a lost connection shows by itself
                log.warning("guest_not_thawed", extra={"fields": {"reason": str(error)}})


@asynccontextmanager
async def _frozen(guest: Guest) -> AsyncIterator[bool]:
    """By a command of the guest's. Raises GuestError, GuestLostError."""
    number = LAST_COMMAND - secrets.randbelow(2**20)
    argv = ("/bin/sh", "-c", _SCRIPT, "freeze", str(MOST_S))
    await guest.start(number, StartCommand(argv=argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdin=True))
    ended = False
    try:
        said = await _said(guest, number)
        ended = not said.endswith((_WHOLE, _PARTLY))
        if ended:
            guest.release(number)
            words = said.decode("utf-8", "replace").strip()[-300:]
            raise GuestError("failed", f"the file systems could not be frozen: {words}")
        yield said.endswith(_WHOLE)
    finally:
        if not ended:
            await _thaw(guest, number)


async def _said(guest: Guest, number: int) -> bytes:
    """Up to the word that says how it went; without one the command has ended."""
    said = b""
    async for event in guest.events(number):
        if isinstance(event, Output):
            said += event.data
            if said.endswith((_WHOLE, _PARTLY)):
                break
    return said


async def _thaw(guest: Guest, number: int) -> None:
    """Its input ends, and so does the command: a slow one soon, or in its minute."""
    await guest.write_stdin(number, 0, b"", eof=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            async for event in guest.events(number):
                if isinstance(event, Exit):
                    guest.release(number)
