"""Programs inside that keep the agent from its work: every command still ends in time, and with its own output."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.node.guest.agents import ENV, PLAIN, WAIT_S, Agent, Connect, Shell, until

from opendsec.guest import protocol
from opendsec.guest.base import CommandEvent, Exit, GuestError, Output, StartCommand
from opendsec.guest.channel import Channel
from opendsec.guest.protocol import pack_fields

pytestmark = [pytest.mark.anyio, pytest.mark.root]

SOURCE = Path(__file__).with_name("hostile.c")
VICTIM, TRACER = 1001, 1002
STREAMS, WINDOW_KIB = 16, 256


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("hostile") / "hostile"
    subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-o", program, SOURCE], check=True, timeout=120)
    return str(program)


async def first_output(events: AsyncIterator[CommandEvent]) -> bytes:
    async for event in events:
        if isinstance(event, Output):
            return event.data
    raise AssertionError("no output")


async def end_of(events: AsyncIterator[CommandEvent], timeout_s: float = WAIT_S) -> Exit:
    async with asyncio.timeout(timeout_s):
        async for event in events:
            if isinstance(event, Exit):
                return event
    raise AssertionError("no exit")


async def held(channel: Channel, hostile: str, command: StartCommand) -> AsyncIterator[CommandEvent]:
    """Events of a command that prints a pid, which another command's process holds in its exit stop from now on."""
    await channel.start(VICTIM, command)
    events = channel.events(VICTIM)
    pid = (await first_output(events)).decode().strip()
    await channel.start(TRACER, StartCommand(argv=(hostile, "hold", pid), env=ENV))
    assert await first_output(channel.events(TRACER)) == b"begun\n"
    return events


async def refusal(start: Callable[[int], Awaitable[object]]) -> str:
    """The code of the error that one of 64 starts ends with."""
    try:
        for number in range(64):
            await start(number)
    except GuestError as error:
        return error.code
    return ""


# SIGKILL does not end a process whose tracer does not let go of it: the kernel keeps it in PTRACE_EVENT_EXIT.


async def test_a_killed_process_held_by_a_tracer_delays_exit_by_seconds_only(connect: Connect, hostile: str) -> None:
    channel = await connect()
    events = await held(channel, hostile, StartCommand(script="echo $$; exec sleep 1000", env=ENV))
    await channel.kill(VICTIM, 0)
    end = await end_of(events)
    assert (end.exit_code, end.signal, end.reason) == (None, 9, 2)


async def test_a_timeout_ends_a_command_with_a_held_child(connect: Connect, hostile: str) -> None:
    channel = await connect()
    script = "sleep 1000 & echo $!; trap '' TERM; wait; sleep 1000"
    events = await held(channel, hostile, StartCommand(script=script, env=ENV, timeout_ms=2500, grace_ms=100))
    assert (await end_of(events)).reason == 1


async def test_a_session_whose_shell_is_held_ends_and_can_be_made_again(connect: Connect, hostile: str) -> None:
    channel = await connect()
    events = await held(channel, hostile, StartCommand(script="echo $$; sleep 1000", env=ENV, session="s"))
    await channel.end_session("s")
    end = await end_of(events)
    assert end.reason == 3
    assert end.session_gone
    assert (await Shell(channel).run("echo again", session="s")).stdout == b"again\n"


async def test_kill_counts_while_an_earlier_one_waits_for_its_grace(agent: Agent, connect: Connect) -> None:
    channel = await connect()
    script = "(trap '' TERM; echo; sleep 1000; sleep 1000) & wait"
    await channel.start(VICTIM, StartCommand(script=script, env=ENV))
    events = channel.events(VICTIM)
    await first_output(events)
    await channel.kill(VICTIM, 3_600_000)
    until(lambda: len(agent.processes()) == 2, "the end of the foreground shell")
    await channel.ping()
    await channel.kill(VICTIM, 0)
    assert (await end_of(events)).reason == 2


async def test_signals_that_queue_are_dropped_by_the_agent(connect: Connect) -> None:
    shell = Shell(await connect())
    result = await shell.run("for n in 36 40 50 63 64; do kill -$n 1; done; grep ShdPnd /proc/1/status")
    assert result.stdout.split() == [b"ShdPnd:", b"0" * 16]
    assert (await shell.run("exit 3")).exit.exit_code == 3


