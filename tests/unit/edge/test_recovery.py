"""An edge that dies at any step, and the next one.

Death is played by a journal writer that stops: from its n-th job on nothing is written and nobody is answered, or it
is written and nobody is answered. Those are all the moments at which the outside could tell the difference. The
dummy machines live on in the backend object, as containers do in the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.edge.edges import created, dummy_spec, edge, ended, output, run, until

from opendsec.backends import dummy_machine
from opendsec.backends.base import Handle, Parked, Running
from opendsec.backends.dummy import DummyBackend
from opendsec.edge import connection, journal, node, recovery
from opendsec.edge.node import Node
from opendsec.edge.sandbox import Sandbox
from opendsec.edge.writer import WriterThread
from opendsec.errors import (
    BackendUnavailableError,
    CapacityError,
    ConflictError,
    HostCapabilityError,
    NodeError,
    OpenDSecError,
    SandboxLostError,
    StartError,
)
from opendsec.guest.base import GuestLostError
from opendsec.model.command import EndReason, ExecRequest
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.node import SandboxEnd, SandboxState
from opendsec.model.spec import Lifetime, Resources

pytestmark = pytest.mark.anyio


class DyingWriter(WriterThread):
    """Dies at its n-th job."""

    at = 0
    after_writing = False
    died: asyncio.Event

    def run(self, job: Callable[[], Any], *, long: bool = False) -> asyncio.Future[Any]:
        if self._name != "journal":
            return super().run(job, long=long)
        cls = type(self)
        cls.at -= 1
        if cls.at > 0:
            return super().run(job)
        cls.died.set()
        if cls.at == 0 and cls.after_writing:
            super().run(job)
        return asyncio.get_running_loop().create_future()


async def live_until_death(one: Node, sandbox_id: SandboxId) -> None:
    """A whole small life: create, two commands, pause, resume, delete."""
    sandbox = await one.create(
        dummy_spec(lifetime=Lifetime(ttl_running_stop=None)), project="default", sandbox_id=sandbox_id
    )
    await sandbox.wait_ready()
    await run(sandbox, "echo x >> /count; yes 60000; echo end", operation_id="first")
    await run(sandbox, "echo y >> /count; echo out; exit 7", operation_id="second")
    await sandbox.pause()
    await sandbox.resume()
    await sandbox.delete()


def nothing_left_over(one: Node, root: Path, backend: DummyBackend) -> None:
    known = {sandbox.sandbox_id: sandbox.live for sandbox in one.all(project=None)}
    live = {sandbox_id for sandbox_id, alive in known.items() if alive}
    assert set(backend._machines) == live
    assert {path.name for path in (root / "run" / "sbx").iterdir()} == live
    assert {path.name for path in (root / "state" / "sandboxes").iterdir()} == set(known)
    assert {path.parent.name for path in (root / "state" / "sandboxes").glob("*/box")} == live


@pytest.mark.parametrize("after_writing", [False, True])
@pytest.mark.parametrize("step", range(1, 12))
async def test_death_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, after_writing: bool
) -> None:
    monkeypatch.setattr(node, "WriterThread", DyingWriter)
    DyingWriter.at, DyingWriter.after_writing, DyingWriter.died = step, after_writing, asyncio.Event()
    backend, sandbox_id = DummyBackend(), new_sandbox_id("local")
    async with edge(tmp_path, backend) as dying:
        life = asyncio.ensure_future(live_until_death(dying, sandbox_id))
        await asyncio.wait(
            {life, asyncio.ensure_future(DyingWriter.died.wait())}, return_when=asyncio.FIRST_COMPLETED, timeout=30
        )
        assert DyingWriter.died.is_set(), "the life is shorter than the steps tried"
        life.cancel()
        await asyncio.wait({life})
    monkeypatch.setattr(node, "WriterThread", WriterThread)

    async with edge(tmp_path, backend) as adopting:
        await until(lambda: all(one.state is not SandboxState.STOPPING for one in adopting.all(project=None)))
        nothing_left_over(adopting, tmp_path, backend)
        found = adopting.all(project=None)
        if found and found[0].live:
            await everything_is_still_there(found[0])
        elif found and found[0].life.end_reason is SandboxEnd.START_FAILED:
            with pytest.raises(StartError):
                await found[0].wait_ready()
        for one in found:
            await one.delete()
        nothing_left_over(adopting, tmp_path, backend)


async def everything_is_still_there(sandbox: Sandbox) -> None:
    """Asked again with the same operation ids: each has run once, and its output is whole."""
    first = await ended(
        await sandbox.submit(ExecRequest(script="echo x >> /count; yes 60000; echo end", operation_id="first"))
    )
    assert first.result is not None
    assert (first.result.exit_code, first.result.truncated) == (0, False)
    assert await output(sandbox, first) == b"y\n" * 60_000 + b"end\n"
    second = await ended(
        await sandbox.submit(ExecRequest(script="echo y >> /count; echo out; exit 7", operation_id="second"))
    )
    assert second.result is not None
    assert (second.result.exit_code, second.result.end_reason) == (7, EndReason.EXITED)
    assert await output(sandbox, second) == b"out\n"
    count = await ended(await sandbox.submit(ExecRequest(script="cat /count")))
    assert await output(sandbox, count) == b"x\ny\n"


async def test_running_commands_go_on_without_a_gap(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        small = await sandbox.submit(ExecRequest(script="echo before; sleep 0.3; echo after; exit 5"))
        large = await sandbox.submit(ExecRequest(script="yes 500000; sleep 0.3; echo end"))
        capped = await sandbox.submit(ExecRequest(script="yes 500000; sleep 0.3; echo end", max_output_bytes=1000))
        await until(lambda: large.stdout.total == 1_000_000 and small.stdout.total > 0 and capped.stdout.total > 0)
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        assert sandbox.status().running_commands == 3
        again = {one.number: await ended(one) for one in sandbox.commands.all()}
        assert await output(sandbox, again[small.number]) == b"before\nafter\n"
        assert again[small.number].result.exit_code == 5  # type: ignore[union-attr]
        assert await output(sandbox, again[large.number]) == b"y\n" * 500_000 + b"end\n"
        assert await output(sandbox, again[capped.number]) == b"y\n" * 500
        assert again[capped.number].result.stdout_bytes_total == 1_000_004  # type: ignore[union-attr]
        assert again[capped.number].result.truncated  # type: ignore[union-attr]


async def bytes_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_stdin_goes_on_where_the_program_is(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        command = await sandbox.submit(ExecRequest(script="cat", stdin=True))
        await until(lambda: command.given)
        status = await sandbox.commands.write_stdin(command, 0, bytes_of(b"hello "), eof=False)
        assert status.accepted == 6
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        command = sandbox.commands.get("cmd-1")
        await until(lambda: command.given)
        await sandbox.commands.write_stdin(command, 3, bytes_of(b"lo wor"), eof=False)
        with pytest.raises(ConflictError, match="gap"):
            await sandbox.commands.write_stdin(command, 100, bytes_of(b"x"), eof=False)
        status = await sandbox.commands.write_stdin(command, 9, bytes_of(b"ld"), eof=True)
        assert (status.accepted, status.closed) == (11, True)
        assert await output(sandbox, await ended(command)) == b"hello world"


async def test_stdin_without_an_offset_is_refused_while_nobody_knows_it(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        command = await sandbox.submit(ExecRequest(script="cat", stdin=True))
        await until(lambda: command.given)
        await sandbox.commands.write_stdin(command, None, bytes_of(b"hello "), eof=False)
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        command = sandbox.commands.get("cmd-1")
        await until(lambda: command.given)
        with pytest.raises(ConflictError, match="offset"):
            await sandbox.commands.write_stdin(command, None, bytes_of(b"world"), eof=False)
        await sandbox.commands.write_stdin(command, 6, bytes_of(b"world"), eof=True)
        assert await output(sandbox, await ended(command)) == b"hello world"


async def test_sandbox_that_died_meanwhile_is_told_as_lost(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        await sandbox.submit(ExecRequest(script="echo begun; sleep 1000", operation_id="op"))
        await until(lambda: sandbox.commands.get("cmd-1").stdout.total > 0)
    await backend.stop(sandbox.handle, grace_s=0)  # type: ignore[arg-type]
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        await until(lambda: not sandbox.live)
        assert (sandbox.state, sandbox.life.end_reason) == (SandboxState.FAILED, SandboxEnd.GUEST_LOST)
        result = sandbox.commands.get("cmd-1").result
        assert result is not None
        assert (result.exit_code, result.end_reason) == (None, EndReason.SANDBOX_ENDED)
        nothing_left_over(second, tmp_path, backend)


async def test_paused_stays_paused_and_limits_stay_limits(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        paused = await created(first)
        await paused.pause()
        changed = await created(first, dummy_spec(lifetime=Lifetime(ttl_running_stop=1000)))
        await changed.update(lifetime=Lifetime(ttl_running_stop=None, ttl_max_stop=0.5), labels={"kept": "yes"})
    async with edge(tmp_path, backend) as second:
        assert second.get(paused.sandbox_id, project=None).state is SandboxState.PAUSED
        found = second.get(changed.sandbox_id, project=None)
        assert found.status().spec.labels == {"kept": "yes"}
        await until(lambda: not found.live)
        assert found.life.end_reason is SandboxEnd.EXPIRED_MAX
        assert (await run(second.get(paused.sandbox_id, project=None), "exit 2")).exit_code == 2


async def test_ended_sandboxes_and_their_results_are_still_known(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        await run(sandbox, "echo kept; yes 100000 >&2")
        await sandbox.delete()
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        assert sandbox.status().end_reason is SandboxEnd.STOPPED
        command = sandbox.commands.get("cmd-1")
        assert await output(sandbox, command) == b"kept\n"
        assert await output(sandbox, command, stderr=True) == b"y\n" * 100_000
        assert await output(sandbox, command, offset=3) == b"t\n"


async def test_slots_of_the_living_are_not_given_away(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        kept = [await created(first) for _ in range(3)]
        await kept[1].delete()
    async with edge(tmp_path, backend) as second:
        fresh = [await created(second) for _ in range(2)]
        assert sorted(one.slot for one in fresh) == [1, 3]


async def test_directory_without_a_first_line_is_removed(tmp_path: Path) -> None:
    own = tmp_path / "state" / "sandboxes" / "sbx-local-aaaaaaaaaaaaaaaa"
    (own / "box").mkdir(parents=True)
    (own / "journal").write_bytes(b'{"type":"crea')
    (tmp_path / "run" / "sbx" / own.name).mkdir(parents=True)
    async with edge(tmp_path) as one:
        assert one.all(project=None) == []
    assert not own.exists()
    assert list((tmp_path / "run" / "sbx").iterdir()) == []


async def test_unreadable_journal_stops_the_edge_with_its_place(tmp_path: Path) -> None:
    own = tmp_path / "state" / "sandboxes" / "sbx-local-aaaaaaaaaaaaaaaa"
    own.mkdir(parents=True)
    (own / "journal").write_bytes(b"nonsense\n")
    with pytest.raises(OpenDSecError, match="line 1"):
        async with edge(tmp_path):
            pass


async def test_a_damaged_journal_ends_its_sandbox_and_no_other(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        damaged, sound = await created(first), await created(first)
        await run(damaged, "echo kept")
        await damaged.submit(ExecRequest(script="sleep 1000"))
        await until(lambda: damaged.commands.get("cmd-2").given)
    with (damaged.places.own / "journal").open("ab") as file:
        file.write(b"\0" * 4096 + b"\n")
    for _ in range(2):
        async with edge(tmp_path, backend) as second:
            found = second.get(damaged.sandbox_id, project=None)
            await until(lambda: not second.get(damaged.sandbox_id, project=None).live)
            assert (found.life.end_reason, found.state) == (SandboxEnd.NODE_LOST, SandboxState.FAILED)
            assert "damaged" in found.life.end_detail
            assert await output(found, found.commands.get("cmd-1")) == b"kept\n"
            lost = found.commands.get("cmd-2").result
            assert lost is not None
            assert (lost.exit_code, lost.end_reason) == (None, EndReason.SANDBOX_ENDED)
            assert second.get(sound.sandbox_id, project=None).state is SandboxState.RUNNING
            nothing_left_over(second, tmp_path, backend)


class Counting(DummyBackend):
    """Remembers what it was asked to destroy."""

    def __init__(self) -> None:
        super().__init__()
        self.destroyed: list[SandboxId] = []

    async def destroy(self, sandbox_id: SandboxId, *given: Any, **named: Any) -> None:
        self.destroyed.append(sandbox_id)
        await super().destroy(sandbox_id, *given, **named)


@pytest.mark.parametrize("last", [b"", b"{damaged\n"])
async def test_who_holds_a_slot_again_is_not_disturbed_by_its_former_owner(tmp_path: Path, last: bytes) -> None:
    backend = Counting()
    async with edge(tmp_path, backend) as first:
        former = await created(first)
        await former.delete()
        heir = await created(first)
        assert heir.slot == former.slot
    path = former.places.own / "journal"
    whole = path.read_bytes().splitlines(keepends=True)
    # No room for `ended`; or `ending` and `ended` are damaged.
    path.write_bytes(b"".join(whole[:-2]) + last if last else b"".join(whole[:-1]))
    async with edge(tmp_path, backend) as second:
        assert not second.get(former.sandbox_id, project=None).live
        assert backend.destroyed.count(former.sandbox_id) == 1
        assert second.get(heir.sandbox_id, project=None).state is SandboxState.RUNNING
        assert second.report().live == 1


@pytest.mark.slow
async def test_1000_sandboxes_are_adopted(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        await asyncio.gather(*(created(first) for _ in range(1000)))
    async with edge(tmp_path, backend) as second:
        assert len([one for one in second.all(project=None) if one.live]) == 1000


class Deaf(DummyBackend):
    """`recover` fails so often with that error."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.left = 0

    async def recover(self, handle: Handle) -> Running | Parked | None:
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return await super().recover(handle)


