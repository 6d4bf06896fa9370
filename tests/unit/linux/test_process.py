"""Running, watching and identifying processes; none of it needs root."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from opendsec.linux import process
from opendsec.linux.process import OutputTooLongError, ProcessIdentity, ProgramError

SHELL = Path("/bin/sh")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_start_ticks_behind_a_hostile_name() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert process.parse_start_ticks(f"42 (a) R 1 (b) S {fields}".encode()) == 22
    own = process.identify(os.getpid())
    assert own is not None
    assert own.start_ticks > 0


def test_an_identity_of_an_earlier_life_is_nobody() -> None:
    own = process.identify(os.getpid())
    assert own is not None
    pidfd = process.open_process(own)
    assert pidfd is not None
    os.close(pidfd)
    assert process.open_process(ProcessIdentity(own.pid, own.start_ticks - 1)) is None


def test_of_an_ended_process_nothing_is_found() -> None:
    pid, pidfd = process.spawn(SHELL, argv=("-c", "exit 3"))
    identity = process.identify(pid)
    assert identity is not None
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    assert process.has_ended(pidfd)
    assert process.open_process(identity) is None
    assert process.reap(pid) == 3
    assert process.reap(pid) is None
    assert process.identify(pid) is None
    assert not process.send_signal(pidfd)
    os.close(pidfd)


@pytest.mark.anyio
async def test_waiting_for_an_end() -> None:
    pid, pidfd = process.spawn(SHELL, argv=("-c", "exec sleep 60"))
    with pytest.raises(TimeoutError):
        await process.wait_ended(pidfd, timeout_s=0.01)
    assert process.send_signal(pidfd, signal.SIGTERM)
    await process.wait_ended(pidfd, timeout_s=10)
    assert process.reap(pid) == -signal.SIGTERM
    os.close(pidfd)


def test_spawned_programs_get_only_what_was_named() -> None:
    reading, writing = os.pipe()
    script = "echo $FOO $$ >&7; ps -o sid= -p $$ >&7"
    env = {"FOO": "bar", "PATH": os.defpath}
    pid, pidfd = process.spawn(SHELL, argv=("-c", script), fds={7: writing}, env=env)
    os.close(writing)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    with os.fdopen(reading) as stream:
        assert stream.read().split() == ["bar", str(pid), str(pid)]
    os.close(pidfd)


def test_a_swap_of_descriptors_is_refused() -> None:
    with pytest.raises(ValueError, match="another target's source"):
        process.spawn(SHELL, fds={0: 1, 1: 0})


@pytest.mark.anyio
async def test_run_collects_everything() -> None:
    script = "cat; echo words >&2; exit 4"
    done = await process.run(["sh", "-c", script], timeout_s=10, stdin=b"x" * 200000, check=False)
    assert (done.status, done.stdout, done.stderr) == (4, b"x" * 200000, b"words\n")
    with pytest.raises(ProgramError, match=r"^sh ended with status 4: words$") as caught:
        await process.run(["sh", "-c", "echo words >&2; exit 4"], timeout_s=10)
    assert (caught.value.status, caught.value.stderr) == (4, b"words\n")


@pytest.mark.anyio
async def test_run_ends_what_takes_too_long_with_its_children() -> None:
    with pytest.raises(TimeoutError):
        await process.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.05)
    assert list(process.children(os.getpid())) == []


def test_run_sync_keeps_the_same_promises(tmp_path: Path) -> None:
    done = process.run_sync(["sh", "-c", "pwd; cat"], timeout_s=10, stdin=b"in", cwd=tmp_path)
    assert done.stdout == f"{tmp_path}\nin".encode()
    with pytest.raises(TimeoutError, match=r"sh did not end within 0\.05 s"):
        process.run_sync(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.05)
    with pytest.raises(ProgramError, match="killed by signal 9"):
        process.run_sync(["sh", "-c", "kill -9 $$"], timeout_s=10)
    with pytest.raises(FileNotFoundError):
        process.run_sync(["/no/such/program"], timeout_s=10)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", ["", ">&2"])
async def test_a_program_that_writes_without_end_is_ended(stream: str) -> None:
    script = f"(yes {stream}) & yes {stream}"
    with pytest.raises(OutputTooLongError, match="wrote more than 100000 bytes"):
        await process.run(["sh", "-c", script], timeout_s=60, limit=100_000)
    with pytest.raises(OutputTooLongError, match="wrote more than 100000 bytes"):
        await asyncio.to_thread(process.run_sync, ["sh", "-c", script], timeout_s=60, limit=100_000)
    assert list(process.children(os.getpid())) == []
    whole = await process.run(["head", "-c", "100000", "/dev/zero"], timeout_s=60, limit=100_000)
    again = await asyncio.to_thread(
        process.run_sync, ["head", "-c", "100000", "/dev/zero"], timeout_s=60, limit=100_000
    )
    assert whole == again
    assert whole.stdout == bytes(100_000)


@pytest.mark.anyio
async def test_input_that_nobody_reads_hinders_nobody() -> None:
    data = b"x" * 1_000_000
    assert (await process.run(["true"], timeout_s=60, stdin=data)).status == 0
    assert (await asyncio.to_thread(process.run_sync, ["true"], timeout_s=60, stdin=data)).status == 0
    both = await process.run(["cat"], timeout_s=60, stdin=data)
    assert both.stdout == data
    assert (await asyncio.to_thread(process.run_sync, ["cat"], timeout_s=60, stdin=data)).stdout == data


def test_programs_do_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENDSEC_API_KEY", "secret")
    assert b"secret" not in process.run_sync(["env"], timeout_s=10).stdout


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("line", "number", "killed"), [("exit 1", 0, False), ("read -r _", 9, True), ("read -r _", 6, False)]
)
async def test_who_was_killed_and_who_ended(line: str, number: int, killed: bool) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = process.spawn(SHELL, argv=("-c", line), fds={0: reader})
    try:
        if number:
            assert not process.was_killed(pidfd)
            process.send_signal(pidfd, number)
        await process.wait_ended(pidfd, timeout_s=60)
        assert process.was_killed(pidfd) is killed
        assert process.reap(pid) is not None, "it was left to be reaped"
        assert not process.was_killed(pidfd)
    finally:
        for fd in (reader, writer, pidfd):
            os.close(fd)