async def test_orphans_made_faster_than_they_are_reaped_do_not_hold_up_the_agent(
    connect: Connect, hostile: str
) -> None:
    channel = await connect()
    flood = StartCommand(argv=(hostile, "flood", "4"), env=ENV, timeout_ms=2000)
    await channel.start(VICTIM, flood)
    events = channel.events(VICTIM)
    await first_output(events)
    begin = time.monotonic()
    async with asyncio.timeout(WAIT_S):
        while time.monotonic() - begin < 1:
            await channel.ping()
    end = await end_of(events)
    assert end.reason == 1


# Descriptors.


async def test_dials_that_ended_both_ways_are_forgotten(agent: Agent, connect: Connect) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    channel = await connect()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        for _ in range(300):  # 256 are too many at once
            stream = await channel.dial(port)
            await stream.write(b"x")
            await stream.write_eof()
            assert await stream.read() == b"x"
            assert await stream.read() == b""
    until(lambda: len(list(Path(f"/proc/{agent.pid()}/fd").iterdir())) < 20, "descriptors given back")


async def test_without_descriptors_commands_are_refused_and_what_runs_can_be_ended(
    make_agent: Callable[..., Agent], connect: Connect
) -> None:
    channel = await connect(make_agent(setup="ulimit -n 96"))
    shell = Shell(channel)
    await channel.start(VICTIM, StartCommand(script="(trap '' TERM; echo; sleep 1000; sleep 1000) & wait", env=ENV))
    events = channel.events(VICTIM)
    await first_output(events)
    sleeping = StartCommand(script="exec sleep 1000", env=ENV)
    assert await refusal(lambda number: shell.run("true", session=f"session {number}")) == "limit"
    assert await refusal(lambda number: channel.start(TRACER + number, sleeping)) == "limit"
    await channel.kill(VICTIM, 50)
    assert (await end_of(events)).reason == 2
    for number in range(64):
        await channel.end_session(f"session {number}")

    async def can_start() -> bool:
        try:
            await shell.run("true")
        except GuestError:
            return False
        return True

    async with asyncio.timeout(WAIT_S):
        while not await can_start():
            await asyncio.sleep(0.01)
    assert (await shell.run("readlink /proc/self/fd/0")).stdout == b"/dev/null\n"


async def test_a_session_that_gave_up_one_stream_keeps_the_other(connect: Connect) -> None:
    shell = Shell(await connect())
    assert (await shell.run("echo out; exec >/dev/null", session="s")).stdout == b"out\n"
    assert (await shell.run("true", session="s")).exit.exit_code == 0  # the pipe's end has been seen
    assert (await shell.run("echo gone; echo err >&2", session="s")).stderr == b"err\n"


# A host that is always a little behind.


def frame(frame_type: int, frame_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(4, "little") + frame_id.to_bytes(4, "little") + bytes([frame_type, 0, 0, 0]) + payload


async def test_memory_stays_flat_for_a_host_that_reads_slowly(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(binary=PLAIN)  # what a sanitizer keeps is its own
    until(lambda: Path(agent.socket_path).exists(), "the socket")
    most = 0
    with socket.socket(socket.AF_UNIX) as host:
        host.settimeout(WAIT_S)
        host.connect(agent.socket_path)
        host.sendall(frame(protocol.HELLO, 0, pack_fields([(protocol.T_VERSION, protocol.VERSION)])))
        start = StartCommand(script="exec cat /dev/zero", env=ENV)
        for number in range(1, STREAMS + 1):
            host.sendall(frame(protocol.START, number, protocol.encode_start(start)))
        unread, total = bytearray(), 0
        while total < 64 << 20:
            time.sleep(0.002)  # slower than the commands
            piece = host.recv(200_000)
            total += len(piece)
            unread += piece
            while len(unread) >= 12 and len(unread) >= 12 + (length := int.from_bytes(unread[:4], "little")):
                if unread[8] == protocol.OUT:
                    end = int.from_bytes(unread[12:20], "little") + length - 8
                    number = int.from_bytes(unread[4:8], "little")
                    host.sendall(frame(protocol.ACK, number, end.to_bytes(8, "little") + bytes(8)))
                del unread[: 12 + length]
                most = max(most, agent.dirty_kb())
    assert most < STREAMS * WINDOW_KIB + 4096, f"{most} KiB"
