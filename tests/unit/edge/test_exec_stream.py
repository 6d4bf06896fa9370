"""The exec stream as the ASGI server sees it: silence, a client that has gone, an error after the beginning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.edge.edges import created, dummy_spec, edge, ended, output, until

from opendsec.edge import exec_routes
from opendsec.edge.exec_routes import ExecRoutes
from opendsec.edge.journal import Record
from opendsec.edge.node import Node
from opendsec.edge.sandbox import Sandbox
from opendsec.errors import ExecError, NoShellError, SandboxLostError
from opendsec.guest.base import GuestError, StartCommand
from opendsec.model.command import EndReason, ExecRequest
from opendsec.model.spec import Lifetime
from opendsec.server.asgi import ClientGoneError
from opendsec.wire import codec
from opendsec.wire.contracts import EXEC_ERROR, EXEC_KEEPALIVE, EXEC_RESULT, EXEC_STARTED, EXEC_STDOUT
from opendsec.wire.frames import Frame, FrameParser

pytestmark = pytest.mark.anyio


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with edge(tmp_path) as one:
        yield one


class Client:
    """One request to a raw route, and what came back."""

    def __init__(self, path: str, body: bytes = b"", *, query: str = "") -> None:
        self.scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": []}
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def frames(self) -> list[Frame]:
        body = b"".join(message.get("body", b"") for message in self.sent)
        return list(FrameParser().feed(body))

    @property
    def over(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


async def start(node: Node, sandbox: Sandbox, client: Client) -> None:
    await ExecRoutes(node).start(sandbox.sandbox_id, client.scope, client.receive, client.send)


async def gone(route: Awaitable[None]) -> bool:
    """Whether it ended because the client had gone."""
    try:
        await route
    except ClientGoneError:
        return True
    return False


def asking(script: str) -> bytes:
    return codec.encode(ExecRequest(script=script))


async def test_short_command_is_answered_in_one_piece(node: Node) -> None:
    sandbox = await created(node)
    client = Client("/", asking("echo hi"))
    await start(node, sandbox, client)
    assert [frame.type for frame in client.frames()] == [EXEC_STARTED, EXEC_STDOUT, EXEC_RESULT]
    assert [message["type"] for message in client.sent] == ["http.response.start", "http.response.body"]


async def test_silence_is_broken_by_keepalives(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_routes, "KEEPALIVE_S", 0.02)
    sandbox = await created(node)
    client = Client("/", asking("sleep 0.1; echo hi"))
    await start(node, sandbox, client)
    kinds = [frame.type for frame in client.frames()]
    assert kinds[0] == EXEC_STARTED
    assert EXEC_KEEPALIVE in kinds
    assert kinds[-2:] == [EXEC_STDOUT, EXEC_RESULT]


async def test_client_that_left_is_noticed_and_its_command_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_routes, "KEEPALIVE_S", 0.02)
    sandbox = await created(node)
    client = Client("/", asking("sleep 1000"))
    following = asyncio.ensure_future(start(node, sandbox, client))
    await until(lambda: bool(client.sent))
    client.left.set()
    await asyncio.wait_for(following, 30)
    assert not client.over
    command = sandbox.commands.get("cmd-1")
    assert not command.done
    assert not command._watchers


async def test_session_that_is_busy_begins_its_stream_after_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_routes, "START_WAIT_S", 0.02)
    sandbox = await created(node)
    await sandbox.submit(ExecRequest(script="sleep 0.1", session="s"))
    client = Client("/", codec.encode(ExecRequest(script="exit 6", session="s")))
    await start(node, sandbox, client)
    kinds = [frame.type for frame in client.frames()]
    assert (kinds[0], kinds[-1]) == (EXEC_STARTED, EXEC_RESULT)


async def test_refusal_after_the_stream_began_is_its_last_frame(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_routes, "START_WAIT_S", 0.02)
    sandbox = await created(node)

    async def refuse_late(number: int, plan: object) -> int:
        await asyncio.sleep(0.05)
        raise GuestError("no_shell", "the image has no shell")

    monkeypatch.setattr(sandbox.guest, "start", refuse_late)
    client = Client("/", asking("true"))
    await start(node, sandbox, client)
    kinds = [frame.type for frame in client.frames()]
    assert (kinds, client.over) == ([EXEC_STARTED, EXEC_ERROR], True)
    error = codec.decode_error(client.frames()[-1].payload)  # as the SDK reads it
    assert isinstance(error, NoShellError)


async def test_stdin_nobody_reads_is_given_up_when_its_sender_leaves(node: Node) -> None:
    sandbox = await created(node)
    command = await sandbox.submit(ExecRequest(script="sleep 1000", stdin=True))
    await until(lambda: command.given)
    client = Client("/", b"x" * 600_000, query="offset=0")
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        writing = group.create_task(
            gone(ExecRoutes(node).stdin(sandbox.sandbox_id, "cmd-1", client.scope, client.receive, client.send))
        )
        await until(command.stdin.turn.locked)
        client.left.set()
    assert writing.result()
    assert not command.stdin.turn.locked()
    assert sandbox.life.busy == 1  # the command itself


class SlowJournal:
    """What is journalled is written when it is let through; no START goes out before."""

    def __init__(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_through = asyncio.Event()
        self._append = sandbox.journal.append
        monkeypatch.setattr(sandbox.journal, "append", self._appended)

    async def _appended(self, record: Record) -> int:
        await self.let_through.wait()
        return await self._append(record)


async def test_stdin_waits_for_a_command_that_has_not_begun(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await created(node)
    late = SlowJournal(sandbox, monkeypatch)
    command = await sandbox.submit(ExecRequest(script="cat", stdin=True))
    client = Client("/", b"hello", query="offset=0&eof=true")
    route = ExecRoutes(node).stdin(sandbox.sandbox_id, "cmd-1", client.scope, client.receive, client.send)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(route)
        await until(command.stdin.turn.locked)
        late.let_through.set()
    assert await output(sandbox, await ended(command)) == b"hello"


async def test_one_that_has_not_begun_is_ended_when_it_has(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await created(node)
    late = SlowJournal(sandbox, monkeypatch)
    command = await sandbox.submit(ExecRequest(script="sleep 1000"))
    client = Client("/", query="grace=0")
    route = ExecRoutes(node).end(sandbox.sandbox_id, "cmd-1", client.scope, client.receive, client.send)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        ending = group.create_task(route)
        await until(lambda: sandbox.life.busy == 2 or ending.done())
        late.let_through.set()
    result = (await ended(command)).result
    assert result is not None
    assert result.end_reason is EndReason.CANCELLED


async def test_one_that_waits_for_its_session_is_ended_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await created(node)
    asked: list[int] = []

    async def never(_number: int, _plan: StartCommand) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    async def kill(number: int, _grace_ms: int) -> None:
        asked.append(number)

    monkeypatch.setattr(sandbox.guest, "start", never)
    monkeypatch.setattr(sandbox.guest, "kill", kill)
    command = await sandbox.submit(ExecRequest(script="true"))
    client = Client("/", query="grace=0")
    await ExecRoutes(node).end(sandbox.sandbox_id, "cmd-1", client.scope, client.receive, client.send)
    assert asked == [command.number]


async def test_what_waits_for_a_command_that_never_begins_is_told_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await created(node)
    late = SlowJournal(sandbox, monkeypatch)
    command = await sandbox.submit(ExecRequest(script="cat", stdin=True))
    with pytest.raises(SandboxLostError, match="has not been given") as raised:
        await command.carried(wait_s=0.02)
    assert raised.value.retryable
    late.let_through.set()
    await sandbox.delete()
    assert command.done
    assert await command.carried() is None


async def test_taking_output_of_an_ended_command_starts_the_idle_time_anew(node: Node) -> None:
    sandbox = await created(node, dummy_spec(lifetime=Lifetime(ttl_running_stop=1000)))
    body = codec.encode(ExecRequest(script="echo hi", operation_id="op"))
    await start(node, sandbox, Client("/", body))
    before = sandbox.life.used_at
    await start(node, sandbox, Client("/", body))
    again = sandbox.life.used_at
    client = Client("/")
    await ExecRoutes(node).output(sandbox.sandbox_id, "cmd-1", client.scope, client.receive, client.send)
    assert before < again < sandbox.life.used_at
    assert sandbox.life.busy == 0


async def test_a_refusal_told_twice_belongs_to_each_request(node: Node) -> None:
    sandbox = await created(node)
    told = []
    for _ in range(2):
        with pytest.raises(ExecError) as raised:
            await start(node, sandbox, Client("/", codec.encode(ExecRequest(argv=("/missing",), operation_id="op"))))
        told.append(raised.value)
    assert told[0] is not told[1]
    assert str(told[0]) == str(told[1])
    assert [one.command_id for one in sandbox.commands.all()] == ["cmd-1"]


async def test_unknown_parameter_is_named(node: Node) -> None:
    sandbox = await created(node)
    with pytest.raises(Exception, match="odd"):
        await start(node, sandbox, Client("/", asking("true"), query="odd=1"))
