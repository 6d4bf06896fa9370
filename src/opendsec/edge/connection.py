"""The connection of one sandbox to its guest agent: kept, taken up again when it is lost, and asked for anew after a
restart of the edge.

A guest is lost when it is gone, or ends connections again and again; one that is only silent after a restart has time
(`REACH_S`). Of those not more than a few dozen are asked at once, over and over and each time for longer, so that
hundreds of silent ones hold up neither the edge nor those that answer. Refuses to take the end of a connection for a
failure while the sandbox is parked or ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from opendsec import errors
from opendsec.backends.base import Backend, Capability, Handle, Running
from opendsec.edge import lifecycle
from opendsec.edge.lifecycle import Life
from opendsec.guest.base import Guest, GuestError, GuestGoneError, GuestLostError
from opendsec.model.ids import SandboxId
from opendsec.model.node import SandboxEnd, SandboxState

log = logging.getLogger(__name__)

PING_EVERY_S = 30.0
PING_ANSWER_S = 60.0
"""A busy machine may keep a guest waiting for long; one that is silent for so long is taken for lost."""
RECONNECTS = 20
RECONNECT_TRIES = 3
"""Of one reconnect; a backend waits long for an answer each time."""
RECONNECT_PAUSE_S = 0.5
"""After each, for what fails at once."""
RECONNECT_WINDOW_S = 10.0
"""More reconnects within this window mean that the guest cannot be talked to."""
ASK_AT_ONCE = 64
"""Guests of an earlier edge asked at the same time."""
ASK_FIRST_S = 10.0
ASK_MOST_S = 60.0
"""A question is given ASK_FIRST_S, the next one twice as long, and so on to ASK_MOST_S."""
REACH_S = 900.0
"""How long one that a new edge found alive may keep silent from the first question on: whole systems boot in that time,
emulated."""
REACH_PAUSE_S = 2.0
AT_ONCE_S = 5.0
"""Who ends a connection so soon after it was made is not slow: RECONNECT_TRIES of them, and the guest is lost."""
MET_S = 60.0
"""How long an operation waits for a guest that has not answered a restarted edge yet."""
_STANDS_STILL = frozenset({SandboxState.PAUSING, SandboxState.PAUSED, SandboxState.RESUMING})
NO_GUEST = "the sandbox has no guest agent yet"


class Around(Protocol):
    """What a sandbox offers its connection."""

    sandbox_id: SandboxId
    backend: Backend
    handle: Handle | None
    life: Life

    def apply(self, event: lifecycle.Event) -> None: ...

    async def changed(self) -> None:
        """Until its life is another, or `wake` was called."""

    def wake(self) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None: ...

    def why_lost(self) -> tuple[SandboxEnd, str]: ...


class Connection:
    """See the module. `asking` is shared by all sandboxes of an edge."""

    def __init__(self, around: Around, asking: asyncio.Semaphore) -> None:
        self._around = around
        self._asking = asking
        self._turn = asyncio.Lock()
        self._reconnects: list[float] = []
        self._reaching = False
        self._gone = ""
        """What is gone, in the backend's words."""
        self.present: Guest | None = None

    @property
    def guest(self) -> Guest:
        """The present one. Raises ConflictError before there is one."""
        if self.present is None:
            raise errors.ConflictError(NO_GUEST, sandbox_id=self._around.sandbox_id)
        return self.present

    def met(self, guest: Guest) -> None:
        """This is the connection from now on."""
        self.present = guest
        self._around.spawn(self._watch(guest), "guest")

    async def settled(self) -> None:
        """While a restarted edge has not met it. Raises SandboxLostError, which may be tried again."""
        try:
            async with asyncio.timeout(MET_S):
                while self._reaching and self._around.life.end_reason is None:
                    await self._around.changed()
        except TimeoutError:
            raise errors.SandboxLostError(
                "the guest agent has not answered the restarted edge yet",
                sandbox_id=self._around.sandbox_id,
                retryable=True,
                remedy="try again: it is asked again and again",
            ) from None

    # ── while it runs ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch(self, guest: Guest) -> None:
        while not await _closed_within(guest, PING_EVERY_S):
            if self._may_answer() and self._around.life.busy and not await self._answers(guest):
                log.warning("guest_silent", extra={"fields": {"sandbox_id": self._around.sandbox_id}})
                await guest.aclose()
        await self.reconnected(guest)

    async def _answers(self, guest: Guest) -> bool:
        """Whether a guest that has work still speaks: a connection that is silent for ever would hold up everybody
        who waits for that work. A paused one is excused, and one that stands still to be packed.
        """
        try:
            async with asyncio.timeout(PING_ANSWER_S):
                await guest.ping()
        except TimeoutError:
            return not self._may_answer()
        except (GuestLostError, GuestError):
            return True  # the end of the connection is seen by itself
        return True

    def _may_answer(self) -> bool:
        life = self._around.life
        return life.state is SandboxState.RUNNING and not life.packing

    def _wanted(self) -> bool:
        """One that was never met while it is paused is met when it is resumed."""
        if self.present is None and self._around.life.state in _STANDS_STILL:
            return False
        return lifecycle.connection_wanted(self._around.life, parks=self._around.backend.parks)

    # ── when it was lost ────────────────────────────────────────────────────────────────────────────────────────────

    async def reconnected(self, lost: Guest | None) -> Guest | None:
        """A connection that is not `lost`, once the sandbox is not parked; None when it is ending, which it does when
        there is no other.
        """
        around = self._around
        while around.life.end_reason is None and around.handle is not None:
            async with self._turn:
                if self._wanted():
                    guest = await self._another(lost, around.handle)
                    if guest is not None:
                        return guest
            await self._not_parked()
        return None

    async def meet_again(self, handle: Handle) -> None:
        """The connection of one that was resumed: a new one when it was parked, the first when it was never met.
        Raises SandboxLostError.
        """
        self._reconnects.clear()  # no fault of the guest's
        guest = await self._reconnect(handle)
        if guest is None:
            raise errors.SandboxLostError("its guest agent does not answer after it was resumed")
        self.met(guest)

    async def _not_parked(self) -> None:
        """Until a connection is wanted again, or it is ending."""
        while self._around.life.end_reason is None and not self._wanted():
            await self._around.changed()

    async def _another(self, lost: Guest | None, handle: Handle) -> Guest | None:
        """None: the sandbox is ending or being parked."""
        if self.present is not None and self.present is not lost and not self.present.closed:
            return self.present
        then = self._around.life
        guest = await self._reconnect(handle)
        if guest is None:
            if not lifecycle.parked_since(self._around.life, then, parks=self._around.backend.parks):
                self._perish()
            return None
        self.met(guest)
        return guest

    async def _reconnect(self, handle: Handle) -> Guest | None:
        around, now = self._around, time.monotonic()
        self._reconnects = [at for at in self._reconnects if now - at < RECONNECT_WINDOW_S] + [now]
        if len(self._reconnects) > RECONNECTS:
            return None
        failures, then = 0, around.life
        while failures < RECONNECT_TRIES and around.life.end_reason is None and around.life.pauses == then.pauses:
            try:
                return await around.backend.reconnect(handle)
            except GuestGoneError as exc:
                self._gone = str(exc)
                return None
            except (errors.OpenDSecError, OSError, GuestLostError, GuestError) as exc:
                failures += not is_our_own_want(exc)
                log.warning("reconnect_failed", extra={"fields": {"sandbox_id": around.sandbox_id, "reason": str(exc)}})
            await asyncio.sleep(RECONNECT_PAUSE_S)
        return None

    def _perish(self, detail: str = "") -> None:
        reason, told = (SandboxEnd.GUEST_LOST, detail) if detail else self._around.why_lost()
        if reason is SandboxEnd.GUEST_LOST:
            told = self._gone or told
        self._around.apply(lifecycle.Perished(time.monotonic(), reason, told))

    # ── after a restart of the edge ─────────────────────────────────────────────────────────────────────────────────

    def reach(self, handle: Handle) -> None:
        """It lives, and has not answered yet: go on asking, beside everything else. Commands wait for it."""
        self._reaching = True
        self._around.spawn(self._reach(handle), "reach")

    async def _reach(self, handle: Handle) -> None:
        try:
            async with self._turn:
                await self._ask_again_and_again(handle)
        finally:
            self._reaching = False
            self._around.wake()

    async def _ask_again_and_again(self, handle: Handle) -> None:
        until, wrong, patience_s = 0.0, 0, ASK_FIRST_S
        while self._wanted():
            async with self._asking:
                begun, then = time.monotonic(), self._around.life
                until = until or begun + REACH_S
                why = await self._asked(handle, patience_s)
                if why is None:
                    return
                ended_at_once = isinstance(why, GuestLostError) and time.monotonic() < begun + AT_ONCE_S
            wrong += ended_at_once
            too_late = wrong >= RECONNECT_TRIES or time.monotonic() > until
            if too_late and self._around.life.pauses == then.pauses and not is_our_own_want(why):
                self._perish(f"it did not answer the restarted edge: {why}")
                return
            patience_s = min(2 * patience_s, ASK_MOST_S)
            await asyncio.sleep(REACH_PAUSE_S)

    async def _asked(self, handle: Handle, patience_s: float) -> Exception | None:
        """Why it is to be asked again; None: it is not."""
        try:
            async with asyncio.timeout(patience_s):
                if await self._reached(handle):
                    return None
            why: Exception = errors.ConflictError("it was parked, and is being woken")
        except (errors.OpenDSecError, OSError, GuestError, GuestLostError) as exc:
            # asyncio's own TimeoutError says nothing
            why = exc if str(exc) else TimeoutError(f"nothing was heard within {patience_s:g} s")
        log.warning("not_reached", extra={"fields": {"sandbox_id": self._around.sandbox_id, "reason": str(why)}})
        return why

    async def _reached(self, handle: Handle) -> bool:
        """Whether there is nothing more to ask for. Raises what the backend does."""
        backend = self._around.backend
        if not backend.parks and Capability.PAUSE in backend.capabilities and self._may_answer():
            await backend.resume(handle)  # an edge that died within a pack has left it standing still
        found = await backend.recover(handle)
        if isinstance(found, Running):
            self.met(found.guest)
            return True
        if found is None:
            self._perish()
            return True
        if self._may_answer():
            await backend.resume(handle)  # nobody was told that it was paused
        return False


def is_our_own_want(error: Exception) -> bool:
    """Whether it says something of this process (no descriptors, no memory), and nothing of a sandbox."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


async def _closed_within(guest: Guest, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await guest.wait_closed()
            return True
    return False
