"""How commands behave: output, exit, stdin, large command lines. Each against a real agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from tests.node.guest.agents import ENV, PLAIN, WAIT_S, Agent, Connect, Shell, drain, until

from opendsec.guest.base import Exit, GuestError, Output, StartCommand

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]


async def test_both_streams_and_the_exit_code_arrive(shell: Shell) -> None:
    result = await shell.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit.exit_code) == (b"out\n", b"err\n", 3)


async def test_a_signal_is_no_exit_code(shell: Shell) -> None:
    result = await shell.run("kill -9 $$")
    assert (result.exit.exit_code, result.exit.signal, result.exit.reason) == (None, 9, 0)


async def test_it_returns_when_the_foreground_ends_although_a_child_holds_the_pipes(shell: Shell, agent: Agent) -> None:
    async with asyncio.timeout(WAIT_S):
        result = await shell.run("sleep 1000 & seq 20000; echo hi")
    assert result.stdout == b"".join(b"%d\n" % i for i in range(1, 20001)) + b"hi\n"
    assert len(agent.processes()) == 1  # the child lives


async def test_a_background_writer_never_blocks_nor_gets_sigpipe(
    shell: Shell, tmp_path_factory: pytest.TempPathFactory
) -> None:
    marker = tmp_path_factory.mktemp("m") / "marker"
    result = await shell.run(f"(head -c 1000000 /dev/zero; echo $? > {marker}) & exit 0")
    assert result.exit.exit_code == 0
    await asyncio.to_thread(until, lambda: marker.exists() and marker.read_text() == "0\n", "the writer's own end")


async def test_bytes_survive(shell: Shell) -> None:
    result = await shell.run(r"printf '\0\377\r\n\n\n\303\251 last without newline'")
    assert result.stdout == b"\0\xff\r\n\n\n\xc3\xa9 last without newline"


async def test_a_large_output_arrives_whole(shell: Shell) -> None:
    result = await shell.run("head -c 50000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert len(result.stdout) == 50_000_000
    assert result.stdout.count(b"x") == 50_000_000
    assert result.stderr == b"end\n"


async def test_stdin_is_at_its_end_unless_asked_for(shell: Shell) -> None:
    assert (await shell.run("cat; read x; echo $?")).stdout == b"1\n"


async def test_stdin_goes_through_with_offsets(shell: Shell) -> None:
    data = os.urandom(3_000_000)
    await shell.channel.start(1000, StartCommand(argv=("cat",), env=ENV, stdin=True))
    async with asyncio.TaskGroup() as group:
        group.create_task(shell.channel.write_stdin(1000, 0, data, eof=True))
        result = await drain(shell.channel, 1000)
    assert result.stdout == data


async def test_stdin_sent_twice_is_taken_once_and_a_gap_is_refused(shell: Shell) -> None:
    channel = shell.channel
    await channel.start(1000, StartCommand(argv=("cat",), env=ENV, stdin=True))
    await channel.write_stdin(1000, 0, b"hello ", eof=False)
    await channel.write_stdin(1000, 0, b"hello world", eof=False)
    async for event in channel.events(1000):
        if isinstance(event, Output) and event.offset + len(event.data) == 11:
            break
    await channel.write_stdin(1000, 12, b"!", eof=False)
    await channel.ping()
    with pytest.raises(GuestError) as caught:
        await channel.write_stdin(1000, 11, b"!", eof=True)
    assert caught.value.code == "gap"
    await channel.kill(1000, 0)
    async for event in channel.events(1000):
        assert not isinstance(event, Output)


async def test_stdin_of_a_program_that_closed_it(shell: Shell) -> None:
    await shell.channel.start(1000, StartCommand(script="exec <&-; sleep 100", env=ENV, stdin=True))
    with pytest.raises(GuestError) as caught:  # noqa: PT012
        for i in range(100):
            await shell.channel.write_stdin(1000, i * 65536, bytes(65536), eof=False)
    assert (caught.value.code, caught.value.errno) == ("file", 32)
    await shell.channel.kill(1000, 0)
    await drain(shell.channel, 1000)


@pytest.mark.parametrize("size", [100, 119_000, 124_000, 200_000, 1_000_000, 3_000_000])
async def test_scripts_of_any_size(shell: Shell, size: int) -> None:
    script = "x=$(cat <<'END'\n" + "y" * size + "\nEND\n)\necho ${#x} $LINENO; ls /proc/self/fd | wc -l"
    result = await shell.run(script)
    assert result.stdout.split() == [b"%d" % size, b"5", b"4"], result.stderr


async def test_large_environments_and_argument_lists(shell: Shell) -> None:
    env = {**ENV, **{f"V{i}": "x" * 1000 for i in range(1000)}}
    assert (await shell.run("echo ${#V999} $(env | wc -c)", env=env)).stdout.split()[0] == b"1000"
    result = await shell.argv("sh", "-c", "echo $#", "sh", *["y" * 100_000] * 15)
    assert result.stdout == b"15\n"


async def test_an_argument_beyond_the_kernels_limit_says_so(shell: Shell) -> None:
    with pytest.raises(GuestError, match="Argument list too long") as caught:
        await shell.argv("echo", "x" * 200_000)
    assert (caught.value.code, caught.value.errno) == ("exec", 7)


@pytest.mark.parametrize(
    ("command", "code", "number"),
    [
        (StartCommand(argv=("no-such-program",), env=ENV), "exec", 2),
        (StartCommand(argv=("/etc/passwd",), env=ENV), "exec", 13),
        (StartCommand(argv=("/etc",), env=ENV), "exec", 13),
        (StartCommand(argv=("true",), env=ENV, cwd="/no/such/place"), "bad_cwd", 2),
        (StartCommand(argv=("true",), env=ENV, cwd="/etc/passwd"), "bad_cwd", 20),
        (StartCommand(argv=("true",), env=ENV, user="nobody-we-know"), "no_user", None),
        (StartCommand(argv=("true",), env=ENV, user="root:no-such-group"), "no_user", None),
        (StartCommand(script="echo a\0b", env=ENV), "exec", 22),
        (StartCommand(env=ENV), "exec", 22),
    ],
)
async def test_what_cannot_be_started_is_named(
    shell: Shell, agent: Agent, command: StartCommand, code: str, number: int | None
) -> None:
    with pytest.raises(GuestError) as caught:
        await shell.channel.start(1, command)
    assert caught.value.code == code
    assert number is None or caught.value.errno == number
    assert await shell.channel.list_commands() == []
    await asyncio.to_thread(until, lambda: agent.command_cgroups() == [], "no cgroup left")


async def test_path_search_takes_the_callers_path(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bin")
    (folder / "greet").write_text("#!/bin/sh\necho greetings")
    (folder / "greet").chmod(0o755)
    result = await shell.argv("greet", env={"PATH": f"/nowhere:/etc/passwd:{folder}"})
    assert result.stdout == b"greetings\n"


async def test_environment_is_what_was_sent_and_home(shell: Shell) -> None:
    env = {"A": "b c'd\"e", "PATH": "/bin:/usr/bin", "EMPTY": "", "N": "l1\nl2"}
    result = await shell.argv("env", "-0", env=env)
    assert set(result.stdout.split(b"\0")) == {
        b"A=b c'd\"e",
        b"PATH=/bin:/usr/bin",
        b"EMPTY=",
        b"N=l1\nl2",
        b"HOME=/root",
        b"",
    }
    result = await shell.argv("env", env={**env, "HOME": "/elsewhere"})
    assert b"HOME=/elsewhere\n" in result.stdout
    assert b"/root" not in result.stdout


async def test_a_started_command_has_a_clean_process_state(shell: Shell) -> None:
    result = await shell.run(
        "umask; pwd; ls /proc/self/fd; cut -d' ' -f6 /proc/$$/stat; echo $$; cat /proc/self/oom_score_adj"
    )
    lines = result.stdout.decode().split()
    assert lines[:6] == ["0022", "/", "0", "1", "2", "3"]
    assert lines[6] == lines[7]  # a session of its own
    assert lines[8] == "500"
    result = await shell.argv("grep", "-E", "Sig(Blk|Ign)|NoNewPrivs", "/proc/self/status")
    assert result.stdout.split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16, b"NoNewPrivs:", b"0"]


async def test_limits_are_the_agents_own(make_agent: Callable[..., Agent], connect: Connect) -> None:
    shell = Shell(await connect(make_agent(setup="ulimit -n 512 && ulimit -c 0")))
    assert (await shell.run("ulimit -Sn; ulimit -Hc")).stdout.split() == [b"512", b"0"]


async def test_five_hundred_at_once_while_orphans_are_made(shell: Shell, agent: Agent) -> None:
    orphans = "i=0; while [ $i -lt 300 ]; do (sleep 0.02 &) ; i=$((i+1)); done; echo made"

    async def one(command_id: int) -> Exit:
        await shell.channel.start(command_id, StartCommand(argv=("true",), env=ENV))
        return (await drain(shell.channel, command_id)).exit

    async with asyncio.TaskGroup() as group:
        maker = group.create_task(shell.run(orphans))
        ends = [group.create_task(one(1000 + i)) for i in range(500)]
    assert (await maker).stdout == b"made\n"
    assert [end.result().exit_code for end in ends] == [0] * 500
    await asyncio.to_thread(until, lambda: agent.processes() == [], "no orphan and no zombie left")
    zombies = await shell.run("grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
    assert zombies.stdout.strip() == b"0"
    await asyncio.to_thread(until, lambda: agent.command_cgroups() == [], "no cgroup left")


async def test_a_reader_that_stalls_stalls_its_command_only(shell: Shell, agent: Agent) -> None:
    channel = shell.channel
    await channel.start(1000, StartCommand(argv=("yes",), env=ENV))
    held = 0
    async for event in channel.events(1000):
        assert isinstance(event, Output)
        held += len(event.data)
        if held >= 256 * 1024:
            break
    known = {command.id: command for command in await channel.list_commands()}[1000]
    assert known.stdout_total == known.stdout_base + 256 * 1024
    async with asyncio.timeout(WAIT_S):
        assert (await shell.run("echo fine")).stdout == b"fine\n"
    await channel.kill(1000, 0)
    del agent


async def test_agent_memory_stays_flat_with_yes_and_nobody_reading(
    make_agent: Callable[..., Agent], connect: Connect
) -> None:
    agent = make_agent(binary=PLAIN)
    channel = await connect(agent)
    for i in range(20):
        await channel.start(1 + i, StartCommand(argv=("yes",), env=ENV))
    await channel.aclose()
    await asyncio.sleep(0.5)
    assert agent.dirty_kb() < 20 * 270 + 200
    channel = await connect(agent)
    assert len(await channel.list_commands()) == 20
    for i in range(20):
        await channel.kill(1 + i, 0)
        await channel.attach(1 + i, 0, 0)
        result = await drain(channel, 1 + i)
        assert result.exit.reason == 2
        assert result.stdout == (b"y\n" * 1_000_000)[: len(result.stdout)]
    await asyncio.to_thread(until, lambda: agent.dirty_kb() <= 60, "memory is given back")
