"""How commands end when they are made to: timeouts, KILL, signals, whole trees, cgroups that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.node.guest.agents import ENV, WAIT_S, Agent, Connect, Shell, drain, timed_out, until

from opendsec.guest.base import GuestError, GuestLostError, StartCommand

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

STUBBORN = """
trap '' TERM
echo ready
setsid sh -c "trap '' TERM; while :; do :; done" &
(setsid sh -c "trap '' TERM; sleep 100" &)
sh -c 'sleep 100' &
while :; do sleep 0.01; done
"""


async def test_timeout_ends_the_whole_tree_and_says_timeout(shell: Shell, agent: Agent) -> None:
    begin = time.monotonic()
    result = await timed_out(shell.run, STUBBORN, ready=b"ready", grace_ms=300)
    assert time.monotonic() - begin > 0.45
    assert (result.exit.exit_code, result.exit.signal, result.exit.reason) == (None, 9, 1)
    assert agent.processes() == []
    assert agent.command_cgroups() == []


async def test_timeout_lets_a_willing_tree_go_at_once(shell: Shell, agent: Agent) -> None:
    script = "trap 'echo bye; exit 7' TERM; echo ready; sleep 100 & wait"
    async with asyncio.timeout(WAIT_S):
        result = await timed_out(shell.run, script, ready=b"ready", grace_ms=600_000)
    assert (result.exit.exit_code, result.exit.reason, result.stdout) == (7, 1, b"ready\nbye\n")
    assert agent.processes() == []


async def test_exit_waits_for_the_rest_of_an_ended_tree(shell: Shell, agent: Agent) -> None:
    script = "sh -c 'trap \"sleep 0.3; echo cleaned; exit\" TERM; echo ready; while :; do sleep 0.01; done' & sleep 100"
    result = await timed_out(shell.run, script, ready=b"ready", grace_ms=30_000)
    assert (result.exit.signal, result.exit.reason) == (15, 1)
    assert b"cleaned\n" in result.stdout
    assert agent.processes() == []


async def test_kill_of_a_stopped_tree(shell: Shell, agent: Agent) -> None:
    await shell.channel.start(1000, StartCommand(script="(kill -STOP $$ &) ; sleep 100", env=ENV))
    await shell.channel.kill(1000, 5000)
    result = await drain(shell.channel, 1000)
    assert (result.exit.reason, result.exit.signal) == (2, 15)
    assert agent.processes() == []


async def test_kill_of_unknown_and_ended_commands_is_no_error(shell: Shell) -> None:
    await shell.run("true")
    for command_id in (1, 77):
        await shell.channel.kill(command_id, 0)
    await shell.channel.ping()


async def test_signals_reach_the_foreground_group(shell: Shell) -> None:
    await shell.channel.start(
        1000, StartCommand(script="trap 'echo got; exit 4' USR1; echo ready; sleep 100 & wait", env=ENV)
    )
    async for _ in shell.channel.events(1000):
        break
    await shell.channel.signal(1000, 10)
    assert (await drain(shell.channel, 1000, 6)).exit.exit_code == 4


async def test_cgroups_go_when_background_children_do(
    shell: Shell, agent: Agent, tmp_path_factory: pytest.TempPathFactory
) -> None:
    go_on = tmp_path_factory.mktemp("gate") / "go-on"
    await shell.run(f"(until [ -e {go_on} ]; do sleep 0.01; done) &")
    assert agent.command_cgroups() == ["cmd-1"]
    go_on.touch()
    await asyncio.to_thread(until, lambda: agent.command_cgroups() == [], "the cgroup goes with its last process")


async def test_cgroups_made_inside_a_commands_own_go_too(shell: Shell, agent: Agent) -> None:
    path = agent.cgroup_path / "cmd-1"
    result = await shell.run(
        f"mkdir -p {path}/a/b && echo 0 > {path}/a/b/cgroup.procs && sleep 100", timeout_ms=300, grace_ms=100
    )
    assert result.exit.reason == 1
    assert agent.processes() == []
    assert agent.command_cgroups() == []


async def test_without_cgroups_trees_end_by_what_proc_shows(make_agent: Callable[..., Agent], connect: Connect) -> None:
    agent = make_agent(cgroup=False, setup="umount -R /sys/fs/cgroup")
    channel = await connect(agent)
    assert "cgroup" not in channel.capabilities
    result = await Shell(channel).run(
        "sh -c 'trap \"\" TERM; sleep 100' & setsid sleep 100 & wait", timeout_ms=200, grace_ms=200
    )
    assert result.exit.reason == 1
    left = await Shell(channel, 100).run("grep -l sleep /proc/[0-9]*/comm | wc -l")
    assert left.stdout == b"0\n"


async def test_shutdown_ends_everything_and_the_agent(shell: Shell, agent: Agent) -> None:
    await shell.run("setsid sh -c 'trap \"\" TERM; sleep 100' & exit 0")
    await shell.channel.start(1000, StartCommand(argv=("sleep", "100"), env=ENV))
    await shell.channel.shutdown(100)
    assert await asyncio.to_thread(agent.process.wait, WAIT_S) == 0
    with pytest.raises(GuestLostError):
        await shell.channel.ping()


async def test_shutdown_waits_no_longer_than_needed(shell: Shell, agent: Agent) -> None:
    await shell.channel.start(1000, StartCommand(argv=("sleep", "100"), env=ENV))
    async with asyncio.timeout(WAIT_S):
        await shell.channel.shutdown(600_000)
    assert await asyncio.to_thread(agent.process.wait, WAIT_S) == 0


async def test_nothing_inside_ends_the_agent(shell: Shell) -> None:
    result = await shell.run("kill -9 1; kill -TERM 1; kill -STOP 1; kill -SEGV 1; kill -CHLD 1; kill -PIPE 1; echo $?")
    assert result.stdout == b"0\n"
    await shell.channel.ping()


async def test_nothing_inside_sees_the_agents_descriptors(make_agent: Callable[..., Agent], connect: Connect) -> None:
    script = "ls /proc/1/fd; cat /proc/1/mem; cat /proc/1/environ; cat /proc/1/maps; readlink /proc/1/exe"
    shell = Shell(await connect(make_agent()))
    result = await shell.run(script, user="65534:65534")
    assert result.stdout == b""
    assert result.stderr.count(b"Permission denied") == 4


async def test_out_of_descriptors_is_named_and_survived(make_agent: Callable[..., Agent], connect: Connect) -> None:
    shell = Shell(await connect(make_agent(setup="ulimit -n 64")))
    started: list[int] = []
    with pytest.raises(GuestError) as caught:  # noqa: PT012
        for i in range(100):
            await shell.channel.start(1000 + i, StartCommand(argv=("sleep", "100"), env=ENV))
            started.append(1000 + i)
    assert caught.value.code == "limit"
    assert len(started) > 5
    for command_id in started:
        await shell.channel.kill(command_id, 0)
        assert (await drain(shell.channel, command_id)).exit.reason == 2
    assert (await shell.run("echo fine")).stdout == b"fine\n"


async def test_too_many_commands_are_refused_by_name(shell: Shell) -> None:
    codes = set()
    for i in range(1030):
        try:
            await shell.channel.start(2000 + i, StartCommand(argv=("sleep", "100"), env=ENV))
        except GuestError as error:
            codes.add(error.code)
    assert codes == {"limit"}
    await shell.channel.ping()
