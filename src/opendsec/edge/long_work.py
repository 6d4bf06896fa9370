"""Work on a sandbox that takes its time and belongs to the node, not to the request that asked for it: where it stands,
how it ended, and who asked for it already.

A client that leaves changes nothing, and the same request with the same idempotency key follows the work or hears its
result again. Whatever goes wrong becomes an outcome: nobody waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from opendsec import errors
from opendsec.edge.sandbox import Sandbox
from opendsec.store.progress import Progress
from opendsec.wire import codec

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
REMEMBERED = 1000
"""Of a kind: as many results can be asked for again."""

R = TypeVar("R")
E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a kind of work is told."""

    noun: str
    """`snapshot`"""
    done: str
    """What the edge did with the sandbox, and the last phase: `saved`."""


class LongWork(Generic[R, E]):
    """One piece of work. `event`: what its followers get, made of phase, done, total, result and error."""

    def __init__(self, sandbox: Sandbox, words: Words, event: Callable[..., E]) -> None:
        self.sandbox = sandbox
        self.result: R | None = None
        self.error: errors.OpenDSecError | None = None
        self.progress = Progress(phase="waiting for its turn")
        self._words = words
        self._event = event
        self._ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether there is an outcome."""
        return self._ended.is_set()

    def tell(self, progress: Progress) -> None:
        """From its thread, too."""
        self.progress = progress

    async def settle(self, working: Coroutine[Any, Any, R]) -> None:
        """Carry it out: how `working` ends is the outcome."""
        done = self._words.done
        try:
            self.result = await working
        except asyncio.CancelledError:
            why = f"the edge was stopped while it {done}; nothing was published"
            self.error = errors.NodeError(why, retryable=True)
            raise
        except errors.OpenDSecError as exc:
            self.error = exc
        except OSError as exc:
            fields = {"sandbox_id": self.sandbox.sandbox_id, "reason": str(exc)}
            log.warning("%s_failed", self._words.noun, extra={"fields": fields})
            self.error = errors.NodeError(f"the sandbox could not be {done}: {exc}")
        finally:
            if self.result is None and self.error is None:  # a fault of ours, which whoever spawned this logs
                self.error = errors.NodeError(f"the edge failed while it {done}; see its log", retryable=False)
            self._ended.set()

    async def wait(self) -> R:
        """Its result. Raises what it failed with."""
        await self._ended.wait()
        if self.error is not None:
            raise codec.error_from_fields(codec.error_fields(self.error))
        assert self.result is not None
        return self.result

    async def follow(self, request_id: str) -> AsyncGenerator[E]:
        """Where it stands about once a second, then how it ended. What fails at once is raised."""
        told = False
        while not await self._ends_within(TELL_EVERY_S):
            told = True
            yield self._event(phase=self.progress.phase, done=self.progress.done, total=self.progress.total)
        if self.error is None or not told:
            yield self._event(phase=self._words.done, result=await self.wait())
            return
        yield self._event(phase="failed", error={**codec.error_fields(self.error), "request_id": request_id})

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class Asked(Protocol):
    """Work that somebody asked for."""

    request: Any


W = TypeVar("W", bound=Asked)


class KnownWork(Generic[W]):
    """The work of one kind that was asked for lately, by sandbox and idempotency key."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._known: OrderedDict[tuple[str, str], W] = OrderedDict()

    def place(self, sandbox: Sandbox, key: str | None) -> tuple[str, str]:
        """Where work of this key is kept; without one, in a place of its own."""
        return sandbox.sandbox_id, secrets.token_hex(8) if key is None else key

    def find(self, place: tuple[str, str], request: object) -> W | None:
        """What was asked for there. Raises ConflictError when that was something else."""
        known = self._known.get(place)
        if known is not None and known.request != request:
            raise errors.ConflictError(
                f"the same idempotency key was used for another {self._noun} of this sandbox",
                remedy="use a new key for a new request",
            )
        return known

    def keep(self, place: tuple[str, str], work: W) -> None:
        """The oldest are forgotten."""
        self._known[place] = work
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self, place: tuple[str, str]) -> None:
        """A repeat is a new try."""
        self._known.pop(place, None)
