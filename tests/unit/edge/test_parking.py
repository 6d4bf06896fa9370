"""A backend that parks: pausing ends what runs and the connection with it, and nothing is lost by that.

The dummy backend with `parks` cuts the connection at every pause, as a virtual machine that is saved and ended does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.edge.edges import created, edge, ended, output, run, until

from opendsec.backends.base import Handle
from opendsec.backends.dummy import DummyBackend
from opendsec.edge import connection
from opendsec.errors import NodeError, SandboxLostError
from opendsec.guest.base import Guest, GuestLostError
from opendsec.model.command import EndReason, ExecRequest
from opendsec.model.node import SandboxEnd, SandboxState

pytestmark = pytest.mark.anyio

LONG = "echo a; sleep 0.05; echo b; sleep 0.05; yes 20000; echo end"
WHOLE = b"a\nb\n" + b"y\n" * 20_000 + b"end\n"


async def test_a_command_goes_on_after_a_pause_without_a_gap(tmp_path: Path) -> None:
    async with edge(tmp_path, DummyBackend(parks=True)) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script=LONG))
        for _ in range(3):
            await sandbox.pause()
            await asyncio.sleep(0.02)
            assert (sandbox.state, command.done) == (SandboxState.PAUSED, False)
            await sandbox.resume()
        assert (await ended(command)).result is not None
        assert await output(sandbox, command) == WHOLE


async def test_more_pauses_than_lost_connections_are_forgiven(tmp_path: Path) -> None:
    async with edge(tmp_path, DummyBackend(parks=True)) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script="sleep 0.3; echo still here"))
        for _ in range(3 * connection.RECONNECTS):
            await sandbox.pause()
            await sandbox.resume()
        await ended(command)
        assert await output(sandbox, command) == b"still here\n"


async def test_any_request_wakes_it_first(tmp_path: Path) -> None:
    async with edge(tmp_path, DummyBackend(parks=True)) as node:
        sandbox = await created(node)
        await run(sandbox, "echo kept > /f")
        await sandbox.pause()
        await run(sandbox, "cat /f")
        await sandbox.pause()
        async with sandbox.working() as guest:
            assert (await guest.stat("/f")).size == 5
        cat = await sandbox.submit(ExecRequest(script="cat", stdin=True))
        await sandbox.pause()

        async def words() -> AsyncIterator[bytes]:
            yield b"typed"

        async with sandbox.working():
            await sandbox.commands.write_stdin(cat, None, words(), eof=True)
        await ended(cat)
        assert await output(sandbox, cat) == b"typed"


async def test_an_operation_the_pause_cut_says_so(tmp_path: Path) -> None:
    async with edge(tmp_path, DummyBackend(parks=True)) as node:
        sandbox = await created(node)

        async def working() -> None:
            async with sandbox.working() as guest:
                await sandbox.pause()
                await guest.ping()

        with pytest.raises(SandboxLostError, match="paused meanwhile") as raised:
            await working()
        assert raised.value.retryable
        assert sandbox.state is SandboxState.PAUSED


class Gated(DummyBackend):
    """Pause and resume wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(parks=True)
        self.pausing, self.resuming = asyncio.Event(), asyncio.Event()
        self.may_pause, self.may_resume = asyncio.Event(), asyncio.Event()
        self.may_pause.set()
        self.may_resume.set()

    async def pause(self, handle: Handle) -> None:
        await super().pause(handle)  # what runs has ended; its state is still being written
        self.pausing.set()
        await self.may_pause.wait()

    async def resume(self, handle: Handle) -> None:
        self.resuming.set()
        await self.may_resume.wait()
        await super().resume(handle)