async def test_an_edge_without_descriptors_gives_up_itself_not_its_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_PAUSE_S", 0.0)
    backend = Deaf(errno.EMFILE)
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
    backend.left = recovery.ADOPT_TRIES
    with pytest.raises(NodeError, match="cannot be taken over"):
        async with edge(tmp_path, backend):
            pass
    backend.left = recovery.ADOPT_TRIES - 1
    async with edge(tmp_path, backend) as second:
        assert (await run(second.get(sandbox.sandbox_id, project=None), "exit 3")).exit_code == 3


async def test_a_sandbox_that_cannot_be_talked_to_is_ended_and_the_reason_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_PAUSE_S", 0.0)
    backend = Deaf(errno.EACCES)
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
    backend.left = recovery.ADOPT_TRIES
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project=None)
        await until(lambda: not sandbox.live)
        assert sandbox.life.end_reason is SandboxEnd.GUEST_LOST
        assert "did not answer" in sandbox.life.end_detail
        nothing_left_over(second, tmp_path, backend)


class Slow(DummyBackend):
    """`recover` fails so often though the sandbox lives."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    async def recover(self, handle: Handle) -> Running | Parked | None:
        if self.left:
            self.left -= 1
            raise GuestLostError("nothing was heard") if self.left % 2 else NodeError("the VMM does not answer")
        return await super().recover(handle)


@pytest.mark.parametrize("paused", [False, True])
async def test_one_that_is_slow_to_answer_is_kept_with_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, paused: bool
) -> None:
    monkeypatch.setattr(connection, "REACH_PAUSE_S", 0.05)
    backend = Slow()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        going_on = await sandbox.submit(ExecRequest(script="echo before; sleep 0.3; echo after; exit 5"))
        await until(lambda: going_on.stdout.total > 0)
        if paused:
            await sandbox.pause()
    backend.left = 6
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project=None)
        assert sandbox.state is SandboxState.RUNNING
        with pytest.raises(ConflictError, match="no guest agent yet"):
            _ = sandbox.guest
        again = await ended(sandbox.commands.get("cmd-1"))
        assert again.result is not None
        assert again.result.exit_code == 5
        assert await output(sandbox, again) == b"before\nafter\n"
        assert (await run(sandbox, "exit 3")).exit_code == 3
        assert backend.left == 0


async def test_one_that_is_silent_for_ever_is_ended_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REACH_PAUSE_S", 0.05)
    monkeypatch.setattr(connection, "REACH_S", 0.5)
    backend = Slow()
    async with edge(tmp_path, backend) as first:
        silent = await created(first)
    backend.left = 10**6
    async with edge(tmp_path, backend) as second:
        other = await created(second)
        silent = second.get(silent.sandbox_id, project=None)
        await until(lambda: not silent.live)
        assert silent.life.end_reason is SandboxEnd.GUEST_LOST
        assert "did not answer" in silent.life.end_detail
        assert (await run(other, "exit 3")).exit_code == 3
        nothing_left_over(second, tmp_path, backend)


async def test_one_that_is_silent_can_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REACH_PAUSE_S", 0.05)
    backend = Slow()
    async with edge(tmp_path, backend) as first:
        silent = await created(first)
        await silent.submit(ExecRequest(script="sleep 1000"))
    backend.left = 10**6
    async with edge(tmp_path, backend) as second:
        await second.get(silent.sandbox_id, project=None).delete()
        nothing_left_over(second, tmp_path, backend)


class Silent(DummyBackend):
    """`recover` and `reconnect` of those say nothing until they may speak, then what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()
        self.asked = self.most = 0
        self.speak = asyncio.Event()

    async def recover(self, handle: Handle) -> Running | Parked | None:
        await self._heard(handle)
        return await super().recover(handle)

    async def _heard(self, handle: Handle) -> None:
        self.asked += 1
        self.most = max(self.most, self.asked)
        try:
            if handle.sandbox_id in self.silent:
                await self.speak.wait()
        finally:
            self.asked -= 1


