"""Process trees in real containers: none escapes its end, no exit is lost, nobody waits for a background child."""

from __future__ import annotations

import asyncio

import pytest
from tests.contract.harness import ENV, Place, Sandbox

from opendsec.guest.base import CHUNK_BYTES, GuestError, Output

pytestmark = pytest.mark.anyio
REAL_ONLY = True


async def matches(box: Sandbox, word: str) -> int:
    """How many processes sleep for exactly that long."""
    result = await box.run("ps")
    return sum(line.endswith(f" sleep {word}".encode()) for line in result.stdout.splitlines())


async def until_none(box: Sandbox, word: str) -> None:
    async with asyncio.timeout(60):
        while await matches(box, word):
            await asyncio.sleep(0.02)


async def test_a_background_child_holds_nobody_up(box: Sandbox) -> None:
    async with asyncio.timeout(60):
        result = await box.run("sleep 4001 & yes | head -c 300000; echo tail")
    assert result.stdout.endswith(b"tail\n")
    assert len(result.stdout) == 300_005
    assert await matches(box, "4001") == 1


@pytest.mark.parametrize(
    "hide",
    [
        "setsid sleep 4002 & sleep 4002",
        "(setsid sleep 4002 &) & sleep 4002",
        "trap '' TERM HUP INT; sleep 4002; sleep 4002; sleep 4002",
        "nohup sh -c 'trap \"\" TERM; while true; do sleep 4002; done' & sleep 4002",
    ],
    ids=["session", "double fork", "ignores TERM", "nohup"],
)
async def test_a_timeout_ends_the_whole_tree(box: Sandbox, hide: str) -> None:
    end = (await box.run(hide, timeout_ms=200, grace_ms=100)).exit
    assert end.reason == 1
    await until_none(box, "4002")


async def test_a_kill_ends_the_whole_tree_and_nothing_else(box: Sandbox) -> None:
    other = await box.start("sleep 4003")
    command = await box.start("setsid sleep 4004 & sleep 4004 & wait")
    async with asyncio.timeout(60):
        while await matches(box, "4004") < 2:
            await asyncio.sleep(0.02)
    await box.guest.kill(command, 100)
    assert (await box.finish(command)).exit.reason == 2
    await until_none(box, "4004")
    assert await matches(box, "4003") == 1
    await box.guest.kill(other, 0)


async def test_a_signal_is_not_a_kill(box: Sandbox) -> None:
    command = await box.start("trap 'echo got; exit 5' USR1; echo ready; while true; do sleep 0.05; done")
    ready = await box.wait_for(command, b"ready\n")
    await box.guest.signal(command, 10)
    result = await box.finish(command, stdout=ready)
    assert (result.stdout, result.exit.exit_code, result.exit.reason) == (b"ready\ngot\n", 5, 0)


async def test_death_by_signal_is_told(box: Sandbox) -> None:
    end = (await box.run("kill -SEGV $$")).exit
    assert (end.exit_code, end.signal, end.reason) == (None, 11, 0)


@pytest.mark.slow
async def test_hundreds_of_commands_among_orphans(place: Place) -> None:
    count = 100 if place.is_emulated else 500  # the agent is the same; a guest's processor may be emulated
    async with place.sandbox() as box:
        orphans = await box.start("while true; do (sleep 0.01 &); done")
        limit = asyncio.Semaphore(50)

        async def one() -> int | None:
            async with limit:
                return (await box.run("true")).exit.exit_code

        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
        assert {task.result() for task in tasks} == {0}
        await box.guest.kill(orphans, 0)
        await box.finish(orphans)
        async with asyncio.timeout(60):
            while b" Z " in (await box.run("ps -o stat= -o comm= | sed 's/^/ /;s/$/ /'")).stdout:
                await asyncio.sleep(0.05)
        await until_none(box, "0.01")


async def test_a_megabyte_of_script_and_environment(box: Sandbox) -> None:
    script = "x='" + "a" * 1_000_000 + "'; echo ${#x}"
    assert (await box.run(script)).stdout == b"1000000\n"
    env = {**ENV, **{f"V{number}": "b" * 100_000 for number in range(10)}}
    assert (await box.run("env | wc -c", env=env)).stdout.strip() > b"1000000"


async def test_argv_of_a_megabyte(box: Sandbox) -> None:
    words = tuple("w" * 1000 for _ in range(1000))
    assert len((await box.run(argv=("echo", *words))).stdout) == 1001 * 1000


async def test_an_image_without_a_shell(place: Place) -> None:
    async with place.sandbox("scratch") as box:
        with pytest.raises(GuestError) as refused:
            await box.run("true")
        assert refused.value.code == "no_shell"
        assert (await box.run(argv=("echo", "hi"), env={"PATH": "/app"})).stdout == b"hi\n"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("", b"0:0"),
        ("agent", b"1000:1000"),
        ("1000", b"1000:1000"),
        ("agent:video", b"1000:44"),
        ("1234:99", b"1234:99"),
        ("nobody", b"65534:65534"),
    ],
)
async def test_users(box: Sandbox, user: str, ids: bytes) -> None:
    result = await box.run('echo "$(id -u):$(id -g)"; touch /tmp/mine', user=user)
    assert result.stdout == ids + b"\n"
    stat = await box.guest.stat("/tmp/mine")
    assert f"{stat.uid}:{stat.gid}".encode() == ids


async def test_a_terminal(box: Sandbox) -> None:
    command = await box.start("stty size; tty; echo ready; cat", pty=(31, 77), stdin=True)
    seen = await box.wait_for(command, b"ready\r\n")  # what is typed is shown amid what is still being said
    await box.guest.resize(command, 40, 100)
    await box.guest.write_stdin(command, 0, b"hello\n\x04", eof=False)
    result = await box.finish(command, stdout=seen)
    assert result.stdout.startswith(b"31 77\r\n/dev/pts/")
    assert result.stdout.endswith(b"ready\r\nhello\r\nhello\r\n")
    assert result.exit.exit_code == 0


async def test_a_stream_that_nobody_reads_is_bounded(place: Place, box: Sandbox) -> None:
    before = box.backend.usage(box.running.handle).memory_bytes
    floods = [await box.start("yes") for _ in range(10)]
    for command in floods:
        assert isinstance(await anext(box.guest.events(command)), Output)
    assert (await box.run("echo here")).stdout == b"here\n"
    after = box.backend.usage(box.running.handle).memory_bytes
    if before is not None and after is not None:
        first_touched = 64 << 20 if place.is_emulated else 0  # a machine's own memory, and what QEMU has translated
        assert after - before < 10 * (4 * CHUNK_BYTES + 1024 * 1024) + first_touched
