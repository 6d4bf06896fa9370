"""What an edge does with sandboxes and commands, over the dummy backend."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.edge.edges import created, dummy_spec, edge, ended, output, run, settings_below, until

from opendsec.backends.base import Handle, Running, StartPlan
from opendsec.backends.dummy import DummyBackend
from opendsec.edge import commands, connection, journal, lifecycle
from opendsec.edge import node as node_module
from opendsec.edge.admission import AdmissionLimits
from opendsec.edge.images import AnyImage
from opendsec.edge.node import Node, Slots
from opendsec.edge.timers import Timers
from opendsec.errors import (
    CapacityError,
    ConflictError,
    DiskFullError,
    InvalidSpecError,
    NotFoundError,
    SandboxExitedError,
    StartError,
    UnschedulableError,
    UnsupportedError,
)
from opendsec.guest.base import Guest
from opendsec.model.command import EndReason, ExecRequest, PtySize
from opendsec.model.ids import new_sandbox_id
from opendsec.model.node import SandboxEnd, SandboxState
from opendsec.model.spec import BackendKind, Lifetime, Resources, SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with edge(tmp_path) as one:
        yield one


def leftovers(node: Node) -> list[str]:
    root, run_dir = node.settings.state_dir / "sandboxes", node.settings.run_dir / "sbx"
    live = {one.sandbox_id for one in node.all(project=None) if one.live}
    boxes = [str(path) for path in root.glob("*/box") if path.parent.name not in live]
    return boxes + [str(path) for path in run_dir.iterdir() if path.name not in live]


async def test_a_command_from_start_to_result(node: Node) -> None:
    sandbox = await created(node)
    command = await ended(await sandbox.submit(ExecRequest(script="echo one; echo two >&2; exit 3")))
    assert command.result is not None
    assert (command.result.exit_code, command.result.end_reason) == (3, EndReason.EXITED)
    assert await output(sandbox, command) == b"one\n"
    assert await output(sandbox, command, stderr=True) == b"two\n"
    assert not command.result.truncated


async def test_stop_leaves_nothing_but_the_journal(node: Node) -> None:
    sandbox = await created(node)
    await sandbox.delete()
    assert sandbox.status().end_reason is SandboxEnd.STOPPED
    assert leftovers(node) == []
    await sandbox.delete()
    assert node.report().live == 0


async def test_ended_sandbox_still_answers_and_refuses_new_work(node: Node) -> None:
    sandbox = await created(node)
    command = await ended(await sandbox.submit(ExecRequest(script="echo kept")))
    await sandbox.delete()
    found = node.get(sandbox.sandbox_id, project="default")
    assert await output(found, found.commands.get(command.command_id)) == b"kept\n"
    with pytest.raises(SandboxExitedError) as raised:
        await found.submit(ExecRequest(script="true"))
    assert raised.value.detail["end_reason"] == "stopped"


async def test_commands_of_a_stopped_sandbox_end_with_an_unknown_code(node: Node) -> None:
    sandbox = await created(node)
    command = await sandbox.submit(ExecRequest(script="echo begun; sleep 1000"))
    await until(lambda: command.given)
    await sandbox.delete()
    assert command.result is not None
    assert (command.result.exit_code, command.result.end_reason) == (None, EndReason.SANDBOX_ENDED)
    assert await output(sandbox, command) == b"begun\n"


async def test_what_a_sandbox_may_have_journalled_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_JOURNAL_BYTES", 20_000)
    backend = DummyBackend()
    async with edge(tmp_path, backend) as one:
        sandbox = await created(one)
        await run(sandbox, "true " + "x" * 30_000, operation_id="large")
        await run(sandbox, "true")
        with pytest.raises(CapacityError, match="fills 20000 bytes"):
            await run(sandbox, "true")
        assert (await run(sandbox, "true " + "x" * 30_000, operation_id="large")).exit_code == 0
    async with edge(tmp_path, backend) as one:
        with pytest.raises(CapacityError):
            await run(one.get(sandbox.sandbox_id, project=None), "true")


async def test_a_change_of_nothing_is_not_journalled(node: Node) -> None:
    sandbox = await created(node)
    size = (sandbox.places.own / "journal").stat().st_size
    await sandbox.update(lifetime=None, labels=None)
    assert (sandbox.places.own / "journal").stat().st_size == size


async def test_a_store_that_cannot_be_read_does_not_stop_the_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "FACTS_EVERY_S", 0.001)
    asked = 0

    class Damaged(AnyImage):
        def names(self) -> list[str]:
            nonlocal asked
            asked += 1
            raise PermissionError("the store's directory cannot be read")

    backends = {BackendKind.DUMMY: DummyBackend()}
    async with Node(settings_below(tmp_path), backends=backends, images=Damaged()):
        await until(lambda: asked > 3)


async def test_the_first_report_names_images_and_stays_small(tmp_path: Path) -> None:
    class Many(AnyImage):
        def names(self) -> list[str]:
            return [f"image-{number:05}" for number in range(10_000)]

    backends = {BackendKind.DUMMY: DummyBackend()}
    async with Node(settings_below(tmp_path), backends=backends, images=Many()) as node:
        report = node.report()
        assert (report.images[0], len(report.images), report.image_count) == ("image-00000", 100, 10_000)


async def test_an_edge_that_lost_its_timers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("no more time")

    monkeypatch.setattr(Timers, "run", broken)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(30), edge(tmp_path):
            await asyncio.Event().wait()
    assert raised.group_contains(RuntimeError, match="no more time")


class Unreachable(DummyBackend):
    """`reconnect` fails so often with that error."""

    def __init__(self, number: int, times: int) -> None:
        super().__init__()
        self.number, self.left = number, times

    async def reconnect(self, handle: Handle) -> Guest | None:
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return await super().reconnect(handle)


async def test_a_lost_connection_is_taken_up_again_when_there_are_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RECONNECT_PAUSE_S", 0.001)
    backend = Unreachable(errno.EMFILE, times=20)
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        await sandbox.guest.aclose()
        assert (await run(sandbox, "exit 3")).exit_code == 3
        assert backend.left == 0


async def test_a_guest_that_cannot_be_reached_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_PAUSE_S", 0.001)
    async with edge(tmp_path, Unreachable(errno.ECONNREFUSED, times=20)) as node:
        sandbox = await created(node)
        await sandbox.guest.aclose()
        await until(lambda: not sandbox.live)
        assert sandbox.life.end_reason is SandboxEnd.GUEST_LOST


class Stuck(DummyBackend):
    """Cleaning up after a cancelled start takes its time, and a removal never succeeds."""

    begun = False

    async def start(self, plan: StartPlan) -> Running:
        self.begun = True
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()
        raise AssertionError

    async def destroy(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


async def test_an_edge_can_be_stopped_while_nothing_can_be_removed(tmp_path: Path) -> None:
    backend = Stuck()
    async with asyncio.timeout(30), edge(tmp_path, backend) as node:
        sandbox = await node.create(dummy_spec(), project="default", sandbox_id=new_sandbox_id("local"))
        await until(lambda: backend.begun)
        sandbox.apply(lifecycle.DeleteRequested(time.monotonic()))
        await asyncio.sleep(0)


async def test_delete_wins_while_the_first_line_is_being_written(node: Node) -> None:
    assert node._parts is not None
    node._parts.journal_writer._at_once_from = math.inf  # a slow disk
    sandbox_id = new_sandbox_id("local")
    async with asyncio.TaskGroup() as group:
        creating = group.create_task(node.create(dummy_spec(), project="default", sandbox_id=sandbox_id))
        while not node.all(project=None):
            await asyncio.sleep(0)
        await node.get(sandbox_id, project=None).delete()
    assert creating.result().status().end_reason is SandboxEnd.STOPPED
    with pytest.raises(SandboxExitedError):
        await creating.result().wait_ready()
    assert leftovers(node) == []


async def test_two_changes_at_once_both_stay(node: Node) -> None:
    sandbox = await created(node)
    assert node._parts is not None
    node._parts.journal_writer._at_once_from = math.inf  # a slow disk: both are under way together
    await asyncio.gather(
        sandbox.update(lifetime=Lifetime(ttl_running_stop=77), labels=None),
        sandbox.update(lifetime=None, labels={"kept": "yes"}),
    )
    assert (sandbox.spec.lifetime.ttl_running_stop, sandbox.spec.labels) == (77, {"kept": "yes"})


async def test_foreign_sandbox_is_not_found(node: Node) -> None:
    sandbox = await created(node)
    with pytest.raises(NotFoundError):
        node.get(sandbox.sandbox_id, project="other")
    assert node.get(sandbox.sandbox_id, project=None) is sandbox


async def test_repeated_create_finds_the_first_one(node: Node) -> None:
    sandbox_id = new_sandbox_id("local")
    both = await asyncio.gather(created(node, sandbox_id=sandbox_id), created(node, sandbox_id=sandbox_id))
    assert both[0] is both[1]
    with pytest.raises(ConflictError):
        await created(node, dummy_spec("other"), sandbox_id=sandbox_id)
    assert node.report().live == 1


async def test_id_of_another_edge_is_refused(node: Node) -> None:
    with pytest.raises(InvalidSpecError):
        await created(node, sandbox_id=new_sandbox_id("elsewhere"))


async def test_missing_backend_is_named(node: Node) -> None:
    with pytest.raises(UnsupportedError, match="container"):
        await created(node, SandboxSpec(image="debian", backend=BackendKind.CONTAINER))


async def test_full_node_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    limits = AdmissionLimits(memory_floor_mb=0, disk_floor_mb=0, max_live=1)
    async with edge(tmp_path, limits=limits) as node:
        first = await created(node)
        with pytest.raises(UnschedulableError):
            await created(node)
        await first.delete()
        await created(node)
        assert leftovers(node) == []


async def test_full_disk_refuses_the_create_and_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(journal, "write_line", full)
    sandbox_id = new_sandbox_id("local")
    with pytest.raises(DiskFullError):
        await created(node, sandbox_id=sandbox_id)
    monkeypatch.undo()
    assert (node.report().live, node.report().creating) == (0, 0)
    await created(node, sandbox_id=sandbox_id)


async def test_full_disk_refuses_the_command_which_can_be_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await created(node)

    def full(*_args: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(journal, "write_line", full)
    with pytest.raises(DiskFullError):
        await run(sandbox, "echo x >> /count", operation_id="one")
    monkeypatch.undo()
    await run(sandbox, "echo x >> /count", operation_id="one")
    command = await ended(await sandbox.submit(ExecRequest(script="cat /count")))
    assert await output(sandbox, command) == b"x\n"


class FailingStart(DummyBackend):
    async def start(self, plan: StartPlan) -> Running:
        raise StartError("no such thing")


async def test_failed_start_is_told_and_cleaned_up(tmp_path: Path) -> None:
    async with edge(tmp_path, FailingStart()) as node:
        with pytest.raises(StartError, match="no such thing"):
            await created(node)
        assert leftovers(node) == []
        assert (node.report().live, node.report().creating) == (0, 0)


class Refusing(DummyBackend):
    """Cannot give what was asked for, and finds out when it begins."""

    async def start(self, plan: StartPlan) -> Running:
        raise InvalidSpecError(
            "memory_limit_mb: too little", detail={"field": "memory_limit_mb"}, remedy="ask for more"
        )


async def test_what_a_backend_refuses_is_told_with_its_field(tmp_path: Path) -> None:
    """A failed start may be tried again; this may not."""
    async with edge(tmp_path, Refusing()) as node:
        with pytest.raises(InvalidSpecError) as refused:
            await created(node)
        assert refused.value.detail["field"] == "memory_limit_mb"
        assert (refused.value.remedy, refused.value.retryable) == ("ask for more", False)
        assert leftovers(node) == []


class SlowStart(DummyBackend):
    """Starts when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.go = asyncio.Event()

    async def start(self, plan: StartPlan) -> Running:
        self.begun += 1
        await self.go.wait()
        return await super().start(plan)