async def test_hundreds_of_silent_ones_hold_up_neither_the_edge_nor_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_S", 0.3)
    monkeypatch.setattr(connection, "ASK_FIRST_S", 0.2)
    monkeypatch.setattr(connection, "ASK_MOST_S", 0.4)
    monkeypatch.setattr(connection, "REACH_PAUSE_S", 0.01)
    backend = Silent()
    async with edge(tmp_path, backend) as first:
        many = await asyncio.gather(*(created(first) for _ in range(300)))
        speaks = await created(first)
    backend.silent = {one.sandbox_id for one in many}
    async with edge(tmp_path, backend) as second:
        assert (await run(await created(second), "exit 3")).exit_code == 3
        speaks = second.get(speaks.sandbox_id, project=None)
        assert (await run(speaks, "exit 4")).exit_code == 4, "it is met though 300 others are silent"
        waiting = await second.get(many[0].sandbox_id, project=None).submit(ExecRequest(script="exit 5"))
        assert backend.most <= connection.ASK_AT_ONCE
        assert all(second.get(one.sandbox_id, project=None).live for one in many)
        backend.speak.set()
        assert (await ended(waiting)).result is not None
        assert waiting.result is not None
        assert waiting.result.exit_code == 5
        await asyncio.gather(*(run(second.get(one.sandbox_id, project=None), "exit 0") for one in many))
        assert backend.most <= connection.ASK_AT_ONCE


