"""Requests and answers of the launcher as bytes, and what the Launcher object does without a launcher."""

from __future__ import annotations

import errno
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.linux.launch import (
    MAX_REQUEST_BYTES,
    Bind,
    IdMap,
    Launcher,
    LaunchError,
    LaunchPlan,
    Tmpfs,
    encode,
    install_guest,
    parse_answer,
)

PLAN = LaunchPlan(
    lower=(10, 11),
    upper=Path("/state/s 1/upper"),
    work=Path("/state/s 1/work"),
    idmap=IdMap(0, 268435456, 65536),
    cgroup2=12,
    cgroup1=(13, 14),
    listen=15,
    guest=16,
    args=("--one", "two words"),
    binds=(Bind(fd=17, target="/dev", devices=True), Bind(fd=18, target="/with blank", read_only=False)),
    tmpfs=(Tmpfs(target="/dev/shm", options="size=64m,mode=1777"),),
    masks=("/proc/kcore",),
    overlay=("volatile", "uuid=null"),
    caps=0xA80425FB,
    rlimits={7: (1024, 4096)},
)


def test_a_plan_is_one_packet_and_its_descriptors() -> None:
    packet, fds = encode(PLAN, seq=7)
    assert fds == [10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert packet.endswith(b"\0")
    assert packet[:-1].decode().split("\0") == [
        "seq=7",
        "lower=@0",
        "lower=@1",
        "upper=/state/s 1/upper",
        "work=/state/s 1/work",
        "idmap=0 268435456 65536",
        "hostname=sandbox",
        "cgroup2=@2",
        "cgroup1=@3",
        "cgroup1=@4",
        "listen=@5",
        "guest=@6",
        "arg=--one",
        "arg=two words",
        "bind=@7 ro,dev /dev",
        "bind=@8 rw /with blank",
        "tmpfs=size=64m,mode=1777 /dev/shm",
        "devpts=/dev/pts",
        "mask=/proc/kcore",
        "overlay=volatile",
        "overlay=uuid=null",
        "caps=a80425fb",
        "rlimit=7 1024 4096",
        "netns=new",
    ]


def test_paths_that_are_not_text_go_as_they_are() -> None:
    upper = Path("/state/\udcff/upper")
    packet, _ = encode(replace(PLAN, upper=upper), seq=1)
    assert b"\0upper=/state/\xff/upper\0" in packet


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, hostname="a\0b"), "hostname: contains a NUL byte"),
        (replace(PLAN, args=("x\0--evil",)), "arg: contains a NUL byte"),
        (replace(PLAN, masks=("/" + "m" * MAX_REQUEST_BYTES,)), f"at most {MAX_REQUEST_BYTES} fit one request"),
        (replace(PLAN, lower=(1,) * 251), "at most 250 fit one request"),
    ],
)
def test_what_does_not_fit_is_refused(plan: LaunchPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(plan, seq=1)


def test_answers() -> None:
    assert parse_answer(b"seq=3\0ok=1\0pid=42\0") == {"seq": "3", "ok": "1", "pid": "42"}
    failed = parse_answer(b"seq=3\0ok=0\0step=bind\0errno=2\0message=attach /a=b: No such file\0")
    assert failed["message"] == "attach /a=b: No such file"


def test_a_launch_error_says_step_words_and_number() -> None:
    error = LaunchError("bind", errno.ENOENT, "attach /dev: No such file or directory")
    assert str(error) == "launch failed at step bind: attach /dev: No such file or directory [ENOENT]"
    assert (error.step, error.errno) == ("bind", errno.ENOENT)
    assert isinstance(error, OSError)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_missing_launcher_program_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await Launcher(tmp_path / "no-such-program").start()


@pytest.mark.anyio
async def test_a_program_that_is_no_launcher_is_noticed(tmp_path: Path) -> None:
    program = tmp_path / "ends-at-once"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    launcher = Launcher(program)
    with pytest.raises(LaunchError, match="died before it had answered"):
        await launcher.start()
    assert launcher.pid is None
    await launcher.close()


@pytest.mark.anyio
async def test_after_close_nothing_is_launched(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path / "never-started")
    await launcher.close()
    with pytest.raises(LaunchError, match="was closed"):
        await launcher.launch(PLAN)


def test_installing_the_agent_is_idempotent_and_by_content(tmp_path: Path) -> None:
    binary = tmp_path / "agent"
    binary.write_bytes(b"one")
    first = install_guest(tmp_path / "state", binary=binary)
    assert install_guest(tmp_path / "state", binary=binary) == first
    binary.write_bytes(b"two")
    second = install_guest(tmp_path / "state", binary=binary)
    assert first != second
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")
    assert stat.S_IMODE(second.stat().st_mode) == 0o711
    assert {entry.name for entry in first.parent.iterdir()} == {first.name, second.name}
