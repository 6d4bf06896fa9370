"""The life of one sandbox as a pure state machine: events in, instructions out. No clock, no I/O; time is part of
every event.

    creating ──▶ running ⇄ (pausing ▶ paused ▶ resuming)
        └─ any ──▶ stopping ──▶ stopped | failed

What it promises:

* Delete is valid in every state, idempotent, and wins every race: what was under way (start, pause, resume) is
cancelled and, once it
  has settled one way or the other, everything is removed. An event that comes late changes nothing any more.
* The first end reason stays. `stopped` is the end a user or a time limit asked for, `failed` the one nobody asked for.
* Idle time does not pass while anything is in progress (`busy`), nor while the sandbox is creating or paused; it
starts anew after each operation.
* A sandbox whose backend parks has no connection from the moment it is told to pause until it runs again; that the
connection ends meanwhile is no failure (`connection_wanted`, `parked_since`).
* The hard limit counts from creation, whatever happens; a pack under way is let finish, so nothing is half packed.

Times are seconds of one monotonic clock, chosen by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from opendsec.errors import ConflictError, SandboxExitedError
from opendsec.model.node import SandboxEnd, SandboxState
from opendsec.model.spec import Lifetime

ENDED_STATES = frozenset({SandboxState.STOPPED, SandboxState.FAILED})
_ASKED_FOR = frozenset({SandboxEnd.STOPPED, SandboxEnd.EXPIRED_IDLE, SandboxEnd.EXPIRED_MAX, SandboxEnd.EVICTED})


class Pending(StrEnum):
    """What the shell is doing with the backend right now."""

    NOTHING = "nothing"
    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Everything the decisions depend on."""

    lifetime: Lifetime
    created_at: float
    used_at: float
    """When the last operation began or ended."""
    state: SandboxState = SandboxState.CREATING
    pending: Pending = Pending.START
    busy: int = 0
    """Commands and other operations in progress."""
    packing: int = 0
    """Packs and snapshots in progress: it may run or be paused meanwhile."""
    pauses: int = 0
    """How often it was told to pause."""
    end_reason: SandboxEnd | None = None
    end_detail: str = ""
    ended_at: float | None = None


# Events: what happened. `at` is when.


@dataclass(frozen=True, slots=True)
class Event:
    at: float


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The backend's start has returned."""


@dataclass(frozen=True, slots=True)
class StartFailed(Event):
    """The backend's start has failed or was cancelled."""

    detail: str


@dataclass(frozen=True, slots=True)
class WorkBegun(Event):
    """A command or another operation begins. Refused unless the sandbox is running."""


@dataclass(frozen=True, slots=True)
class WorkEnded(Event):
    """It is over."""


@dataclass(frozen=True, slots=True)
class PackBegun(Event):
    """What it has written is about to be packed. Refused unless the sandbox is running or paused."""


@dataclass(frozen=True, slots=True)
class PackEnded(Event):
    """It is packed, or could not be."""


@dataclass(frozen=True, slots=True)
class Used(Event):
    """Somebody took what a command had written, or asked for one again. Never refused."""


@dataclass(frozen=True, slots=True)
class PauseRequested(Event):
    pass


@dataclass(frozen=True, slots=True)
class Paused(Event):
    pass


@dataclass(frozen=True, slots=True)
class PauseFailed(Event):
    """The sandbox goes on running."""