async def test_a_file_waits_for_a_guest_that_a_new_edge_has_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_S", 0.05)
    backend = Silent()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
    backend.silent = {sandbox.sandbox_id}

    async def use(which: Sandbox) -> bool:
        async with which.working() as guest:
            return not guest.closed

    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project=None)
        monkeypatch.setattr(connection, "MET_S", 0.05)
        with pytest.raises(SandboxLostError, match="not answered the restarted edge") as raised:
            await use(sandbox)
        assert raised.value.retryable
        monkeypatch.setattr(connection, "MET_S", 60.0)
        using = asyncio.ensure_future(use(sandbox))
        backend.speak.set()
        assert await using


async def test_one_that_is_paused_and_was_not_met_in_time_stays_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ADOPT_S", 0.05)
    backend = Silent()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        going_on = await sandbox.submit(ExecRequest(script="echo before; sleep 0.3; exit 5"))
        await until(lambda: going_on.stdout.total > 0)
        await sandbox.pause()
    backend.silent = {sandbox.sandbox_id}
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project=None)
        assert sandbox.state is SandboxState.PAUSED
        assert backend._machines[sandbox.sandbox_id].frozen
        await sandbox.resume()
        again = await ended(sandbox.commands.get("cmd-1"))
        assert again.result is not None
        assert again.result.exit_code == 5
        assert (await run(sandbox, "exit 3")).exit_code == 3


