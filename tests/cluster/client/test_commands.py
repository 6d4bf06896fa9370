"""Commands through the SDK when the way there is bad: an exact result or an error, and everything runs once."""

from __future__ import annotations

import anyio
import pytest
from tests.cluster.client.fake_server import KEY, FakeServer, Fault, Program

import opendsec
from opendsec import EndReason

pytestmark = pytest.mark.anyio

COMMANDS = r"POST .*/commands$"
OUTPUT = r"GET .*/output$"
BIG = bytes(range(256)) * 4096


async def test_result_has_everything(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stdout=b"out\r\n\x00\n\nlast", stderr="é\n".encode(), exit_code=3)
    result = await sandbox.run_shell("x", cwd="/srv", env={"A": "b c"}, user="app", timeout=5)
    assert (result.exit_code, result.end_reason, result.truncated) == (3, EndReason.EXITED, False)
    assert result.stdout_bytes == b"out\r\n\x00\n\nlast"
    assert result.stderr == "é\n"
    sent = server.commands[result.command_id].request
    assert (sent.cwd, dict(sent.env), sent.user, sent.timeout_s) == ("/srv", {"A": "b c"}, "app", 5)
    assert sent.operation_id


async def test_text_split_between_frames_is_whole(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.piece_bytes = 1
    server.programs["x"] = Program(stdout="aé€😀".encode() + b"\xff")
    result = await sandbox.run_shell("x")
    assert result.stdout == "aé€😀\ufffd"
    server.programs["y"] = Program(stdout="aé€😀".encode() + b"\xe2")
    process = await sandbox.commands.start("y")
    assert "".join([text async for text in process.stdout.text()]) == "aé€😀\ufffd"


@pytest.mark.parametrize("after", [0, 5, 200, 70_000, 1_000_000])
async def test_cut_stream_is_continued_without_loss(server: FakeServer, sandbox: opendsec.Sandbox, after: int) -> None:
    server.programs["x"] = Program(stdout=BIG, stderr=b"e" * 1000, exit_code=7)
    server.faults = [Fault(COMMANDS, after=after), Fault(OUTPUT, times=2, after=300_000)]
    result = await sandbox.run_shell("x")
    assert (result.exit_code, result.stdout_bytes, result.stderr_bytes) == (7, BIG, b"e" * 1000)
    assert len(server.commands) == 1


async def test_doubled_bytes_are_delivered_once(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stdout=BIG)
    server.faults = [Fault(COMMANDS, kind="double", times=9)]
    assert (await sandbox.run_shell("x")).stdout_bytes == BIG


async def test_more_output_than_was_to_be_kept_is_an_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stderr=BIG)
    assert (await sandbox.run_shell("x", max_output_bytes=len(BIG))).stderr_bytes == BIG
    with pytest.raises(opendsec.ProtocolError, match="more than the 1000 bytes") as caught:
        await sandbox.run_shell("x", max_output_bytes=1000)
    assert caught.value.sandbox_id == sandbox.id


async def test_malformed_frames_are_an_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.faults = [Fault(COMMANDS, kind="garble", times=99), Fault(OUTPUT, kind="garble", times=99)]
    with pytest.raises(opendsec.ProtocolError) as caught:
        await sandbox.run_shell("x")
    assert caught.value.sandbox_id == sandbox.id
    assert caught.value.detail["operation_id"]


async def test_result_before_its_output_is_an_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stdout=b"tail", early_result=True)
    with pytest.raises(opendsec.ProtocolError, match="before the end of the output"):
        await sandbox.run_shell("x")