async def test_two_deletes_race_a_create(tmp_path: Path) -> None:
    backend = SlowStart()
    async with edge(tmp_path, backend) as node:
        sandbox = await node.create(dummy_spec(), project="default", sandbox_id=new_sandbox_id("local"))
        await until(lambda: backend.begun == 1)
        waiting = asyncio.ensure_future(sandbox.wait_ready())
        await asyncio.gather(sandbox.delete(), sandbox.delete())
        with pytest.raises(SandboxExitedError):
            await waiting
        assert sandbox.status().state is SandboxState.STOPPED
        assert leftovers(node) == []


async def test_no_more_starts_at_once_than_allowed(tmp_path: Path) -> None:
    backend = SlowStart()
    async with edge(tmp_path, backend, start_concurrency=2) as node:
        creates = [asyncio.ensure_future(created(node)) for _ in range(5)]
        await until(lambda: backend.begun == 2 and node.report().creating == 5)
        backend.go.set()
        await asyncio.gather(*creates)
        assert (backend.begun, node.report().creating, node.report().live) == (5, 0, 5)


async def test_a_burst_does_not_get_past_the_limit(tmp_path: Path) -> None:
    limits = AdmissionLimits(memory_floor_mb=0, disk_floor_mb=0, max_live=3)
    async with edge(tmp_path, limits=limits) as node:
        outcomes = await asyncio.gather(*(created(node) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(one, UnschedulableError) for one in outcomes) == 17
        assert node.report().live == 3


async def test_operation_id_runs_once_also_when_asked_at_the_same_time(node: Node) -> None:
    sandbox = await created(node)
    request = ExecRequest(script="echo x >> /count; cat /count", operation_id="op")
    commands = await asyncio.gather(*(sandbox.submit(request) for _ in range(10)))
    assert len({one.command_id for one in commands}) == 1
    assert await output(sandbox, await ended(commands[0])) == b"x\n"
    with pytest.raises(ConflictError, match="operation_id"):
        await sandbox.submit(ExecRequest(script="echo other", operation_id="op"))


async def test_500_commands_at_once_each_with_its_own_output(node: Node) -> None:
    sandbox = await created(node, dummy_spec(resources=Resources(pids_limit=100_000)))
    commands = [
        await sandbox.submit(ExecRequest(script=f"echo {number}; exit {number % 200}")) for number in range(500)
    ]
    for number, command in enumerate(commands):
        result = (await ended(command)).result
        assert result is not None
        assert result.exit_code == number % 200
        assert await output(sandbox, command) == f"{number}\n".encode()
    assert sandbox.status().running_commands == 0


async def test_idle_sandbox_expires_and_a_busy_one_does_not(node: Node) -> None:
    idle = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=0.05)))
    busy = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=0.05)))
    command = await busy.submit(ExecRequest(script="sleep 0.2"))
    await until(lambda: not idle.live)
    assert idle.status().end_reason is SandboxEnd.EXPIRED_IDLE
    assert busy.live
    await ended(command)
    await until(lambda: not busy.live)


