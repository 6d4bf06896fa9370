"""What a pack under way means for the life of its sandbox."""

from __future__ import annotations

import pytest

from opendsec.edge import lifecycle
from opendsec.edge.lifecycle import (
    DeleteRequested,
    Event,
    Instruction,
    Life,
    PackBegun,
    PackEnded,
    Paused,
    PauseRequested,
    Perished,
    Started,
    TimePassed,
    step,
)
from opendsec.errors import ConflictError, SandboxExitedError
from opendsec.model.node import SandboxEnd, SandboxState
from opendsec.model.spec import Lifetime


def lived(*events: Event, lifetime: Lifetime | None = None) -> Life:
    life = lifecycle.begin(lifetime or Lifetime(ttl_running_stop=10.0, ttl_max_stop=100.0), 0.0)
    for event in (Started(1.0), *events):
        life, _ = step(life, event)
    return life


def test_no_limit_ends_it_meanwhile_and_every_one_does_afterwards() -> None:
    life = lived(PackBegun(2.0))
    assert lifecycle.deadline(life) is None
    assert lifecycle.idle_expires_at(life) is None
    assert step(life, TimePassed(1000.0)) == (life, ())
    life, _ = step(life, PackEnded(1000.0))
    assert lifecycle.deadline(life) == 100.0
    ended, instructions = step(life, TimePassed(1000.0))
    assert (ended.end_reason, instructions[-1]) == (SandboxEnd.EXPIRED_MAX, Instruction.REMOVE)


def test_its_idle_time_begins_anew_when_the_pack_ends() -> None:
    life = lived(PackBegun(2.0), PackEnded(50.0))
    assert lifecycle.idle_expires_at(life) == 60.0


@pytest.mark.parametrize("event", [DeleteRequested(3.0), Perished(3.0, SandboxEnd.OOM, "killed")])
def test_an_end_does_not_wait(event: Event) -> None:
    life = lived(PackBegun(2.0))
    ended, instructions = step(life, event)
    assert ended.state is SandboxState.STOPPING
    assert Instruction.REMOVE in instructions
    after, nothing = step(ended, PackEnded(4.0))
    assert (after.packing, after.end_reason, nothing) == (0, ended.end_reason, ())


def test_a_paused_one_is_packed_and_stays_paused() -> None:
    life = lived(PauseRequested(2.0), Paused(3.0), PackBegun(4.0), PackEnded(5.0))
    assert life.state is SandboxState.PAUSED


def test_one_that_is_between_two_states_or_has_ended_is_not() -> None:
    with pytest.raises(ConflictError):
        lived(PauseRequested(2.0), PackBegun(3.0))
    with pytest.raises(SandboxExitedError):
        lived(DeleteRequested(2.0), PackBegun(3.0))
