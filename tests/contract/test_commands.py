"""Commands on every backend: what comes out is what was written, and no result without an end."""

from __future__ import annotations

import asyncio

import pytest
from tests.contract.harness import ENV, Place, Sandbox

from opendsec.backends.base import Running
from opendsec.guest.base import CHUNK_BYTES, GuestError, GuestLostError, Output, StartCommand

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("false", 1), ("exit 7", 7), ("exit 255", 255)])
async def test_exit_codes(box: Sandbox, script: str, code: int) -> None:
    end = (await box.run(script)).exit
    assert (end.exit_code, end.signal, end.reason) == (code, 0, 0)


async def test_argv_is_not_a_script(box: Sandbox) -> None:
    assert (await box.run(argv=("echo", "a  b", "$HOME", ";"))).stdout == b"a  b $HOME ;\n"


async def test_stdout_and_stderr_are_two_streams(box: Sandbox) -> None:
    result = await box.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    assert (result.exit.stdout_total, result.exit.stderr_total) == (4, 4)


@pytest.mark.parametrize("data", [b"\n\n", b"no newline", b"a\r\nb\rc", b"\x00\xff\x00", "é🙂".encode(), b""])
async def test_bytes_in_are_bytes_out(box: Sandbox, data: bytes) -> None:
    command = await box.start("cat", stdin=True)
    await box.guest.write_stdin(command, 0, data, eof=True)
    assert (await box.finish(command)).stdout == data


