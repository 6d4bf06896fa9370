"""The channel against guests that lie, stall or vanish: an error at once, never a hang, never growing memory."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from opendsec.guest import files
from opendsec.guest import protocol as p
from opendsec.guest.base import Exit, GuestError, GuestLostError, Output, StartCommand, StdinTaken
from opendsec.guest.channel import Channel, connect, greet
from opendsec.wire.frames import FrameParser, pack_frame

pytestmark = pytest.mark.anyio

HELLO = pack_frame(
    p.HELLO, 0, p.pack_fields([(p.T_VERSION, 1), (p.T_AGENT, "lying"), (p.T_BOOT_ID, bytes(16)), (p.T_CAPS, "files")])
)


class Liar:
    """The guest's end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.parser = FrameParser()

    async def send(self, *frames: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(frames))

    async def receive(self, frame_type: int) -> tuple[int, bytes]:
        """Skips to a frame of this type: (id, payload)."""
        async with asyncio.timeout(30):
            while True:
                for frame in self.parser.feed(await asyncio.get_running_loop().sock_recv(self.sock, 65536)):
                    if frame.type == frame_type:
                        return frame.id, bytes(frame.payload)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Channel, Liar]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    liar = Liar(theirs)
    await liar.send(HELLO)
    channel = await greet(ours, 30)
    yield channel, liar
    await channel.aclose()
    theirs.close()


def out(command_id: int, offset: int, data: bytes, stream: int = 1) -> bytes:
    return pack_frame(p.OUT, command_id, offset.to_bytes(8, "little") + data, flags=stream)


def started(command_id: int, flags: int = 0) -> bytes:
    return pack_frame(p.STARTED, command_id, p.pack_fields([(p.T_PID, 5), (p.T_FLAGS, flags)]))


