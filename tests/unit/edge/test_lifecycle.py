"""The life of a sandbox: every race, by name and by chance."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from opendsec.edge import lifecycle as lc
from opendsec.edge.lifecycle import Instruction, Life, Pending
from opendsec.errors import ConflictError, SandboxExitedError
from opendsec.model.node import SandboxEnd, SandboxState
from opendsec.model.spec import Lifetime


def running(at: float = 0.0, *, idle: float | None = 10.0, hard: float | None = None) -> Life:
    life = lc.begin(Lifetime(ttl_running_stop=idle, ttl_max_stop=hard), at)
    return lc.step(life, lc.Started(at))[0]


def test_started_sandbox_runs_and_asks_for_nothing() -> None:
    life, instructions = lc.step(lc.begin(Lifetime(), 1.0), lc.Started(2.0))
    assert (life.state, instructions) == (SandboxState.RUNNING, ())


def test_failed_start_is_removed_and_failed() -> None:
    life, instructions = lc.step(lc.begin(Lifetime(), 0.0), lc.StartFailed(1.0, "no room"))
    assert instructions == (Instruction.RECORD_ENDING, Instruction.REMOVE)
    life, instructions = lc.step(life, lc.Removed(2.0))
    assert (life.state, life.end_reason, life.end_detail) == (SandboxState.FAILED, SandboxEnd.START_FAILED, "no room")
    assert instructions == (Instruction.RECORD_ENDED,)


@pytest.mark.parametrize("settled", [lc.Started(2.0), lc.StartFailed(2.0, "cancelled")])
def test_delete_while_creating_waits_for_the_start_to_settle(settled: lc.Event) -> None:
    life, instructions = lc.step(lc.begin(Lifetime(), 0.0), lc.DeleteRequested(1.0))
    assert instructions == (Instruction.RECORD_ENDING, Instruction.CANCEL_PENDING)
    life, instructions = lc.step(life, settled)
    assert (life.state, instructions) == (SandboxState.STOPPING, (Instruction.REMOVE,))
    life, _ = lc.step(life, lc.Removed(3.0))
    assert (life.state, life.end_reason) == (SandboxState.STOPPED, SandboxEnd.STOPPED)


def test_second_delete_does_nothing() -> None:
    life, _ = lc.step(running(), lc.DeleteRequested(1.0))
    assert lc.step(life, lc.DeleteRequested(2.0)) == (life, ())


def test_first_end_reason_stays() -> None:
    life, _ = lc.step(running(), lc.Perished(1.0, SandboxEnd.OOM, "killed"))
    life, _ = lc.step(life, lc.DeleteRequested(2.0))
    life, _ = lc.step(life, lc.Removed(3.0))
    assert (life.state, life.end_reason) == (SandboxState.FAILED, SandboxEnd.OOM)


def test_idle_time_does_not_pass_while_something_is_in_progress() -> None:
    life, _ = lc.step(running(idle=10), lc.WorkBegun(5.0))
    assert lc.deadline(life) is None
    assert lc.step(life, lc.TimePassed(1000.0)) == (life, ())
    life, _ = lc.step(life, lc.WorkEnded(1000.0))
    assert lc.deadline(life) == 1010.0
    life, instructions = lc.step(life, lc.TimePassed(1010.0))
    assert instructions == (Instruction.RECORD_ENDING, Instruction.REMOVE)
    assert life.end_reason is SandboxEnd.EXPIRED_IDLE


def test_hard_limit_ends_a_busy_sandbox() -> None:
    life, _ = lc.step(running(hard=20), lc.WorkBegun(5.0))
    assert lc.deadline(life) == 20.0
    life, _ = lc.step(life, lc.TimePassed(20.0))
    assert (life.state, life.end_reason) == (SandboxState.STOPPING, SandboxEnd.EXPIRED_MAX)


def test_hard_limit_ends_one_that_is_still_starting() -> None:
    life, instructions = lc.step(lc.begin(Lifetime(ttl_max_stop=3), 0.0), lc.TimePassed(3.0))
    assert instructions == (Instruction.RECORD_ENDING, Instruction.CANCEL_PENDING)
    assert life.pending is Pending.START


def test_paused_sandbox_does_not_idle_and_resumes_when_asked() -> None:
    life, instructions = lc.step(running(idle=10), lc.PauseRequested(1.0))
    assert instructions == (Instruction.PAUSE,)
    life, _ = lc.step(life, lc.Paused(2.0))
    assert lc.deadline(life) is None
    life, instructions = lc.step(life, lc.ResumeRequested(100.0))
    assert instructions == (Instruction.RESUME,)
    life, _ = lc.step(life, lc.Resumed(101.0))
    assert lc.deadline(life) == 111.0


def test_delete_while_pausing_cancels_the_pause() -> None:
    life, _ = lc.step(running(), lc.PauseRequested(1.0))
    life, instructions = lc.step(life, lc.DeleteRequested(2.0))
    assert instructions == (Instruction.RECORD_ENDING, Instruction.CANCEL_PENDING)
    life, instructions = lc.step(life, lc.Paused(3.0))
    assert (life.state, instructions) == (SandboxState.STOPPING, (Instruction.REMOVE,))


def test_failed_pause_leaves_it_running_and_failed_resume_ends_it() -> None:
    life, _ = lc.step(running(), lc.PauseRequested(1.0))
    life, _ = lc.step(life, lc.PauseFailed(2.0))
    assert life.state is SandboxState.RUNNING
    life, _ = lc.step(life, lc.PauseRequested(3.0))
    life, _ = lc.step(life, lc.Paused(4.0))
    life, _ = lc.step(life, lc.ResumeRequested(5.0))
    life, instructions = lc.step(life, lc.ResumeFailed(6.0, "thawing failed"))
    assert (life.end_reason, instructions[-1]) == (SandboxEnd.GUEST_LOST, Instruction.REMOVE)


def test_one_that_parks_wants_no_connection_from_the_pause_until_it_runs_again() -> None:
    life = running()
    wanted = [lc.connection_wanted(life, parks=True)]
    for event in (lc.PauseRequested(1.0), lc.Paused(2.0), lc.ResumeRequested(3.0), lc.Resumed(4.0)):
        life, _ = lc.step(life, event)
        wanted.append(lc.connection_wanted(life, parks=True))
        assert lc.connection_wanted(life, parks=False)
    assert wanted == [True, False, False, False, True]
    assert lc.parked_since(life, running(), parks=True)
    assert not lc.parked_since(life, life, parks=True)
    assert not lc.parked_since(life, running(), parks=False)
    ending, _ = lc.step(life, lc.DeleteRequested(5.0))
    assert not lc.connection_wanted(ending, parks=False)


def test_requests_are_refused_by_name() -> None:
    with pytest.raises(ConflictError, match="creating"):
        lc.step(lc.begin(Lifetime(), 0.0), lc.WorkBegun(1.0))
    ending, _ = lc.step(running(), lc.DeleteRequested(1.0))
    with pytest.raises(SandboxExitedError) as raised:
        lc.step(ending, lc.WorkBegun(2.0))
    assert raised.value.detail["end_reason"] == "stopped"


def test_longer_lifetime_moves_the_deadline() -> None:
    life, _ = lc.step(running(idle=10), lc.LifetimeChanged(5.0, Lifetime(ttl_running_stop=100, ttl_max_stop=50)))
    assert lc.deadline(life) == 50.0


ALLOWED = {
    SandboxState.CREATING: {SandboxState.RUNNING, SandboxState.STOPPING},
    SandboxState.RUNNING: {SandboxState.PAUSING, SandboxState.STOPPING},
    SandboxState.PAUSING: {SandboxState.PAUSED, SandboxState.RUNNING, SandboxState.STOPPING},
    SandboxState.PAUSED: {SandboxState.RESUMING, SandboxState.STOPPING},
    SandboxState.RESUMING: {SandboxState.RUNNING, SandboxState.STOPPING},
    SandboxState.STOPPING: {SandboxState.STOPPED, SandboxState.FAILED},
    SandboxState.STOPPED: set(),
    SandboxState.FAILED: set(),
}


class AnyLife(RuleBasedStateMachine):
    """Events in any order, as a shell under load would bring them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.life = lc.begin(Lifetime(ttl_running_stop=30, ttl_max_stop=500), 0.0)
        self.doing: set[Pending] = {Pending.START}
        self.removals = 0
        self.ends_recorded = 0
        self.deleted = False

    def feed(self, event: lc.Event) -> None:
        before = self.life
        try:
            self.life, instructions = lc.step(self.life, event)
        except (ConflictError, SandboxExitedError):
            assert isinstance(event, lc.WorkBegun | lc.PauseRequested | lc.ResumeRequested | lc.LifetimeChanged)
            return
        assert self.life.state is before.state or self.life.state in ALLOWED[before.state]
        for instruction in instructions:
            if instruction is Instruction.PAUSE:
                self.doing.add(Pending.PAUSE)
            elif instruction is Instruction.RESUME:
                self.doing.add(Pending.RESUME)
            elif instruction is Instruction.REMOVE:
                self.removals += 1
                self.doing.add(Pending.REMOVE)
            elif instruction is Instruction.RECORD_ENDED:
                self.ends_recorded += 1
            elif instruction is Instruction.CANCEL_PENDING:
                assert self.doing, "there is nothing to cancel"

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = lc.deadline(self.life)
        self.feed(lc.TimePassed(self.now))
        if due is not None and self.now >= due:
            assert self.life.state is SandboxState.STOPPING

    @precondition(lambda self: Pending.START in self.doing)
    @rule(well=st.booleans())
    def start_settles(self, well: bool) -> None:
        self.doing.discard(Pending.START)
        self.feed(lc.Started(self.now) if well else lc.StartFailed(self.now, "why"))

    @precondition(lambda self: Pending.PAUSE in self.doing)
    @rule(well=st.booleans())
    def pause_settles(self, well: bool) -> None:
        self.doing.discard(Pending.PAUSE)
        self.feed(lc.Paused(self.now) if well else lc.PauseFailed(self.now))

    @precondition(lambda self: Pending.RESUME in self.doing)
    @rule(well=st.booleans())
    def resume_settles(self, well: bool) -> None:
        self.doing.discard(Pending.RESUME)
        self.feed(lc.Resumed(self.now) if well else lc.ResumeFailed(self.now, "why"))

    @precondition(lambda self: Pending.REMOVE in self.doing)
    @rule()
    def removal_settles(self) -> None:
        self.doing.discard(Pending.REMOVE)
        self.feed(lc.Removed(self.now))

    @rule(event=st.sampled_from([lc.WorkBegun, lc.WorkEnded, lc.Used, lc.PauseRequested, lc.ResumeRequested]))
    def somebody_asks(self, event: type[lc.Event]) -> None:
        self.feed(event(self.now))

    @rule()
    def guest_is_lost(self) -> None:
        self.feed(lc.Perished(self.now, SandboxEnd.GUEST_LOST, "gone"))

    @rule()
    def delete(self) -> None:
        self.feed(lc.DeleteRequested(self.now))
        self.deleted = True

    @invariant()
    def is_coherent(self) -> None:
        life = self.life
        ended = life.state in lc.ENDED_STATES
        assert self.removals <= 1, "removed twice"
        assert self.ends_recorded == int(ended)
        assert (life.ended_at is not None) == ended
        assert (life.end_reason is None) == (
            life.state not in lc.ENDED_STATES and life.state is not SandboxState.STOPPING
        )
        assert life.busy >= 0
        if self.deleted:
            assert ended or life.state is SandboxState.STOPPING
        if ended:
            assert not self.doing, "ended while something is still being done"
        else:
            assert (life.pending is Pending.NOTHING) == (not self.doing)
        if life.state is SandboxState.STOPPING:
            assert self.doing, "nothing will ever end it"


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
