"""What is asked of an agent that is init of a virtual machine: one call each."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opendsec.guest import protocol
from opendsec.guest.calls import Call
from opendsec.guest.files import Chunks
from opendsec.guest.machine import GuestSetup, GuestUsage, Identity
from opendsec.guest.machine_fields import ENTROPY_BYTES, encode_identity, encode_setup
from opendsec.guest.protocol import pack_fields

_SOON_S, _MOST_TRIES = 0.1, 3
"""The clock is late by the way there: a guest that is slow at first is told once more."""


class MachineCalls(ABC):
    """Mixed into Channel."""

    _usage: GuestUsage | None = None

    @abstractmethod
    def _call(self, frame_type: int, fields: bytes) -> Call: ...

    @property
    def usage(self) -> GuestUsage | None:
        return self._usage

    async def setup(self, setup: GuestSetup) -> None:
        fields = encode_setup(setup, clock_ns=time.time_ns(), entropy=os.urandom(ENTROPY_BYTES))
        await self._answered_call(protocol.SETUP, fields)

    async def renew(self, identity: Identity) -> None:
        for _ in range(_MOST_TRIES):
            began = time.monotonic()
            fields = encode_identity(identity, clock_ns=time.time_ns(), entropy=os.urandom(ENTROPY_BYTES))
            await self._answered_call(protocol.RENEW, fields)
            if time.monotonic() - began < _SOON_S:
                return

    async def _answered_call(self, frame_type: int, fields: bytes) -> None:
        with self._call(frame_type, fields) as call:
            await call.answer()
            call.done()

    def pack_upper(self) -> AsyncIterator[bytes]:
        fields = pack_fields([(protocol.T_OP, "pack_upper"), (protocol.T_PATH, "/")])
        return Chunks(self._call(protocol.FS, fields))

    @asynccontextmanager
    async def frozen(self, *, timeout_ms: int = 30_000) -> AsyncIterator[None]:
        fields = pack_fields([(protocol.T_OP, "freeze"), (protocol.T_PATH, "/"), (protocol.T_LENGTH, timeout_ms)])
        with self._call(protocol.FS, fields) as call:
            await call.answer()
            yield
            call.write_eof()
            while await call.read():
                pass
            call.done()