def exited(command_id: int, stdout: int = 0, code: int = 0) -> bytes:
    return pack_frame(
        p.EXIT, command_id, p.pack_fields([(p.T_EXIT_CODE, code), (p.T_STDOUT_TOTAL, stdout), (p.T_STDERR_TOTAL, 0)])
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


COMMAND = StartCommand(script="x")
LIES: list[list[bytes]] = [
    [b"\xff" * 12],
    [b"\0\0\0\0\0\0\0\0\0\0\1\0"],
    [pack_frame(p.OUT, 1, b"")],
    [out(1, 0, b"")],
    [out(1, 5, b"early")],
    [out(1, 0, b"x"), out(1, 0, b"x")],
    [out(1, 0, b"x", stream=3)],
    [out(1, 0, bytes(200_000)), out(1, 200_000, bytes(62_145))],
    [out(2, 0, b"x")],
    [exited(2)],
    [exited(1, stdout=5)],
    [exited(1), exited(1)],
    [exited(1), out(1, 0, b"x")],
    [pack_frame(p.EXIT, 1)],
    [pack_frame(p.STDIN_ACK, 1, b"123")],
    [pack_frame(p.STDIN_ACK, 1, bytes([9]) + bytes(7)), pack_frame(p.STDIN_ACK, 1, bytes(8))],
    [pack_frame(p.PONG, 0, bytes(8))],
    [pack_frame(p.COMMAND, 1, b"")],
    [pack_frame(p.END, 0)],
    [pack_frame(p.HELLO, 0)],
    [HELLO],
    [pack_frame(p.DATA, p.FIRST_CALL_ID + 50, b"x")],
    [pack_frame(p.START, 1)],
    [pack_frame(p.ERROR, 1, b"\1")],
    [pack_frame(p.ERROR, 0, p.pack_fields([(p.T_CODE, "protocol"), (p.T_MESSAGE, "no")]))],
    [(1 << 20).to_bytes(4, "little") + b"\1\0\0\0\x0c\1\0\0" + bytes(1000)],
]


@pytest.mark.parametrize("lies", LIES)
async def test_a_lie_ends_the_connection_for_everyone_who_waits(pair: tuple[Channel, Liar], lies: list[bytes]) -> None:
    channel, liar = pair

    async def events() -> list[object]:
        return [event async for event in channel.events(1)]

    async with asyncio.TaskGroup() as group:
        start = group.create_task(channel.start(1, COMMAND))
        await liar.receive(p.START)
        await liar.send(started(1))
        await start
        waiting: list[asyncio.Task[object]] = [
            group.create_task(_error(call))
            for call in (
                channel.ping,
                lambda: channel.stat("/x"),
                lambda: channel.dial(5),
                lambda: channel.start(9, COMMAND),
            )
        ]
        await liar.receive(p.DIAL)
        await liar.send(*lies)
        results = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert all(isinstance(result, GuestLostError) for result in results)
    await asyncio.wait_for(channel.wait_closed(), 30)
    assert channel.closed
    try:
        seen = await asyncio.wait_for(events(), 30)
    except GuestLostError:
        seen = []
    assert all(not isinstance(event, Exit) or lies[0] == exited(1) for event in seen)
    for call in (channel.ping, channel.list_commands, lambda: channel.kill(1, 0), lambda: channel.stat("/")):
        assert isinstance(await _error(call), GuestLostError)


async def _error(call: Callable[[], Awaitable[object]]) -> object:
    try:
        return await asyncio.wait_for(call(), 30)
    except (GuestError, GuestLostError) as error:
        return error


async def test_many_tiny_events_take_little_memory(pair: tuple[Channel, Liar]) -> None:
    channel, liar = pair
    async with asyncio.TaskGroup() as group:
        start = group.create_task(channel.start(1, COMMAND))
        await liar.receive(p.START)
        await liar.send(started(1))
        assert await start == 5
    for i in range(0, 20_000, 100):
        frames = [
            out(1, j, b"x") + out(1, j, b"e", stream=2) + pack_frame(p.STDIN_ACK, 1, j.to_bytes(8, "little"))
            for j in range(i, i + 100)
        ]
        await liar.send(*frames)
    await liar.send(out(1, 20_000, b"end"))
    await asyncio.sleep(0.05)
    assert len(channel._running[1]._events) <= 1100
    seen = {1: b"", 2: b""}
    taken = 0
    async for event in channel.events(1):
        if isinstance(event, Output):
            assert event.offset == len(seen[event.stream])
            seen[event.stream] += event.data
            if seen[1].endswith(b"end"):
                break
        elif isinstance(event, StdinTaken):
            assert event.taken >= taken
            taken = event.taken
    assert len(seen[1]) == 20_003


async def test_events_that_arrived_before_the_end_are_delivered(pair: tuple[Channel, Liar]) -> None:
    channel, liar = pair
    async with asyncio.TaskGroup() as group:
        start = group.create_task(channel.start(1, COMMAND))
        await liar.receive(p.START)
        await liar.send(started(1), out(1, 0, b"hello"), exited(1, 5, 3))
        await start
    liar.sock.shutdown(socket.SHUT_RDWR)
    await channel.wait_closed()
    events = [event async for event in channel.events(1)]
    assert [type(event) for event in events] == [Output, Exit]


async def test_data_beyond_its_credit_ends_the_connection(pair: tuple[Channel, Liar]) -> None:
    channel, liar = pair
    async with asyncio.TaskGroup() as group:
        listing = group.create_task(_error(lambda: channel.dial(5)))
        call_id, _ = await liar.receive(p.DIAL)
        await liar.send(pack_frame(p.DATA, call_id, bytes(200_000)), pack_frame(p.DATA, call_id, bytes(62_145)))
        await listing
    assert channel.closed


async def test_an_upload_waits_for_credit_and_a_refusal_ends_it(pair: tuple[Channel, Liar]) -> None:
    channel, liar = pair
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 65536
            yield bytes(65536)

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(_error(lambda: channel.write_file("/x", chunks())))
        call_id, _ = await liar.receive(p.FS)
        await until(lambda: sent >= 5 * 65536)
        await asyncio.sleep(0.05)
        assert sent == 5 * 65536, "no more without credit"
        await liar.send(
            pack_frame(p.ERROR, call_id, p.pack_fields([(p.T_CODE, "file"), (p.T_ERRNO, 28), (p.T_MESSAGE, "full")]))
        )
        assert str(await writing) == "full"


async def test_cancelling_a_call_tells_the_agent_and_ignores_what_comes_late(pair: tuple[Channel, Liar]) -> None:
    channel, liar = pair
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(channel.stat("/slow"))
        call_id, _ = await liar.receive(p.FS)
        waiting.cancel()
        assert await liar.receive(p.CANCEL) == (call_id, b"")
    await liar.send(pack_frame(p.OK, call_id), pack_frame(p.ERROR, call_id, b"rubbish"))
    async with asyncio.TaskGroup() as group:
        ping = group.create_task(channel.ping())
        _, payload = await liar.receive(p.PING)
        await liar.send(pack_frame(p.PONG, 0, payload))
        assert await ping >= 0


async def test_a_guest_that_never_reads_loses_the_connection(pair: tuple[Channel, Liar]) -> None:
    channel, _ = pair
    big = StartCommand(script="x" * 3_000_000)
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(_error(partial(channel.start, i, big))) for i in range(1, 20)]
    assert all(isinstance(start.result(), GuestLostError) for start in starts)