async def test_hard_limit_ends_a_busy_sandbox(node: Node) -> None:
    sandbox = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=None, ttl_max_stop=0.1)))
    command = await sandbox.submit(ExecRequest(script="sleep 1000"))
    await until(lambda: not sandbox.live)
    assert sandbox.status().end_reason is SandboxEnd.EXPIRED_MAX
    assert command.result is not None
    assert command.result.end_reason is EndReason.SANDBOX_ENDED


async def test_longer_lifetime_is_taken_at_once(node: Node) -> None:
    sandbox = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=1000)))
    await sandbox.update(lifetime=Lifetime(ttl_running_stop=0.02), labels={"a": "b"})
    assert sandbox.status().spec.labels == {"a": "b"}
    await until(lambda: not sandbox.live)


async def test_ended_sandboxes_are_forgotten_with_their_files(tmp_path: Path) -> None:
    async with edge(tmp_path, keep_ended=1) as node:
        first, second = await created(node), await created(node)
        await first.delete()
        await second.delete()
        with pytest.raises(NotFoundError):
            node.get(first.sandbox_id, project=None)
        assert node.get(second.sandbox_id, project=None) is second
        await until(lambda: not first.places.own.exists() and not any((tmp_path / "state" / "trash").iterdir()))


async def test_ended_sandboxes_are_forgotten_in_time(tmp_path: Path) -> None:
    async with edge(tmp_path, keep_ended_s=0.05) as node:
        sandbox = await created(node)
        await sandbox.delete()
        await until(lambda: not node.all(project=None))


