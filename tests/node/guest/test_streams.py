"""Terminals and dialled ports: byte streams in both directions."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.node.guest.agents import ENV, Agent, Shell, drain, until

from opendsec.guest.base import Exit, GuestError, Output, StartCommand
from opendsec.guest.channel import Channel

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]


async def read_until(channel: Channel, command_id: int, text: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(30):
        async for event in channel.events(command_id):
            if isinstance(event, Output):
                assert event.stream == 1
                seen += event.data
                channel.ack(command_id, event.offset + len(event.data), 0)
                if text in seen:
                    return seen
    raise AssertionError(seen)


async def test_a_terminal_is_a_real_one(shell: Shell) -> None:
    channel = shell.channel
    script = "trap 'stty size' WINCH; tty; stty size; echo err >&2; read line; echo \"got $line\"; exit 4"
    await channel.start(1000, StartCommand(script=script, env=ENV, pty=(24, 80), user="65534:65534"))
    assert b"/dev/pts/" in await read_until(channel, 1000, b"24 80\r\nerr\r\n")
    await channel.resize(1000, 30, 100)
    await channel.write_stdin(1000, 0, b"hello\r", eof=False)
    assert b"hello\r\n" in await read_until(channel, 1000, b"got hello\r\n")
    assert (await drain_any(channel, 1000)).exit_code == 4


async def test_control_characters_and_signals_reach_the_foreground(shell: Shell) -> None:
    channel = shell.channel
    inner = "sh -c 'trap \"echo hit; exit 3\" INT; sleep 100 & wait'"
    script = f"trap '' INT; echo ready; {inner}; echo $?"
    await channel.start(1000, StartCommand(script=script, env=ENV, pty=(24, 80)))
    await read_until(channel, 1000, b"ready\r\n")
    await channel.signal(1000, 28)
    await channel.write_stdin(1000, 0, b"\x03", eof=False)
    await channel.kill(1000, 0)
    assert (await drain_any(channel, 1000)).reason == 2


async def drain_any(channel: Channel, command_id: int) -> Exit:
    async for event in channel.events(command_id):
        if isinstance(event, Exit):
            return event
    raise AssertionError


async def test_end_of_file_and_the_hang_up(shell: Shell, agent: Agent) -> None:
    channel = shell.channel
    await channel.start(1000, StartCommand(argv=("cat",), env=ENV, pty=(24, 80)))
    await channel.write_stdin(1000, 0, b"line\n", eof=True)
    result = await drain(channel, 1000)
    assert (result.stdout, result.exit.exit_code) == (b"line\r\nline\r\n", 0)
    await channel.start(1001, StartCommand(script="sleep 100 & exit 0", env=ENV, pty=(24, 80)))
    await drain(channel, 1001)
    del agent


async def test_a_large_output_through_a_terminal(shell: Shell) -> None:
    await shell.channel.start(1000, StartCommand(script="stty -opost; seq 200000", env=ENV, pty=(24, 80)))
    result = await drain(shell.channel, 1000)
    assert result.stdout == b"".join(b"%d\n" % i for i in range(1, 200_001))


@pytest.fixture
async def port() -> object:
    """A server of ours; the agents of these tests share our network."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(b"%d:" % len(data) + data[::-1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_dialling_with_half_close(shell: Shell, port: int) -> None:
    data = os.urandom(2_000_000)
    stream = await shell.channel.dial(port)
    await stream.write(data)
    await stream.write_eof()
    answer = b""
    while chunk := await stream.read():
        answer += chunk
    assert answer == b"2000000:" + data[::-1]
    await stream.aclose()


async def test_dialling_nobody_and_nonsense(shell: Shell) -> None:
    for port, host, number in ((1, "127.0.0.1", 111), (1, "localhost", 111), (1, "::1", 111), (1, "example.org", 22)):
        with pytest.raises(GuestError) as caught:
            await shell.channel.dial(port, host)
        assert (caught.value.code, caught.value.errno) == ("file", number)


async def test_a_reset_is_an_error_not_an_end(shell: Shell) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    stream = await shell.channel.dial(server.sockets[0].getsockname()[1])
    await stream.write(b"x")
    with pytest.raises(GuestError) as caught:
        await stream.read()
    assert caught.value.errno == 104
    server.close()
    await server.wait_closed()


async def test_dials_end_with_the_connection(shell: Shell, agent: Agent) -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stream = await shell.channel.dial(server.sockets[0].getsockname()[1])
    del stream
    await shell.channel.aclose()
    await asyncio.wait_for(gone.wait(), 30)
    server.close()
    await server.wait_closed()
    await asyncio.to_thread(until, lambda: agent.process.poll() is None, "the agent")