async def test_the_end_of_the_connection_while_pausing_or_resuming_is_no_failure(tmp_path: Path) -> None:
    backend = Gated()
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script=LONG))
        backend.may_pause.clear()
        pausing = asyncio.ensure_future(sandbox.pause())
        await backend.pausing.wait()
        await asyncio.sleep(0.05)  # whoever saw the connection end has had its chance
        assert (sandbox.state, sandbox.life.end_reason) == (SandboxState.PAUSING, None)
        backend.may_pause.set()
        await pausing
        backend.may_resume.clear()
        resuming = asyncio.ensure_future(sandbox.resume())
        await backend.resuming.wait()
        await asyncio.sleep(0.05)
        assert (sandbox.state, sandbox.life.end_reason) == (SandboxState.RESUMING, None)
        backend.may_resume.set()
        await resuming
        await ended(command)
        assert await output(sandbox, command) == WHOLE


@pytest.mark.parametrize("state", [SandboxState.PAUSING, SandboxState.PAUSED, SandboxState.RESUMING])
async def test_delete_wins_whatever_it_was_at(tmp_path: Path, state: SandboxState) -> None:
    backend = Gated()
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script="sleep 1000"))
        if state is SandboxState.PAUSING:
            backend.may_pause.clear()
            asking = asyncio.ensure_future(sandbox.pause())
            await backend.pausing.wait()
        else:
            await sandbox.pause()
            backend.may_resume.clear()
            asking = asyncio.ensure_future(sandbox.resume() if state is SandboxState.RESUMING else asyncio.sleep(0))
            if state is SandboxState.RESUMING:
                await backend.resuming.wait()
        assert sandbox.state is state
        async with asyncio.timeout(30):
            await sandbox.delete()
            await asyncio.wait({asking})
        assert sandbox.life.end_reason is SandboxEnd.STOPPED
        assert (await ended(command)).result is not None
        assert command.result is not None
        assert command.result.end_reason is EndReason.SANDBOX_ENDED
        assert backend._machines == {}
        if asking.exception() is None:
            assert state is SandboxState.PAUSED


async def test_a_pause_that_fails_leaves_it_running_with_its_commands(tmp_path: Path) -> None:
    class Failing(DummyBackend):
        async def pause(self, handle: Handle) -> None:
            machine = self._machine(handle)
            machine.disconnect(machine.live_connection)  # it had come so far
            raise NodeError("the disk is full")

    async with edge(tmp_path, Failing(parks=True)) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script=LONG))
        with pytest.raises(Exception, match="could not be paused"):
            await sandbox.pause()
        await ended(command)
        assert await output(sandbox, command) == WHOLE


async def test_one_that_does_not_answer_after_its_resume_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(DummyBackend):
        async def reconnect(self, handle: Handle) -> Guest | None:
            raise GuestLostError("no answer")

    monkeypatch.setattr(connection, "RECONNECT_PAUSE_S", 0.01)
    async with edge(tmp_path, Deaf(parks=True)) as node:
        sandbox = await created(node)
        await sandbox.pause()
        with pytest.raises(Exception, match="does not answer after it was resumed"):
            await sandbox.resume()
        await sandbox.wait_ended()
        assert sandbox.life.end_reason is SandboxEnd.GUEST_LOST


async def test_a_parked_one_stays_parked_over_a_restart_of_the_edge(tmp_path: Path) -> None:
    backend = DummyBackend(parks=True)
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        sandbox_id = sandbox.sandbox_id
        await run(sandbox, "echo x >> /count", operation_id="first")
        command = await sandbox.submit(ExecRequest(script=LONG + "; echo y >> /count", operation_id="second"))
        await sandbox.pause()
        assert not command.done
    for _ in range(2):
        async with edge(tmp_path, backend) as node:
            sandbox = node.get(sandbox_id, project=None)
            await asyncio.sleep(0.05)
            assert (sandbox.state, backend._machines[sandbox_id].frozen) == (SandboxState.PAUSED, True)
            assert (sandbox.commands.running, sandbox.life.busy) == (1, 1)
    async with edge(tmp_path, backend) as node:
        sandbox = node.get(sandbox_id, project=None)
        await sandbox.resume()
        command = await sandbox.submit(ExecRequest(script=LONG + "; echo y >> /count", operation_id="second"))
        await ended(command)
        assert await output(sandbox, command) == WHOLE
        count = await sandbox.submit(ExecRequest(script="cat /count"))
        await ended(count)
        assert await output(sandbox, count) == b"x\ny\n"
        await until(lambda: not backend._machines[sandbox_id].commands)