async def test_paused_sandbox_is_resumed_by_any_operation(node: Node) -> None:
    sandbox = await created(node)
    await sandbox.pause()
    assert sandbox.state is SandboxState.PAUSED
    assert (await run(sandbox, "exit 4")).exit_code == 4
    assert sandbox.status().state is SandboxState.RUNNING


async def test_what_the_backend_lacks_is_refused_by_name(node: Node) -> None:
    sandbox = await created(node)
    with pytest.raises(UnsupportedError, match="pty"):
        await sandbox.submit(ExecRequest(script="true", pty=PtySize()))


@pytest.mark.parametrize(
    ("script", "resources", "reason"),
    [
        ("allocate 100", Resources(memory_limit_mb=10), EndReason.OOM),
        ("forks 1000", Resources(pids_limit=10), EndReason.PIDS_LIMIT),
    ],
)
async def test_limits_are_named(node: Node, script: str, resources: Resources, reason: EndReason) -> None:
    sandbox = await created(node, dummy_spec(resources=resources))
    assert (await run(sandbox, script)).end_reason is reason
    later = await run(sandbox, "exit 1")
    assert (later.end_reason, later.exit_code) == (EndReason.EXITED, 1)


async def test_timeout_and_cancel_are_told_apart(node: Node) -> None:
    sandbox = await created(node)
    assert (await run(sandbox, "sleep 1000", timeout_s=0.02)).end_reason is EndReason.TIMEOUT
    command = await sandbox.submit(ExecRequest(script="sleep 1000"))
    await until(lambda: command.given)
    await sandbox.guest.kill(command.number, 0)
    assert (await ended(command)).result.end_reason is EndReason.CANCELLED  # type: ignore[union-attr]


