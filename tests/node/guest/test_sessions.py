"""Sessions: a shell that lives on, with commands in order, exact output, honest ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.node.guest.agents import ENV, WAIT_S, Agent, Connect, Result, Shell, drain, timed_out, until

from opendsec.guest.base import GuestError, StartCommand

pytestmark = [pytest.mark.anyio, pytest.mark.root, pytest.mark.native, pytest.mark.cgroup]

SH_ONLY = """
mount -t tmpfs none /mnt && mkdir /mnt/bin /mnt/usr /mnt/dev /mnt/proc /mnt/lib /mnt/lib64 /mnt/tmp /mnt/etc &&
mount --bind /usr /mnt/usr && mount --rbind /dev /mnt/dev && mount -t proc proc /mnt/proc &&
mount --bind /usr/lib /mnt/lib &&
mount --bind /usr/lib64 /mnt/lib64 && ln -s /usr/bin/dash /mnt/bin/sh
"""


@pytest.fixture(params=["bash", "sh"])
async def session(
    request: pytest.FixtureRequest, make_agent: Callable[..., Agent], connect: Connect
) -> Callable[..., object]:
    """Runs a command line in session `s` of an agent whose image has this shell."""
    agent = make_agent() if request.param == "bash" else make_agent(setup=SH_ONLY, root="/mnt")
    shell = Shell(await connect(agent))

    async def run(script: str, **more: object) -> Result:
        return await shell.run(script, **{"session": "s", **more})  # type: ignore[arg-type]

    run.shell = shell  # type: ignore[attr-defined]
    run.agent = agent  # type: ignore[attr-defined]
    run.is_bash = request.param == "bash"  # type: ignore[attr-defined]
    return run


async def test_state_stays(session: Callable[..., object]) -> None:
    first = await session("cd /usr; x='a  b'; f() { echo f$1; }; export E=1", cwd="/dev")  # type: ignore[misc]
    assert first.exit.session_started
    second = await session('pwd; echo "$x"; f 2; env | grep ^E=; false')  # type: ignore[misc]
    assert second.stdout == b"/usr\na  b\nf2\nE=1\n"
    assert (second.exit.exit_code, second.exit.session_started, second.exit.session_gone) == (1, False, False)
    assert (await session("echo $?")).stdout == b"1\n"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["break", "continue", "return 0", ":", "", "# only a comment", "\n\n"])
async def test_text_that_ends_early_ends_only_itself(session: Callable[..., object], text: str) -> None:
    await session("x=kept")  # type: ignore[misc]
    result = await session(text)  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.session_gone) == (0, False)
    assert (await session("echo $x")).stdout == b"kept\n"  # type: ignore[misc]


async def test_bytes_and_quotes_survive(session: Callable[..., object]) -> None:
    script = "printf 'it'\\''s\\000\\r\\n\\n\"$HOME\"' ; printf %s \"$(printf 'no newline')\" >&2"
    result = await session(script)  # type: ignore[misc]
    assert (result.stdout, result.stderr) == (b'it\'s\0\r\n\n"$HOME"', b"no newline")


async def test_heredocs_functions_and_syntax_errors(session: Callable[..., object]) -> None:
    result = await session("cat <<'E'\n$x `y`\nE\ng() {\n echo in g\n}\ng")  # type: ignore[misc]
    assert result.stdout == b"$x `y`\nin g\n"
    if session.is_bash:  # type: ignore[attr-defined]  # POSIX makes sh leave at a syntax error
        broken = await session("echo 'open")  # type: ignore[misc]
        assert broken.exit.exit_code != 0
        assert (await session("echo on")).stdout == b"on\n"  # type: ignore[misc]


async def test_large_scripts_and_outputs(session: Callable[..., object]) -> None:
    result = await session(f"x={'y' * 1_000_000}; echo ${{#x}}; head -c 3000000 /dev/zero")  # type: ignore[misc]
    assert result.stdout == b"1000000\n" + bytes(3_000_000)


async def test_stdin_is_empty_and_our_descriptors_are_closed(session: Callable[..., object]) -> None:
    result = await session("cat; ls /proc/self/fd")  # type: ignore[misc]
    assert result.stdout.split() == [b"0", b"1", b"2", b"3"]


async def test_exit_and_losing_the_shell(session: Callable[..., object]) -> None:
    result = await session("echo a; exit 3")  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.reason, result.exit.session_gone, result.stdout) == (3, 0, True, b"a\n")
    result = await session("kill -9 $$")  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.signal, result.exit.reason) == (None, 9, 3)
    assert result.exit.session_started
    assert result.exit.session_gone
    result = await session("set -e; false; echo never")  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.session_gone, result.stdout) == (1, True, b"")
    result = await session("exec true")  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.session_gone) == (0, True)


async def test_tracing_shows_the_users_commands_only(session: Callable[..., object]) -> None:
    assert (await session("set -x; echo a")).stderr.strip(b"+ \n") == b"echo a"  # type: ignore[misc]
    assert (await session("echo b")).stderr.strip(b"+ \n") == b"echo b"  # type: ignore[misc]
    assert (await session("set +x")).stderr.strip(b"+ \n") == b"set +x"  # type: ignore[misc]
    assert (await session("echo c")).stderr == b""  # type: ignore[misc]


@pytest.mark.parametrize(
    "script",
    [
        "sleep 100; echo after",
        "while :; do :; done",
        "(trap '' TERM; sleep 100; echo child); echo after",
        "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 100'; echo after",
        "sleep 100 & wait; echo after",
    ],
)
async def test_a_timeout_ends_the_text_and_keeps_the_shell(session: Callable[..., object], script: str) -> None:
    await session("x=kept")  # type: ignore[misc]
    async with asyncio.timeout(WAIT_S):
        result = await session(script, timeout_ms=200, grace_ms=200)  # type: ignore[misc]
    assert (result.exit.exit_code, result.exit.reason, result.exit.session_gone) == (None, 1, False)
    assert result.stdout == b""
    assert (await session("echo $x")).stdout == b"kept\n"  # type: ignore[misc]
    assert len(session.agent.processes()) == 1  # type: ignore[attr-defined]


async def test_in_bash_a_timeout_leaves_functions_too(shell: Shell) -> None:
    await shell.run("g() { sleep 100; echo in; }; x=kept", session="s")
    result = await shell.run("g; echo after; g", session="s", timeout_ms=100, grace_ms=100)
    assert (result.exit.reason, result.stdout) == (1, b"")
    assert (await shell.run("echo $x; trap", session="s")).stdout.startswith(b"kept\n")


async def test_a_shell_that_does_not_come_back_goes(session: Callable[..., object]) -> None:
    await session("x=lost")  # type: ignore[misc]
    script = "trap '' 63; echo ready; while :; do :; done"
    result = await timed_out(session, script, ready=b"ready", grace_ms=100)  # type: ignore[arg-type]
    assert (result.exit.reason, result.exit.session_gone) == (1, True)
    after = await session('echo "[$x]"')  # type: ignore[misc]
    assert (after.stdout, after.exit.session_started) == (b"[]\n", True)


async def test_commands_of_one_session_wait_for_each_other(shell: Shell) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(shell.run(f"echo {i} start; sleep 0.05; echo {i} end", session="s")) for i in range(5)
        ]
        other = group.create_task(shell.run("echo free", session="t"))
    assert [task.result().stdout for task in tasks] == [b"%d start\n%d end\n" % (i, i) for i in range(5)]
    assert [task.result().exit.session_started for task in tasks] == [True, False, False, False, False]
    assert other.result().stdout == b"free\n"


async def test_background_output_appears_in_the_command_that_runs(
    shell: Shell, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("gate")
    behind = f"(until [ -e {place}/go-on ]; do sleep 0.01; done; echo late; : >{place}/told) & echo now"
    assert (await shell.run(behind, session="s")).stdout == b"now\n"
    then = f": >{place}/go-on; until [ -e {place}/told ]; do sleep 0.01; done; echo done"
    assert (await shell.run(then, session="s")).stdout == b"late\ndone\n"


async def test_ending_a_session_ends_all_of_it(shell: Shell, agent: Agent) -> None:
    channel = shell.channel
    await channel.start(1000, StartCommand(script="setsid sleep 100 & sleep 100", env=ENV, session="s"))
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_refused(shell, 1001))
        await asyncio.sleep(0.05)
        await channel.end_session("s")
        result = await drain(channel, 1000)
    assert (result.exit.reason, result.exit.session_gone) == (3, True)
    assert waiting.result() == "cancelled"
    await asyncio.to_thread(until, lambda: agent.processes() == [] and agent.command_cgroups() == [], "nothing left")
    await channel.end_session("never was")


async def _refused(shell: Shell, command_id: int) -> str:
    try:
        await shell.channel.start(command_id, StartCommand(script="echo no", env=ENV, session="s"))
    except GuestError as error:
        return error.code
    return ""


async def test_what_a_session_does_not_take(shell: Shell) -> None:
    for more in ({"stdin": True}, {"pty": (24, 80)}):
        with pytest.raises(GuestError) as caught:
            await shell.run("true", session="s", **more)
        assert caught.value.code == "unsupported"
    with pytest.raises(GuestError) as caught:
        await shell.argv("true", session="s")
    assert caught.value.code == "unsupported"
    with pytest.raises(GuestError) as caught:
        await shell.run("true", session="x" * 256)
    assert caught.value.code == "limit"
    with pytest.raises(GuestError) as caught:
        await shell.run("true", session="s", cwd="/no/such")
    assert caught.value.code == "bad_cwd"
    assert (await shell.run("echo yes", session="s")).stdout == b"yes\n"


async def test_sixty_four_sessions_and_no_more(shell: Shell) -> None:
    for i in range(64):
        assert (await shell.run(f"echo {i}", session=f"s{i}")).stdout == b"%d\n" % i
    with pytest.raises(GuestError) as caught:
        await shell.run("true", session="one more")
    assert caught.value.code == "limit"
    await shell.channel.end_session("s5")
    assert (await shell.run("echo again", session="one more")).stdout == b"again\n"
