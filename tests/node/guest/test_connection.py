"""Connections: takeover, nothing lost across them, garbage, serial ports."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import socket
import termios
import time
from collections.abc import Callable
from functools import partial

import pytest
from tests.node.guest.agents import ENV, WAIT_S, Agent, Connect, Shell, drain, until

from opendsec.guest import protocol
from opendsec.guest.base import Exit, GuestError, GuestLostError, Output, StartCommand
from opendsec.guest.channel import greet
from opendsec.wire.frames import FrameParser, pack_frame

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

HELLO = pack_frame(protocol.HELLO, 0, protocol.pack_fields([(protocol.T_VERSION, 1)]))


async def test_hello_names_the_agent_and_its_boot(agent: Agent, connect: Connect) -> None:
    first = await connect(agent)
    assert first.agent.startswith("opendsec-guest/")
    assert {"files", "sessions", "terminals", "dial", "watch", "trees", "cgroup"} <= first.capabilities
    second = await connect(agent)
    assert len(first.boot_id) == 16
    assert first.boot_id == second.boot_id


async def test_a_new_connection_takes_over(
    agent: Agent, connect: Connect, tmp_path_factory: pytest.TempPathFactory
) -> None:
    go_on = tmp_path_factory.mktemp("gate") / "go-on"
    first = await connect(agent)
    script = f"echo one; until [ -e {go_on} ]; do sleep 0.01; done; echo two; exit 5"
    await first.start(1, StartCommand(script=script, env=ENV))
    second = await connect(agent)
    await first.wait_closed()
    with pytest.raises(GuestLostError):
        async for _ in first.events(1):
            pass
    assert [(c.id, c.ended) for c in await second.list_commands()] == [(1, False)]
    await second.attach(1, 0, 0)
    go_on.touch()
    result = await drain(second, 1)
    assert (result.stdout, result.exit.exit_code) == (b"one\ntwo\n", 5)
    await second.ping()
    assert await second.list_commands() == []


async def test_nothing_is_lost_across_many_cuts(agent: Agent) -> None:
    channel = await agent.channel()
    await channel.start(1, StartCommand(script="seq 400000; echo done >&2; exit 9", env=ENV))
    totals = {1: 0, 2: 0}
    output: dict[int, bytes] = {1: b"", 2: b""}
    end = None
    while end is None:
        budget = 150_000
        async for event in channel.events(1):
            if isinstance(event, Output):
                output[event.stream] += event.data
                totals[event.stream] += len(event.data)
                channel.ack(1, totals[1], totals[2])
                budget -= len(event.data)
                if budget < 0:
                    break
            elif isinstance(event, Exit):
                end = event
        channel.link.fail("cut by the test")
        await channel.wait_closed()
        channel = await agent.channel()
        await channel.attach(1, totals[1], totals[2])
    assert end.exit_code == 9
    assert output[1] == b"".join(b"%d\n" % i for i in range(1, 400_001))
    assert output[2] == b"done\n"
    await channel.aclose()


async def test_what_was_acknowledged_is_gone(shell: Shell, agent: Agent, connect: Connect) -> None:
    await shell.channel.start(1000, StartCommand(script="echo hello", env=ENV))
    async for event in shell.channel.events(1000):
        if isinstance(event, Output):
            shell.channel.ack(1000, event.offset + len(event.data), 0)
    await shell.channel.ping()
    again = await connect(agent)
    for offsets in ((0, 0), (7, 0), (6, 1)):
        with pytest.raises(GuestError) as caught:
            await again.attach(1000, *offsets)
        assert caught.value.code == "gone"
    await again.attach(1000, 6, 0)
    assert (await drain(again, 1000, 6)).exit.exit_code == 0
    with pytest.raises(GuestError) as caught:
        await again.attach(77, 0, 0)
    assert caught.value.code == "no_command"


async def test_a_repeated_start_starts_nothing(shell: Shell, agent: Agent, connect: Connect, tmp_path: object) -> None:
    command = StartCommand(script=f"echo x >> {tmp_path}/count; echo out", env=ENV)
    await shell.channel.start(1, command)
    async for _ in shell.channel.events(1):
        pass
    for _ in range(3):
        channel = await connect(agent)
        await channel.start(1, command)
        assert isinstance([event async for event in channel.events(1)][-1], Exit)
    with open(f"{tmp_path}/count") as file:
        assert file.read() == "x\n"


def talk(agent: Agent, data: bytes, *, until: bytes | None = None) -> bytes:
    """Send raw bytes and read until the agent closes, or has said `until`, or is quiet for long."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(agent.socket_path)
        answer = b""
        try:
            sock.sendall(data)
            while chunk := sock.recv(65536):
                answer += chunk
                if until is not None and until in answer:
                    break
        except TimeoutError:
            answer += b"<silence>"
        except OSError:
            pass
        return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pack_frame(protocol.LIST, 0),
        pack_frame(protocol.HELLO, 0, protocol.pack_fields([(protocol.T_VERSION, 2)])),
        pack_frame(protocol.HELLO, 0, b"\x01"),
        pack_frame(protocol.HELLO, 0),
        HELLO + b"\xff" * 100,
        HELLO + pack_frame(protocol.START, 0),
        HELLO + pack_frame(protocol.START, 5, b"\x07\0\0\0\xff\xff\xff\xff"),
        HELLO + pack_frame(protocol.START, 5, protocol.pack_fields([(protocol.T_FLAGS, b"123")])),
        HELLO + pack_frame(protocol.PING, 0, bytes(65)),
        HELLO + pack_frame(protocol.FS, 1, b"123"),
    ],
)
async def test_garbage_closes_that_connection_only(agent: Agent, data: bytes) -> None:
    answer = await asyncio.to_thread(talk, agent, data)
    frames = list(FrameParser().feed(answer))
    assert frames[-1].type == protocol.ERROR
    assert protocol.decode_error(frames[-1].payload).code in {"protocol", "version"}
    channel = await agent.channel()
    assert (await Shell(channel).run("echo fine")).stdout == b"fine\n"
    await channel.aclose()