async def test_flood_is_capped_and_counted(node: Node) -> None:
    sandbox = await created(node)
    command = await sandbox.submit(ExecRequest(script="yes 1000000", max_output_bytes=100_000))
    result = (await ended(command)).result
    assert result is not None
    assert (result.stdout_bytes_total, result.truncated) == (2_000_000, True)
    assert await output(sandbox, command) == b"y\n" * 50_000


async def test_lost_connection_is_taken_up_without_a_gap(node: Node) -> None:
    sandbox = await created(node)
    command = await sandbox.submit(ExecRequest(script="yes 200000; sleep 0.05; echo end"))
    await until(lambda: command.stdout.total > 0)
    await sandbox.guest.aclose()
    result = (await ended(command)).result
    assert result is not None
    assert result.exit_code == 0
    assert await output(sandbox, command) == b"y\n" * 200_000 + b"end\n"


async def test_guest_gone_for_good_fails_the_sandbox(node: Node) -> None:
    sandbox = await created(node)
    command = await sandbox.submit(ExecRequest(script="sleep 1000"))
    await until(lambda: command.given)
    await sandbox.guest.shutdown(0)
    await until(lambda: not sandbox.live)
    assert sandbox.status().state is SandboxState.FAILED
    assert sandbox.status().end_reason is SandboxEnd.GUEST_LOST
    assert command.result is not None
    assert command.result.end_reason is EndReason.SANDBOX_ENDED