async def test_a_megabyte_through_stdin(box: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    command = await box.start("cat", stdin=True)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(box.finish(command))
        await box.guest.write_stdin(command, 0, data, eof=True)
    assert reading.result().stdout == data


async def test_stdin_is_at_its_end_unless_asked_for(box: Sandbox) -> None:
    assert (await box.run("cat; echo done")).stdout == b"done\n"


async def test_environment_and_directory_are_exactly_as_given(box: Sandbox) -> None:
    result = await box.run('pwd; echo "$A|$B"', env={**ENV, "A": "x y", "B": 'it\'s "q" \\ $C\té'}, cwd="/etc")
    assert result.stdout == '/etc\nx y|it\'s "q" \\ $C\té\n'.encode()


async def test_a_timeout_says_timeout(box: Sandbox) -> None:
    end = (await box.run("sleep 1000", timeout_ms=50)).exit
    assert end.reason == 1
    assert end.duration_ns >= 50_000_000


async def test_a_kill_says_killed(box: Sandbox) -> None:
    command = await box.start("echo ready; sleep 1000")
    await box.wait_for(command, b"ready")
    await box.guest.kill(command, 1000)
    assert (await box.finish(command, stdout=b"ready\n")).exit.reason == 2
    await box.guest.kill(command, 1000)  # ended: no error


async def test_who_ignores_the_first_signal_gets_the_second(box: Sandbox) -> None:
    command = await box.start(
        "trap '' TERM; echo ready; while true; do sleep 1000; done"
        if box.backend.kind != "dummy"
        else "trap '' TERM; echo ready; sleep 1000"
    )
    await box.wait_for(command, b"ready")
    await box.guest.kill(command, 50)
    end = (await box.finish(command, stdout=b"ready\n")).exit
    assert (end.reason, end.signal) == (2, 9)


async def test_a_repeated_start_starts_nothing(box: Sandbox) -> None:
    start = StartCommand(script="echo once >> /tmp/count; cat", env=ENV, stdin=True)
    pids = {await box.guest.start(9, start)}
    for _ in range(2):
        found = await box.backend.recover(box.running.handle)
        assert isinstance(found, Running)
        await box.guest.aclose()
        box.running = found
        pids.add(await box.guest.start(9, start))
    await box.guest.write_stdin(9, 0, b"end\n", eof=True)
    assert (await box.finish(9)).stdout == b"end\n"
    assert len(pids) == 1
    assert (await box.run("cat /tmp/count")).stdout == b"once\n"


async def test_a_cut_connection_is_an_error_and_the_command_goes_on(box: Sandbox) -> None:
    command = await box.start("echo before; cat", stdin=True)
    assert await box.wait_for(command, b"before") == b"before\n"
    await box.guest.aclose()
    with pytest.raises(GuestLostError):
        await box.finish(command)
    with pytest.raises(GuestLostError):
        await box.guest.ping()
    found = await box.backend.recover(box.running.handle)
    assert isinstance(found, Running)
    box.running = found
    assert [known.id for known in await box.guest.list_commands()] == [command]
    await box.guest.attach(command, 0, 0)
    await box.guest.write_stdin(command, 0, b"after\n", eof=True)
    result = await box.finish(command)
    assert (result.stdout, result.exit.exit_code) == (b"before\nafter\n", 0)


async def test_an_end_is_kept_until_it_is_released(box: Sandbox) -> None:
    command = await box.start("echo bye; exit 3")
    await box.guest.aclose()
    guest = await box.backend.reconnect(box.running.handle)
    assert guest is not None
    box.running.guest = guest
    await guest.attach(command, 0, 0)
    assert (await box.finish(command)).exit.exit_code == 3
    with pytest.raises(GuestError):
        await guest.attach(command, 0, 0)


async def test_endless_output_waits_for_its_reader_and_for_nobody_else(box: Sandbox) -> None:
    flood = await box.start("yes")
    events = box.guest.events(flood)
    first = await anext(events)
    assert isinstance(first, Output)
    for _ in range(5):
        assert (await box.run("echo here")).stdout == b"here\n"
    (known,) = [known for known in await box.guest.list_commands() if known.id == flood]
    assert known.stdout_total - known.stdout_base <= 2 * CHUNK_BYTES
    await box.guest.kill(flood, 0)


async def test_a_session_remembers(box: Sandbox) -> None:
    first = await box.run("cd /etc; export X='a b'", session="s")
    second = await box.run('pwd; echo "$X"', session="s")
    other = await box.run('pwd; echo "$X"', session="t")
    assert (first.exit.session_started, second.exit.session_started) == (True, False)
    assert (second.stdout, other.stdout) == (b"/etc\na b\n", b"/\n\n")


async def test_exit_ends_a_session(box: Sandbox) -> None:
    end = (await box.run("exit 3", session="s")).exit
    assert (end.exit_code, end.session_gone) == (3, True)
    assert (await box.run("true", session="s")).exit.session_started


async def test_session_commands_run_in_order(box: Sandbox) -> None:
    first = await box.start("sleep 0.05; export X=1", session="s")
    async with asyncio.TaskGroup() as group:
        group.create_task(box.finish(first))
        second = group.create_task(box.run("echo $X", session="s"))
    assert second.result().stdout == b"1\n"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"argv": ("no-such-program",)}, "exec"),
        ({"script": "true", "cwd": "/no/such/place"}, "bad_cwd"),
        ({"script": "true", "user": "nobody-of-that-name"}, "no_user"),
    ],
)
async def test_refusals_have_names(box: Sandbox, fields: dict[str, str], code: str) -> None:
    with pytest.raises(GuestError) as refused:
        await box.run(**fields)
    assert refused.value.code == code
    assert (await box.run("echo alive")).stdout == b"alive\n"


async def test_commands_that_nobody_started(box: Sandbox) -> None:
    with pytest.raises(GuestError) as refused:
        await box.guest.attach(77, 0, 0)
    assert refused.value.code == "no_command"
    await box.guest.kill(77, 0)
    box.guest.release(77)
    assert await box.guest.ping() < 10


async def test_fifty_at_once(place: Place, box: Sandbox) -> None:
    async def one(number: int) -> None:
        result = await box.run(f"echo {number}; exit {number}")
        assert (result.stdout, result.exit.exit_code) == (f"{number}\n".encode(), number)

    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(one(number))
    assert await box.guest.list_commands() == []