async def test_edges_with_one_run_directory_do_not_touch_each_others(tmp_path: Path) -> None:
    run_root = tmp_path / "run" / "sbx"
    foreign, own = run_root / new_sandbox_id("other"), run_root / new_sandbox_id("local")
    for directory in (foreign, own):
        directory.mkdir(parents=True)
    async with edge(tmp_path):
        assert list(run_root.iterdir()) == [foreign]


async def test_replay_keeps_no_output_in_memory(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
        await run(sandbox, "yes 10000; yes 100000 >&2")
        lines = journal.read(sandbox.places.own)
    (result,) = [record for _, record in recovery.replay(lines).commands if isinstance(record, journal.Result)]
    assert (result.stdout, result.stderr, result.stdout_kept) == (b"", None, 20_000)


def test_replay_wants_a_beginning() -> None:
    with pytest.raises(journal.JournalError):
        recovery.replay([(0, journal.Ended(ended_at=1.0))])


class Unavailable(DummyBackend):
    async def open(self) -> None:
        raise HostCapabilityError("no such kernel")


async def test_edge_whose_backend_is_gone_touches_nothing(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend) as first:
        sandbox = await created(first)
    with pytest.raises(BackendUnavailableError, match="no such kernel"):
        async with edge(tmp_path, Unavailable()):
            pass
    async with edge(tmp_path, backend) as second:
        assert second.get(sandbox.sandbox_id, project=None).state is SandboxState.RUNNING


async def test_backend_that_does_not_work_refuses_by_name(tmp_path: Path) -> None:
    async with edge(tmp_path, Unavailable()) as one:
        assert not one.report().backends["dummy"].available
        with pytest.raises(BackendUnavailableError, match="no such kernel"):
            await created(one)


async def test_a_command_that_never_ran_for_want_of_room_runs_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, script = DummyBackend(), "echo x >> /count"
    async with edge(tmp_path, backend) as first:
        spec = dummy_spec(resources=Resources(pids_limit=8), lifetime=Lifetime(ttl_running_stop=None))
        sandbox = await created(first, spec)
        holders = [await sandbox.submit(ExecRequest(script="sleep 60")) for _ in range(8)]
        await until(lambda: all(one.given for one in holders))
        for _ in range(2):
            assert (await run(sandbox, script, operation_id="pids")).end_reason is EndReason.PIDS_LIMIT
        for holder in holders:
            await sandbox.guest.kill(holder.number, 0)
            await ended(holder)
        monkeypatch.setattr(dummy_machine, "MAX_SESSIONS", 0)
        for _ in range(2):
            with pytest.raises(CapacityError):
                await run(sandbox, script, operation_id="limit", session="new")
    monkeypatch.undo()
    async with edge(tmp_path, backend) as second:
        sandbox = second.get(sandbox.sandbox_id, project="default")
        for _ in range(2):
            assert (await run(sandbox, script, operation_id="pids")).exit_code == 0
            assert (await run(sandbox, script, operation_id="limit", session="new")).exit_code == 0
        command = await ended(await sandbox.submit(ExecRequest(script="cat /count")))
        assert await output(sandbox, command) == b"x\nx\n"