@dataclass(frozen=True, slots=True)
class ResumeRequested(Event):
    """By name, or because somebody wants to work with a paused sandbox."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    pass


@dataclass(frozen=True, slots=True)
class ResumeFailed(Event):
    """A sandbox that can not be resumed is lost."""

    detail: str


@dataclass(frozen=True, slots=True)
class LifetimeChanged(Event):
    lifetime: Lifetime


@dataclass(frozen=True, slots=True)
class DeleteRequested(Event):
    pass


@dataclass(frozen=True, slots=True)
class Perished(Event):
    """It came to an end by itself, or the platform must end it."""

    reason: SandboxEnd
    detail: str


@dataclass(frozen=True, slots=True)
class TimePassed(Event):
    """Look at the limits."""


@dataclass(frozen=True, slots=True)
class Removed(Event):
    """Nothing of it is left on the backend."""


# Instructions: what the shell does next.


class Instruction(StrEnum):
    CANCEL_PENDING = "cancel_pending"
    """Cancel the start, pause or resume under way; its settling event follows in any case."""
    PAUSE = "pause"
    RESUME = "resume"
    RECORD_ENDING = "record_ending"
    """Journal reason and detail: after a restart the removal is taken up again."""
    REMOVE = "remove"
    """Stop and destroy on the backend; then Removed."""
    RECORD_ENDED = "record_ended"


Step = tuple[Life, tuple[Instruction, ...]]


def begin(lifetime: Lifetime, at: float) -> Life:
    """A sandbox whose start is about to be made."""
    return Life(lifetime=lifetime, created_at=at, used_at=at)


def adopt(lifetime: Lifetime, created_at: float, at: float, *, paused: bool = False) -> Life:
    """A sandbox found after a restart; its idle time begins anew."""
    state = SandboxState.PAUSED if paused else SandboxState.RUNNING
    return Life(lifetime=lifetime, created_at=created_at, used_at=at, state=state, pending=Pending.NOTHING)


def ended(life: Life, reason: SandboxEnd, detail: str, at: float) -> Life:
    """A sandbox that had ended before a restart."""
    state = SandboxState.STOPPED if reason in _ASKED_FOR else SandboxState.FAILED
    return replace(life, state=state, pending=Pending.NOTHING, end_reason=reason, end_detail=detail, ended_at=at)


def idle_expires_at(life: Life) -> float | None:
    """When the idle limit ends it if nothing happens, or None while idle time does not pass."""
    limit = life.lifetime.ttl_running_stop
    if limit is None or life.busy or life.packing or life.state is not SandboxState.RUNNING:
        return None
    return life.used_at + limit


def max_expires_at(life: Life) -> float | None:
    """When the hard limit ends it."""
    limit = life.lifetime.ttl_max_stop
    return None if limit is None else life.created_at + limit


def deadline(life: Life) -> float | None:
    """The earlier of both limits; None when there is none, or it is ending already."""
    if life.state is SandboxState.STOPPING or life.state in ENDED_STATES or life.packing:
        return None
    limits = [at for at in (idle_expires_at(life), max_expires_at(life)) if at is not None]
    return min(limits) if limits else None


def connection_wanted(life: Life, *, parks: bool) -> bool:
    """Whether a lost connection is to be replaced now. One that parks has none before it runs again, which brings a
    new one; one that is ending needs none.
    """
    if _ending(life):
        return False
    return not parks or life.state in (SandboxState.CREATING, SandboxState.RUNNING)


def parked_since(life: Life, then: Life, *, parks: bool) -> bool:
    """Whether what failed between `then` and now may have failed because the sandbox was parked, and says nothing of
    it.
    """
    return parks and (life.pauses != then.pauses or not connection_wanted(then, parks=True))


def step(life: Life, event: Event) -> Step:
    """What follows from an event.

    Requests the state forbids raise: SandboxExitedError once it is ending, ConflictError otherwise. Facts never
    raise; late ones are ignored.
    """
    return _RULES[type(event)](life, event)


def _ending(life: Life) -> bool:
    return life.state is SandboxState.STOPPING or life.state in ENDED_STATES


def _end(life: Life, reason: SandboxEnd, detail: str) -> Step:
    if _ending(life):
        return life, ()
    settling = life.pending is not Pending.NOTHING
    then = replace(
        life,
        state=SandboxState.STOPPING,
        end_reason=reason,
        end_detail=detail,
        pending=life.pending if settling else Pending.REMOVE,
    )
    return then, (Instruction.RECORD_ENDING, Instruction.CANCEL_PENDING if settling else Instruction.REMOVE)


def _settled(life: Life, expected: Pending) -> Step | None:
    """The common part of all 'it is over' events: late ones are dropped, those of an ending sandbox lead to its
    removal.
    """
    if life.pending is not expected:
        return life, ()
    if life.state is SandboxState.STOPPING:
        return replace(life, pending=Pending.REMOVE), (Instruction.REMOVE,)
    return None


def refuse_unless_running(life: Life) -> None:
    """Raise what a request gets that needs a running sandbox."""
    if _ending(life):
        reason = life.end_reason.value if life.end_reason is not None else ""
        raise SandboxExitedError(
            f"the sandbox has ended: {reason}" + (f" ({life.end_detail})" if life.end_detail else ""),
            detail={"end_reason": reason},
            remedy="start another sandbox",
        )
    if life.state is not SandboxState.RUNNING:
        raise ConflictError(f"the sandbox is {life.state.value}", detail={"state": life.state.value})


def _started(life: Life, event: Started) -> Step:
    late = _settled(life, Pending.START)
    if late is not None:
        return late
    return replace(life, state=SandboxState.RUNNING, pending=Pending.NOTHING, used_at=event.at), ()


def _start_failed(life: Life, event: StartFailed) -> Step:
    late = _settled(life, Pending.START)
    if late is not None:
        return late
    return _end(replace(life, pending=Pending.NOTHING), SandboxEnd.START_FAILED, event.detail)


def _work_begun(life: Life, event: WorkBegun) -> Step:
    refuse_unless_running(life)
    return replace(life, busy=life.busy + 1, used_at=event.at), ()


def _work_ended(life: Life, event: WorkEnded) -> Step:
    return replace(life, busy=max(0, life.busy - 1), used_at=event.at), ()


def _pack_begun(life: Life, event: PackBegun) -> Step:
    if life.state is not SandboxState.PAUSED:
        refuse_unless_running(life)
    return replace(life, packing=life.packing + 1, used_at=event.at), ()


def _pack_ended(life: Life, event: PackEnded) -> Step:
    return replace(life, packing=max(0, life.packing - 1), used_at=event.at), ()


def _used(life: Life, event: Used) -> Step:
    return replace(life, used_at=event.at), ()


def _pause_requested(life: Life, event: PauseRequested) -> Step:
    if life.state in (SandboxState.PAUSING, SandboxState.PAUSED):
        return life, ()
    refuse_unless_running(life)
    then = replace(life, state=SandboxState.PAUSING, pending=Pending.PAUSE, pauses=life.pauses + 1)
    return then, (Instruction.PAUSE,)


def _paused(life: Life, event: Paused) -> Step:
    late = _settled(life, Pending.PAUSE)
    return late if late is not None else (replace(life, state=SandboxState.PAUSED, pending=Pending.NOTHING), ())


def _pause_failed(life: Life, event: PauseFailed) -> Step:
    late = _settled(life, Pending.PAUSE)
    if late is not None:
        return late
    return replace(life, state=SandboxState.RUNNING, pending=Pending.NOTHING, used_at=event.at), ()


def _resume_requested(life: Life, event: ResumeRequested) -> Step:
    if life.state in (SandboxState.RUNNING, SandboxState.RESUMING):
        return life, ()
    if life.state is SandboxState.PAUSED:
        return replace(life, state=SandboxState.RESUMING, pending=Pending.RESUME), (Instruction.RESUME,)
    refuse_unless_running(life)
    return life, ()


def _resumed(life: Life, event: Resumed) -> Step:
    late = _settled(life, Pending.RESUME)
    if late is not None:
        return late
    return replace(life, state=SandboxState.RUNNING, pending=Pending.NOTHING, used_at=event.at), ()


def _resume_failed(life: Life, event: ResumeFailed) -> Step:
    late = _settled(life, Pending.RESUME)
    if late is not None:
        return late
    return _end(replace(life, pending=Pending.NOTHING), SandboxEnd.GUEST_LOST, event.detail)


def _lifetime_changed(life: Life, event: LifetimeChanged) -> Step:
    if _ending(life):
        refuse_unless_running(life)
    return replace(life, lifetime=event.lifetime, used_at=event.at), ()


def _delete_requested(life: Life, event: DeleteRequested) -> Step:
    return _end(life, SandboxEnd.STOPPED, "")


def _perished(life: Life, event: Perished) -> Step:
    return _end(life, event.reason, event.detail)


def _time_passed(life: Life, event: TimePassed) -> Step:
    if life.packing:
        return life, ()
    hard, idle = max_expires_at(life), idle_expires_at(life)
    if hard is not None and event.at >= hard:
        return _end(life, SandboxEnd.EXPIRED_MAX, f"lived for {life.lifetime.ttl_max_stop:g} s")
    if idle is not None and event.at >= idle:
        return _end(life, SandboxEnd.EXPIRED_IDLE, f"idle for {life.lifetime.ttl_running_stop:g} s")
    return life, ()


def _removed(life: Life, event: Removed) -> Step:
    if life.pending is not Pending.REMOVE:
        return life, ()
    state = SandboxState.STOPPED if life.end_reason in _ASKED_FOR else SandboxState.FAILED
    return replace(life, state=state, pending=Pending.NOTHING, ended_at=event.at), (Instruction.RECORD_ENDED,)


_RULES: dict[type[Event], Callable[[Life, Any], Step]] = {
    Started: _started,
    StartFailed: _start_failed,
    WorkBegun: _work_begun,
    WorkEnded: _work_ended,
    PackBegun: _pack_begun,
    PackEnded: _pack_ended,
    Used: _used,
    PauseRequested: _pause_requested,
    Paused: _paused,
    PauseFailed: _pause_failed,
    ResumeRequested: _resume_requested,
    Resumed: _resumed,
    ResumeFailed: _resume_failed,
    LifetimeChanged: _lifetime_changed,
    DeleteRequested: _delete_requested,
    Perished: _perished,
    TimePassed: _time_passed,
    Removed: _removed,
}