async def test_no_success_when_the_server_stays_away(
    server: FakeServer, sandbox: opendsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.client._async.transport.KNOWN_PATIENCE_S", 0.5)
    server.faults = [Fault(COMMANDS, after=200), Fault(OUTPUT, times=999)]
    server.programs["x"] = Program(stdout=BIG)
    with pytest.raises(opendsec.TransportError) as caught:
        await sandbox.run_shell("x")
    assert caught.value.detail["command_id"] == "cmd-1"
    assert caught.value.retryable


async def test_server_that_forgot_the_command_makes_it_lost(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    process = await sandbox.commands.start("x")
    server.commands.clear()
    with pytest.raises(opendsec.CommandLostError):
        await process.wait(timeout=60)


async def test_refused_and_swallowed_starts_run_once(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.faults = [Fault(COMMANDS, kind="swallow", times=2), Fault(COMMANDS, kind="refuse", times=2)]
    server.programs["x"] = Program(stdout=b"once")
    assert (await sandbox.run_shell("x")).stdout == "once"
    assert len(server.commands) == 1
    assert server.count("POST", "/commands$") == 5


async def test_own_operation_id_returns_the_recorded_outcome(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    first = await sandbox.run_shell("x", operation_id="mine")
    second = await sandbox.run_shell("x", operation_id="mine")
    assert first.command_id == second.command_id
    with pytest.raises(opendsec.ConflictError):
        await sandbox.run_shell("y", operation_id="mine")


async def test_silent_connection_is_replaced(
    server: FakeServer, sandbox: opendsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.client._async.follow.SILENCE_S", 0.3)
    server.programs["x"] = Program(stdout=BIG)
    server.faults = [Fault(COMMANDS, kind="mute", after=100_000)]
    assert (await sandbox.run_shell("x")).stdout_bytes == BIG
    assert server.count("GET", "/output$") == 1


async def test_keepalives_keep_a_quiet_command_alive(
    server: FakeServer, sandbox: opendsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.client._async.follow.SILENCE_S", 0.4)
    server.programs["x"] = Program(holds=True)
    process = await sandbox.commands.start("x")
    with pytest.raises(opendsec.DeadlineError):
        await process.wait(timeout=1.0)
    assert server.count("GET", "/output$") == 1
    await process.kill()
    assert (await process.wait(timeout=60)).end_reason is EndReason.CANCELLED


async def test_stdin_arrives_exactly_once(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["cat"] = Program(copies_stdin=True)
    server.faults = [Fault(r"POST .*/stdin$", kind="swallow", times=3)]
    data = BIG * 3 + b"no newline at the end"
    result = await sandbox.run_shell("cat", stdin=data)
    assert result.stdout_bytes == data
    assert (await sandbox.run_shell("cat", stdin="")).stdout == ""
    assert (await sandbox.run_shell("cat", stdin="é")).stdout == "é"


@pytest.mark.parametrize(
    "refusal", [opendsec.ConflictError("it has ended"), opendsec.CommandError("closed", detail={"errno": "EPIPE"})]
)
async def test_program_that_does_not_want_its_stdin(
    server: FakeServer, sandbox: opendsec.Sandbox, refusal: opendsec.OpenDSecError
) -> None:
    server.programs["true"] = Program(ignores_stdin=refusal)
    assert (await sandbox.run_shell("true", stdin=BIG * 3)).exit_code == 0
    process = await sandbox.commands.start("true", stdin=True)
    with pytest.raises(opendsec.ConflictError):
        await process.stdin.write(b"x")
    await process.stdin.close()


async def test_hole_in_stdin_is_an_error(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["cat"] = Program(copies_stdin=True)
    server.forgets_stdin = True
    with pytest.raises(opendsec.ConflictError):
        await sandbox.run_shell("cat", stdin=BIG * 3)


async def test_truncation_is_told(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stdout=b"kept", truncated=True, total_extra=10)
    result = await sandbox.run_shell("x")
    assert (result.truncated, result.details.stdout_bytes_total) == (True, 14)


async def test_check_names_the_failure(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["bad"] = Program(stderr=b"no such thing\n", exit_code=2)
    server.programs["slow"] = Program(exit_code=137, end_reason=EndReason.TIMEOUT)
    server.programs["gone"] = Program(exit_code=None, end_reason=EndReason.LOST)
    with pytest.raises(opendsec.CommandFailedError, match="no such thing"):
        await sandbox.run_shell("bad", check=True)
    with pytest.raises(opendsec.CommandTimeoutError):
        await sandbox.run_shell("slow", check=True)
    with pytest.raises(opendsec.CommandLostError):
        await sandbox.run_shell("gone", check=True)
    assert (await sandbox.run_shell("gone")).exit_code is None


async def test_cancelled_call_ends_the_command(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(holds=True)
    with anyio.move_on_after(0.3):
        await sandbox.run_shell("x")
    assert server.commands["cmd-1"].killed


async def test_streams_can_be_read_apart(
    server: FakeServer, sandbox: opendsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendsec.client._async.process.BUFFER_BYTES", 100_000)
    server.programs["x"] = Program(stdout=BIG, stderr=b"e" * 500_000, exit_code=1)
    process = await sandbox.commands.start("x")
    assert (await process.wait()).exit_code == 1
    assert await process.stderr.read() == b"e" * 500_000
    assert await process.stdout.read() == BIG
    assert process.offsets == (len(BIG), 500_000)
    assert await process.stdout.read() == b""


async def test_readers_and_waiters_of_one_process_do_not_block_each_other(
    server: FakeServer, sandbox: opendsec.Sandbox
) -> None:
    server.programs["x"] = Program(holds=True, stdout=BIG, stderr=b"e" * 1000)
    process = await sandbox.commands.start("x")
    read: dict[str, bytes] = {}

    async def reader(name: str, stream: opendsec.ProcessOutput) -> None:
        read[name] = await stream.read()

    async with anyio.create_task_group() as group:
        group.start_soon(reader, "out", process.stdout)
        group.start_soon(reader, "err", process.stderr)
        with anyio.fail_after(2):
            with pytest.raises(opendsec.DeadlineError):
                await process.wait(timeout=0.2)
        await process.kill()
        await process.wait()
    assert read == {"out": BIG, "err": b"e" * 1000}


async def test_attach_continues_from_offsets(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["x"] = Program(stdout=b"0123456789")
    started = await sandbox.commands.start(["x"])
    again = await sandbox.commands.attach(started.id, stdout_offset=6)
    assert await again.stdout.read() == b"6789"
    with pytest.raises(opendsec.NotFoundError):
        await sandbox.commands.attach("cmd-99")
    assert [status.command_id for status in await sandbox.commands.list()] == [started.id]


async def test_process_stdin_and_signals(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    server.programs["cat"] = Program(copies_stdin=True)
    process = await sandbox.commands.start("cat", stdin=True)
    await process.stdin.write("one ")
    await process.stdin.write(b"two")
    await process.send_signal(10)
    await process.resize(rows=10, cols=20)
    await process.stdin.close()
    await process.stdin.close()
    assert await process.stdout.read() == b"one two"
    with pytest.raises(opendsec.ConflictError):
        await process.stdin.write(b"late")


async def test_bad_arguments_are_named_before_anything_is_sent(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    before = len(server.requests)
    for arguments, name in (({"timeout": 0}, "timeout"), ({"cwd": "here"}, "cwd"), ({"env": {"": "x"}}, "env")):
        with pytest.raises(opendsec.InvalidSpecError) as caught:
            await sandbox.run_shell("x", **arguments)
        assert caught.value.detail["field"] == name
    assert len(server.requests) == before


async def test_running_commands_cannot_keep_a_stop_out(server: FakeServer) -> None:
    server.programs["x"] = Program(holds=True)
    async with opendsec.DSecClient(server.url, KEY, timeout=5, max_connections=8) as client:
        sandbox = await client.run_container(opendsec.DSecContainerRunArgs(container_image="debian"))
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(sandbox.run_shell, "x")
            with anyio.fail_after(10):
                while len(server.commands) < 6:
                    await anyio.sleep(0.01)
            assert (await sandbox.stop()).state == "stopped"
            assert server.connections <= 8
            group.cancel_scope.cancel()
    assert [command.killed for command in server.commands.values()] == [True] * 6


async def test_many_commands_at_once_share_the_pool(server: FakeServer, sandbox: opendsec.Sandbox) -> None:
    results: list[int | None] = []

    async def one() -> None:
        results.append((await sandbox.run_shell("x")).exit_code)

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one)
    assert results == [0] * 200
    assert server.connections <= 202
    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(one)
    assert server.connections <= 202