async def test_a_guest_that_does_not_answer_hello() -> None:
    for answer in (
        b"",
        b"SSH-2.0-rubbish\r\n",
        pack_frame(p.HELLO, 0, p.pack_fields([(p.T_VERSION, 2), (p.T_AGENT, "x")])),
    ):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.sendall(answer)
        with pytest.raises(GuestLostError):
            await greet(ours, 0.05)
        theirs.close()


async def test_connecting_to_nothing_names_it(tmp_path: object) -> None:
    with pytest.raises(GuestLostError, match="cannot connect"):
        await connect(f"{tmp_path}/none", 1)


async def test_command_ids_are_checked(pair: tuple[Channel, Liar]) -> None:
    channel, _ = pair
    for bad in (0, 1 << 31):
        with pytest.raises(ValueError, match="command_id"):
            await channel.start(bad, COMMAND)
    with pytest.raises(ValueError, match="command_id"):
        channel.events(5)


async def test_a_directory_without_end_is_refused(pair: tuple[Channel, Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LISTED", 10)
    channel, liar = pair
    numbers = [(tag, 0) for tag in (p.T_MODE, p.T_SIZE, p.T_MTIME_NS, p.T_UID, p.T_GID)]
    fields = p.pack_fields([(p.T_NAME, "x"), (p.T_KIND, "file"), *numbers])
    entry = len(fields).to_bytes(4, "little") + fields
    async with asyncio.TaskGroup() as group:
        listing = group.create_task(_error(lambda: channel.list_dir("/many")))
        call, _ = await liar.receive(p.FS)
        await liar.send(*(pack_frame(p.DATA, call, entry) for _ in range(11)))
        await liar.receive(p.CANCEL)
    error = listing.result()
    assert isinstance(error, GuestError)
    assert (error.errno, "more than 10 entries" in str(error)) == (errno.EOVERFLOW, True)


async def test_a_greeting_given_up_at_the_last_moment_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = Channel.hello

    async def given_up(channel: Channel) -> None:
        await hello(channel)
        raise asyncio.CancelledError

    monkeypatch.setattr(Channel, "hello", given_up)
    ours, theirs = socket.socketpair()
    with theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
        await Liar(theirs).send(HELLO)
        with pytest.raises(asyncio.CancelledError):
            await greet(ours, 5)
        async with asyncio.timeout(30):
            while await asyncio.get_running_loop().sock_recv(theirs, 65536):
                pass


async def test_a_second_answer_of_the_same_machine_is_taken_for_nothing() -> None:
    def hello(boot_id: bytes, *more: str) -> bytes:
        caps = [(p.T_CAPS, name) for name in ("machine", *more)]
        return pack_frame(
            p.HELLO, 0, p.pack_fields([(p.T_VERSION, 1), (p.T_AGENT, "x"), (p.T_BOOT_ID, boot_id), *caps])
        )

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    liar = Liar(theirs)
    await liar.send(hello(bytes(16)), hello(bytes(16), "ready"))
    channel = await greet(ours, 30)
    await liar.send(pack_frame(p.USAGE, 0, p.pack_fields([(tag, 1) for tag in range(p.T_OOM_KILLS, p.T_CPU_US + 1)])))
    await until(lambda: channel.usage is not None)
    assert "ready" in channel.capabilities
    await liar.send(hello(b"1" * 16))
    async with asyncio.timeout(30):
        await channel.wait_closed()
    theirs.close()