async def test_a_parked_one_that_is_found_can_be_deleted_unwoken(tmp_path: Path) -> None:
    backend = Gated()
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        await sandbox.submit(ExecRequest(script="sleep 1000"))
        await sandbox.pause()
    backend.may_resume.clear()
    async with edge(tmp_path, backend) as node:
        async with asyncio.timeout(30):
            await node.get(sandbox.sandbox_id, project=None).delete()
        assert (backend._machines, backend.resuming.is_set()) == ({}, False)


@pytest.mark.parametrize("come_so_far", [False, True])
async def test_an_edge_that_dies_while_it_pauses_is_followed_by_one_that_finishes_it(
    tmp_path: Path, come_so_far: bool
) -> None:
    class Cut(DummyBackend):
        cut = asyncio.Event()

        async def pause(self, handle: Handle) -> None:
            if come_so_far or self.cut.is_set():
                await super().pause(handle)
            if not self.cut.is_set():
                self.cut.set()
                await asyncio.Event().wait()

    backend = Cut(parks=True)
    async with edge(tmp_path, backend) as node:
        sandbox = await created(node)
        command = await sandbox.submit(ExecRequest(script=LONG, operation_id="one"))
        pausing = asyncio.ensure_future(sandbox.pause())
        await backend.cut.wait()
    pausing.cancel()
    async with edge(tmp_path, backend) as node:
        sandbox = node.get(sandbox.sandbox_id, project=None)
        assert (sandbox.state, backend._machines[sandbox.sandbox_id].frozen) == (SandboxState.PAUSED, True)
        await sandbox.resume()
        command = await sandbox.submit(ExecRequest(script=LONG, operation_id="one"))
        await ended(command)
        assert await output(sandbox, command) == WHOLE


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_in_whatever_order(tmp_path: Path, seed: int) -> None:
    """Pauses, resumes, commands, lost connections and restarts by chance: each command has run once, whole."""
    dice = random.Random(seed)
    backend = DummyBackend(parks=True)
    asked: dict[str, ExecRequest] = {}
    sandbox_id = None
    for _ in range(3):
        async with edge(tmp_path, backend) as node:
            sandbox = await created(node) if sandbox_id is None else node.get(sandbox_id, project=None)
            sandbox_id = sandbox.sandbox_id
            for _ in range(12):
                step = dice.choice(("pause", "resume", "both", "submit", "submit", "drop", "rest"))
                if step == "submit":
                    name = f"op{len(asked)}"
                    asked[name] = ExecRequest(
                        script=f"echo {name}; sleep {dice.choice((0, 0.01, 0.03))}; yes 9000; echo {name} >> /ran",
                        operation_id=name,
                    )
                    await sandbox.submit(asked[name])
                elif step == "both":
                    with contextlib.suppress(SandboxLostError):
                        await asyncio.gather(sandbox.pause(), sandbox.resume())
                elif step == "drop":
                    machine = backend._machines[sandbox_id]
                    machine.disconnect(machine.live_connection)
                elif step == "rest":
                    await asyncio.sleep(dice.random() / 50)
                else:
                    await (sandbox.pause() if step == "pause" else sandbox.resume())
    async with edge(tmp_path, backend) as node:
        sandbox = node.get(sandbox_id, project=None)  # type: ignore[arg-type]
        for name, request in asked.items():
            command = await ended(await sandbox.submit(request))
            assert command.result is not None, command.error
            assert command.result.exit_code == 0
            assert await output(sandbox, command) == f"{name}\n".encode() + b"y\n" * 9000
        ran = await ended(await sandbox.submit(ExecRequest(script="cat /ran; true")))
        assert sorted((await output(sandbox, ran)).split()) == sorted(name.encode() for name in asked)
        await sandbox.delete()
        assert backend._machines == {}
