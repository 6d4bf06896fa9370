"""What no two machines may share, renewed in a guest that goes on from a snapshot before anybody else gets at it.

Its wall clock is set to this host's, and fresh randomness is put into its kernel, which is told to use it at once (by
perl, which every Debian has; a guest without perl takes it up within a minute). Host name, addresses and machine id
stay as they were: a whole operating system has its own ways of changing them, and its network is nobody else's. An
agent that is init does all of it by itself, and needs no program of the guest's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time

from opendsec.errors import StartError
from opendsec.guest.base import Exit, Guest, GuestError, GuestLostError, Output, StartCommand
from opendsec.guest.machine import Identity

log = logging.getLogger(__name__)

AWAKE_S = 20.0
LAST_COMMAND = 2**31 - 1
"""Ids from here downwards are never an edge's: it counts from 1."""
_TIMEOUT_MS = 60_000
_SCRIPT = """
date -u -s "@$1" >/dev/null
cat >/dev/urandom
if command -v perl >/dev/null; then
  perl -e 'open(my $f, ">", "/dev/urandom") or die; ioctl($f, 0x5207, 0) or die "RNDRESEEDCRNG: $!"'
fi
"""


async def renew(guest: Guest, *, is_new: bool = False) -> None:
    """`is_new`: it was copied from another sandbox. Raises StartError when the guest cannot do it, GuestLostError."""
    try:
        if guest.is_machine:
            await guest.renew(Identity(host_name="", generation=secrets.token_hex(16), is_new=is_new))
        else:
            await _run_script(guest)
    except GuestError as error:
        raise StartError(f"the guest's clock and randomness could not be renewed: {error}") from error


async def renew_awake(guest: Guest) -> None:
    """After a pause, in which its clock stood still too. A guest that cannot is no worse for it, and one that is lost
    shows by itself."""
    try:
        async with asyncio.timeout(AWAKE_S):
            await renew(guest)
    except (StartError, GuestLostError, TimeoutError) as error:
        log.warning("guest_clock_not_set", extra={"fields": {"reason": str(error) or "it took too long"}})


async def _run_script(guest: Guest) -> None:
    number = LAST_COMMAND - secrets.randbelow(2**20)  # the agent remembers those of the machine it was saved in
    argv = ("/bin/sh", "-ec", _SCRIPT, "renew", f"{time.time():.6f}")
    command = StartCommand(argv=argv, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, stdin=True, timeout_ms=_TIMEOUT_MS)
    await guest.start(number, command)
    await guest.write_stdin(number, 0, os.urandom(64), eof=True)
    said = b""
    async for event in guest.events(number):
        if isinstance(event, Exit):
            if event.exit_code != 0:
                words = said.decode("utf-8", "replace").strip()[-300:]
                raise StartError(f"the guest's clock and randomness could not be renewed: {words or event}")
        elif isinstance(event, Output):
            said += event.data
    guest.release(number)