async def test_a_guest_that_says_nothing_any_more_is_connected_anew(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.edge.connection.PING_EVERY_S", 0.01)
    monkeypatch.setattr("opendsec.edge.connection.PING_ANSWER_S", 0.01)
    sandbox = await created(node)
    silent = sandbox.guest
    asked = asyncio.Event()

    async def ping() -> float:
        asked.set()
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(silent, "ping", ping)
    command = await sandbox.submit(ExecRequest(script="sleep 0.1; echo end"))
    await until(lambda: sandbox.guest is not silent)
    assert asked.is_set()
    assert await output(sandbox, await ended(command)) == b"end\n"


async def test_an_idle_guest_is_not_asked(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.edge.connection.PING_EVERY_S", 0.005)
    sandbox = await created(node)
    asked = 0

    async def ping() -> float:
        nonlocal asked
        asked += 1
        return 0.0

    monkeypatch.setattr(sandbox.guest, "ping", ping)
    command = await sandbox.submit(ExecRequest(script="sleep 0.1"))
    await ended(command)
    busy = asked
    await asyncio.sleep(0.05)
    assert busy >= 1
    assert asked <= busy + 1


async def test_unknown_command_is_not_found(node: Node) -> None:
    sandbox = await created(node)
    for name in ("cmd-1", "cmd-01", "1", "cmd-x", "cmd-" + "9" * 30):
        with pytest.raises(NotFoundError):
            sandbox.commands.get(name)


async def test_two_edges_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.edge.recovery.LOCK_WAIT_S", 0.0)
    async with edge(tmp_path):
        with pytest.raises(ConflictError, match="another edge"):
            async with edge(tmp_path):
                pass


def test_slots_are_reused_lowest_first() -> None:
    slots = Slots()
    slots.reserve([0, 2])
    assert [slots.take(), slots.take()] == [1, 3]
    slots.give_back(2)
    slots.give_back(0)
    assert [slots.take(), slots.take(), slots.take()] == [0, 2, 4]


async def test_oldest_output_makes_room_for_newer_and_says_so(tmp_path: Path) -> None:
    backend = DummyBackend()
    async with edge(tmp_path, backend, output_cap_bytes=1_000_000) as node:
        sandbox = await created(node)
        commands = [await ended(await sandbox.submit(ExecRequest(script="yes 200000"))) for _ in range(4)]
        small = await ended(await sandbox.submit(ExecRequest(script="echo small")))
        assert await output(sandbox, commands[3]) == b"y\n" * 200_000
        assert await output(sandbox, small) == b"small\n"
        with pytest.raises(NotFoundError, match="cmd-1 made room"):
            await output(sandbox, commands[0])
        assert commands[0].result is not None
        assert (commands[0].result.truncated, commands[0].result.stdout_bytes_total) == (True, 400_000)
    async with edge(tmp_path, backend, output_cap_bytes=1_000_000) as node:
        sandbox = node.get(sandbox.sandbox_id, project=None)
        with pytest.raises(NotFoundError, match="cmd-1 made room"):
            await output(sandbox, sandbox.commands.get("cmd-1"))
        assert sandbox.commands.get("cmd-1").result.truncated  # type: ignore[union-attr]
        assert await output(sandbox, sandbox.commands.get("cmd-4")) == b"y\n" * 200_000


async def test_old_commands_are_forgotten_with_their_operation_and_file(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.edge.kept_commands.MAX_REMEMBERED", 2)
    sandbox = await created(node)
    first = await ended(await sandbox.submit(ExecRequest(script="yes 100000", operation_id="op")))
    for _ in range(2):
        await run(sandbox, "true")
    with pytest.raises(NotFoundError):
        sandbox.commands.get(first.command_id)
    await until(lambda: not any((sandbox.places.own / "out").iterdir()))
    again = await sandbox.submit(ExecRequest(script="echo new", operation_id="op"))
    assert await output(sandbox, await ended(again)) == b"new\n"


async def test_an_ended_command_holds_no_script_and_still_knows_its_request(node: Node) -> None:
    sandbox = await created(node)
    request = ExecRequest(script="true " + "x" * 100_000, env={"A": "b" * 1000}, operation_id="op")
    command = await ended(await sandbox.submit(request))
    assert len(command.request.script or "") == 200
    assert command.status().summary == "true " + "x" * 195
    assert await sandbox.submit(request) is command
    with pytest.raises(ConflictError):
        await sandbox.submit(ExecRequest(script="true", operation_id="op"))
    by_argv = await ended(await sandbox.submit(ExecRequest(argv=("echo", "a" * 300))))
    assert by_argv.status().summary == ("echo " + "a" * 300)[:200]