async def test_a_connection_without_hello_disturbs_nobody(shell: Shell, agent: Agent) -> None:
    idle = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for sock in idle:
        sock.connect(agent.socket_path)
    assert (await shell.run("echo fine")).stdout == b"fine\n"
    for sock in idle:
        sock.close()
    again = await agent.channel()
    assert again.agent
    await again.aclose()


async def test_frames_of_unknown_types_are_refused_by_name(agent: Agent) -> None:
    asked, told = pack_frame(protocol.PING, 0, b"known"), pack_frame(protocol.PONG, 0, b"known")
    answer = await asyncio.to_thread(partial(talk, agent, HELLO + pack_frame(99, 7) + asked, until=told))
    frames = list(FrameParser().feed(answer))
    assert [frame.type for frame in frames] == [protocol.HELLO, protocol.ERROR, protocol.PONG]
    assert protocol.decode_error(frames[1].payload).code == "unsupported"


async def test_a_host_that_acknowledges_what_it_never_got_is_cut(shell: Shell) -> None:
    await shell.channel.start(1000, StartCommand(argv=("sleep", "10"), env=ENV))
    shell.channel.ack(1000, 1 << 40, 0)
    await asyncio.wait_for(shell.channel.wait_closed(), 30)


async def test_mutated_conversations_never_hurt_the_agent(agent: Agent) -> None:
    """Bounded in time: random damage to a valid conversation, against whichever build this is."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    start = protocol.encode_start(StartCommand(script="echo hi; cat", env=ENV, stdin=True, timeout_ms=200))
    session = protocol.encode_start(StartCommand(script="echo hi", env=ENV, session="s"))
    listing = protocol.pack_fields([(protocol.T_OP, "list"), (protocol.T_PATH, "/etc"), (protocol.T_USER, "")])
    writing = protocol.pack_fields(
        [(protocol.T_OP, "write"), (protocol.T_PATH, "/tmp/opendsec-fuzz"), (protocol.T_FLAGS, 1)]
    )
    numbers = {
        name: protocol.pack_fields([(getattr(protocol, f"T_{name}"), 7)]) for name in ("GRACE_MS", "SIGNAL", "PORT")
    }
    size = protocol.pack_fields([(protocol.T_ROWS, 5), (protocol.T_COLS, 6)])
    ended = protocol.pack_fields([(protocol.T_SESSION, "s")])
    high, higher = 1 << 31, 3 << 30
    frames = [
        (protocol.START, 1, start), (protocol.STDIN, 1, bytes(8) + b"text"), (protocol.ACK, 1, bytes(16)),
        (protocol.ATTACH, 1, bytes(16)), (protocol.KILL, 1, numbers["GRACE_MS"]), (protocol.START, 2, session),
        (protocol.RELEASE, 1, b""), (protocol.SIGNAL, 1, numbers["SIGNAL"]), (protocol.LIST, 0, b""),
        (protocol.FS, high, listing), (protocol.FS, higher, writing), (protocol.DATA, higher, b"some data"),
        (protocol.END, higher, b""), (protocol.CREDIT, high, b"\0\0\1\0"), (protocol.CANCEL, high, b""),
        (protocol.RESIZE, 1, size), (protocol.DIAL, 5, numbers["PORT"]), (protocol.SESSION_END, 6, ended),
    ]  # fmt: skip
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        data = bytearray(HELLO)
        for kind, number, payload in rng.sample(frames, k=rng.randrange(1, len(frames))):
            frame = bytearray(pack_frame(kind, number, payload))
            for _ in range(rng.choice([0, 0, 1, 1, 3])):
                frame[rng.randrange(len(frame))] = rng.choice([0, 1, 255, rng.randrange(256)])
            if frame[8] != protocol.SHUTDOWN:
                data += frame
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(agent.socket_path)
            try:
                sock.sendall(data)
                sock.settimeout(0.01)
                sock.recv(1 << 20)
            except OSError:
                pass
        assert agent.process.poll() is None, f"seed {seed}"
    channel = await agent.channel()
    for known in await channel.list_commands():
        await channel.kill(known.id, 0)
    assert (await Shell(channel, 1 << 20).run("echo fine")).stdout == b"fine\n", f"seed {seed}"
    await channel.aclose()


async def test_a_serial_port_with_rubbish_before_hello_and_a_second_host(make_agent: Callable[..., Agent]) -> None:
    master, slave = pty.openpty()
    make_agent(arguments=(f"--serial={os.ttyname(slave)}",), namespaces=False)
    host, near = socket.socketpair()
    os.set_blocking(master, False)
    near.setblocking(False)
    loop = asyncio.get_running_loop()

    def from_port() -> None:
        try:
            near.send(os.read(master, 4096))
        except BlockingIOError:
            pass

    def to_port() -> None:
        data = near.recv(2000)
        os.write(master, data)

    os.set_blocking(master, True)
    await asyncio.to_thread(until, lambda: not termios.tcgetattr(master)[3] & termios.ECHO, "a raw port")
    os.write(master, b"rubbish \x01\x00\x00 of an older host")
    loop.add_reader(master, from_port)
    loop.add_reader(near.fileno(), to_port)
    host.setblocking(False)
    channel = await greet(host, 30)
    assert (await Shell(channel).run("echo over serial")).stdout == b"over serial\n"
    await channel.ping()
    second, near2 = socket.socketpair()
    loop.remove_reader(near.fileno())
    await channel.aclose()
    near.close()
    near = near2
    near.setblocking(False)
    loop.add_reader(near.fileno(), to_port)
    os.write(master, pack_frame(protocol.START, 9, bytes(50))[:40])  # an old host's last words, cut
    await asyncio.sleep(1.3)
    second.setblocking(False)
    channel = await greet(second, 30)
    assert (await Shell(channel, 100).run("echo again")).stdout == b"again\n"
    loop.remove_reader(master)
    loop.remove_reader(near.fileno())
    await channel.aclose()
    near.close()
    os.close(master)
    os.close(slave)
