"""The dummy backend keeps the promises of the interfaces it stands in for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from opendsec.backends.base import Handle, Running, StartPlan
from opendsec.backends.dummy import DummyBackend
from opendsec.guest.base import CHUNK_BYTES, Exit, Guest, GuestError, GuestLostError, Output, StartCommand
from opendsec.model.ids import SandboxId, new_sandbox_id
from opendsec.model.image import Image, ImageConfig
from opendsec.model.spec import BackendKind, Resources, SandboxSpec

pytestmark = pytest.mark.anyio


def plan(*, resources: Resources | None = None) -> StartPlan:
    return StartPlan(
        sandbox_id=new_sandbox_id("test"),
        spec=SandboxSpec(image="any", backend=BackendKind.DUMMY, resources=resources or Resources()),
        image=Image(name="any", digest="sha256:0", layers=(), config=ImageConfig(), created_at=0),
        state_dir=Path("/nonexistent"),
        run_dir=Path("/nonexistent"),
        slot=0,
    )


async def started(*, resources: Resources | None = None) -> tuple[DummyBackend, Running]:
    backend = DummyBackend()
    await backend.open()
    return backend, await backend.start(plan(resources=resources))


async def collect(guest: Guest, command_id: int) -> tuple[bytes, bytes, Exit]:
    """Read to the end, acknowledging as an edge does."""
    streams = {1: b"", 2: b""}
    async for event in guest.events(command_id):
        if isinstance(event, Output):
            assert event.offset == len(streams[event.stream])
            streams[event.stream] += event.data
            guest.ack(command_id, len(streams[1]), len(streams[2]))
        elif isinstance(event, Exit):
            return streams[1], streams[2], event
    raise AssertionError("no exit")


async def run(guest: Guest, script: str, *, command_id: int = 1, session: str = "") -> tuple[bytes, bytes, Exit]:
    await guest.start(command_id, StartCommand(script=script, env={"A": "b c"}, session=session))
    return await collect(guest, command_id)


@pytest.mark.parametrize(
    ("script", "stdout", "code"),
    [
        ("true", b"", 0),
        ("false", b"", 1),
        ("exit 7; echo no", b"", 7),
        ("echo a  'b  c' \"$A\"", b"a b  c b c\n", 0),
        ("false && echo no || echo yes", b"yes\n", 0),
        ("cd /etc; pwd", b"/etc\n", 0),
        ("env", b"A=b c\n", 0),
        ("echo x > /tmp/f; echo y >> /tmp/f\ncat /tmp/f", b"x\ny\n", 0),
        ("yes 3", b"y\ny\ny\n", 0),
        ("nothing", b"", 127),
        ("echo 'open", b"", 2),
        ("yes > /tmp/f", b"", 1),
    ],
)
async def test_scripts(script: str, stdout: bytes, code: int) -> None:
    _, running = await started()
    out, _, end = await run(running.guest, script)
    assert (out, end.exit_code) == (stdout, code)
    assert end.stdout_total == len(stdout)


async def test_unacknowledged_output_stops_the_writer_and_nobody_else() -> None:
    _, running = await started()
    await running.guest.start(1, StartCommand(script="yes"))
    first = await anext(running.guest.events(1))
    assert isinstance(first, Output)
    assert len(first.data) == CHUNK_BYTES
    assert (await run(running.guest, "echo here", command_id=2))[0] == b"here\n"
    (known,) = [entry for entry in await running.guest.list_commands() if entry.id == 1]
    assert known.stdout_total == CHUNK_BYTES
    await running.guest.kill(1, 0)


async def test_commands_survive_their_connection() -> None:
    backend, running = await started()
    await running.guest.start(1, StartCommand(script="echo before; cat", stdin=True))
    events = running.guest.events(1)
    assert isinstance(await anext(events), Output)
    await running.guest.aclose()
    with pytest.raises(GuestLostError):
        await running.guest.ping()
    recovered = await backend.recover(running.handle)
    assert isinstance(recovered, Running)
    await recovered.guest.attach(1, 0, 0)
    await recovered.guest.write_stdin(1, 0, b"after\n", eof=True)
    out, _, end = await collect(recovered.guest, 1)
    assert (out, end.exit_code) == (b"before\nafter\n", 0)
    with pytest.raises(GuestError, match="held from offset 13"):
        await recovered.guest.attach(1, 0, 0)


async def test_a_reader_learns_of_a_lost_connection() -> None:
    _, running = await started()
    await running.guest.start(1, StartCommand(script="sleep 1000"))
    async with anyio.create_task_group() as group:
        group.start_soon(running.guest.aclose)
        with pytest.raises(GuestLostError):
            await collect(running.guest, 1)
    await running.guest.wait_closed()


async def test_timeout_and_kill_say_so() -> None:
    _, running = await started()
    await running.guest.start(1, StartCommand(script="sleep 1000", timeout_ms=5))
    end = (await collect(running.guest, 1))[2]
    assert (end.exit_code, end.signal, end.reason) == (None, 15, 1)
    await running.guest.start(2, StartCommand(script="trap '' TERM; sleep 1000"))
    await running.guest.kill(2, 5)
    end = (await collect(running.guest, 2))[2]
    assert (end.exit_code, end.signal, end.reason) == (None, 9, 2)


async def test_sessions_remember_and_end() -> None:
    _, running = await started()
    first = (await run(running.guest, "cd /etc; export X=1", session="s"))[2]
    out, _, second = await run(running.guest, "pwd; echo $X; exit 3", command_id=2, session="s")
    assert (first.session_started, second.session_started) == (True, False)
    assert (out, second.exit_code, second.session_gone) == (b"/etc\n1\n", 3, True)
    assert (await run(running.guest, "pwd", command_id=3, session="s"))[0] == b"/\n"


async def test_session_commands_run_one_after_the_other() -> None:
    _, running = await started()
    await running.guest.start(1, StartCommand(script="sleep 0.01; export X=1", session="s"))
    assert (await run(running.guest, "echo $X", command_id=2, session="s"))[0] == b"1\n"


async def test_a_paused_sandbox_does_nothing() -> None:
    backend, running = await started()
    await backend.pause(running.handle)
    await running.guest.start(1, StartCommand(script="echo hi"))
    assert not (await running.guest.list_commands())[0].ended
    await backend.resume(running.handle)
    assert (await collect(running.guest, 1))[0] == b"hi\n"


async def test_limits_are_counted() -> None:
    backend, running = await started(resources=Resources(memory_limit_mb=10, pids_limit=8, disk_limit_mb=16))
    assert (await run(running.guest, "allocate 11"))[2].signal == 9
    assert (await run(running.guest, "forks 8", command_id=2))[2].exit_code == 1
    with pytest.raises(GuestError, match="No space left"):
        await running.guest.write_file("/big", _chunks(bytes(17 << 20)))
    await running.guest.write_file("/big", _chunks(bytes(16 << 20)))
    usage = backend.usage(running.handle)
    assert (usage.oom_kills, usage.pids_denied, usage.disk_full) == (1, 1, True)


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_files_and_trees() -> None:
    _, running = await started()
    guest = running.guest
    await guest.write_file("/a/b c/é", _chunks(b"hello"), mode=0o600, parents=True)
    stat, data = await guest.open_read("/a/b c/é", offset=1, length=3)
    assert (stat.mode, stat.size, [chunk async for chunk in data]) == (0o600, 5, [b"ell"])
    packed = b"".join([chunk async for chunk in guest.pack("/a")])
    assert await guest.unpack("/copy", _chunks(packed)) == (1, 5)
    assert (await guest.stat("/copy/b c/é")).size == 5
    await guest.move("/copy/b c/é", "/moved")
    await guest.remove("/a", recursive=True)
    with pytest.raises(GuestError) as error:
        await guest.stat("/a")
    assert (error.value.code, error.value.errno) == ("file", 2)
    assert [entry.path for entry in await guest.list_dir("/copy")] == ["b c"]


async def test_watch_and_dial() -> None:
    _, running = await started()
    watch = running.guest.watch("/tmp")
    seen: list[tuple[str, str]] = []

    async def look() -> None:
        seen.append(await anext(watch))

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        await anyio.sleep(0)
        await running.guest.write_file("/tmp/x", _chunks(b""))
    assert seen == [("created", "/tmp/x")]
    stream = await running.guest.dial(7)
    await stream.write(b"ping")
    await stream.write_eof()
    assert (await stream.read(), await stream.read()) == (b"ping", b"")
    with pytest.raises(GuestError, match="refused"):
        await running.guest.dial(80)


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (StartCommand(argv=("nothing",)), "exec"),
        (StartCommand(script="true", cwd="/nowhere"), "bad_cwd"),
        (StartCommand(script="true", user="daisy"), "no_user"),
        (StartCommand(script="true", pty=(24, 80)), "unsupported"),
    ],
)
async def test_refusals(start: StartCommand, code: str) -> None:
    _, running = await started()
    with pytest.raises(GuestError) as error:
        await running.guest.start(1, start)
    assert error.value.code == code
    assert await running.guest.list_commands() == []


async def test_stop_and_destroy_are_final_and_idempotent() -> None:
    backend, running = await started()
    for _ in range(2):
        await backend.stop(running.handle, grace_s=0)
        await backend.destroy(
            running.handle.sandbox_id, None, state_dir=Path("/nonexistent"), run_dir=Path("/nonexistent"), slot=0
        )
    assert await backend.recover(running.handle) is None
    assert running.guest.closed
    unknown = Handle(backend=BackendKind.DUMMY, sandbox_id=SandboxId("sbx-x-none"))
    assert await backend.reconnect(unknown) is None
