"""Starts that fail, are cut short or come all at once: typed answers, and nothing is left."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import random
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.linux.launching import Place, Site, build_probe, wait_until

from opendsec.linux import process
from opendsec.linux.launch import (
    LAUNCHER_PATH,
    Bind,
    IdMap,
    Launched,
    Launcher,
    LaunchError,
    Tmpfs,
    encode,
    parse_answer,
)

NATIVE = Path(__file__).parents[3] / "native"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.userns,
    pytest.mark.netns,
    pytest.mark.cgroup,
    pytest.mark.overlay,
    pytest.mark.native,
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture
def site(tmp_path: Path, probe: Path) -> Iterator[Site]:
    with Site(tmp_path, probe) as site:
        yield site


@pytest.fixture(scope="module", params=["release", "sanitized"])
def program(request: pytest.FixtureRequest) -> Path:
    """The launcher as installed, and built with the address and undefined-behaviour sanitizers."""
    if request.param == "release":
        return LAUNCHER_PATH
    make = ["make", "-s", "-C", str(NATIVE), "asan", "PROGRAMS=opendsec-launch"]
    subprocess.run(make, check=True, timeout=120, capture_output=True)
    return NATIVE / "build" / "asan" / "opendsec-launch"


@pytest.fixture
async def launcher(program: Path) -> AsyncIterator[Launcher]:
    async with Launcher(program) as launcher:
        yield launcher


def _wrong(site: Site) -> dict[str, tuple[dict[str, Any], int]]:
    """Step → what is wrong in the plan, and the errno it must give. A key may carry a remark after a blank."""
    file = site.root / "file"
    file.write_text("no program")
    not_executable = site.open(file)
    script = site.root / "script"
    script.write_text("no program")
    script.chmod(0o711)
    null = site.open(Path("/dev/null"), os.O_WRONLY)
    return {
        "lower file": ({"lower": (not_executable,)}, errno.EINVAL),
        "lower missing": ({"lower": ()}, errno.EINVAL),
        "upper missing": ({"upper": site.root / "no" / "upper", "work": site.root / "no" / "work"}, errno.ENOENT),
        "upper elsewhere": ({"work": site.root / "elsewhere" / "work"}, errno.EINVAL),
        "idmap": ({"idmap": IdMap(0, 0, 10)}, errno.EINVAL),
        "hostname": ({"hostname": "x" * 65}, errno.EINVAL),
        "cgroup2": ({"cgroup2": site.open(site.root)}, errno.EBADF),
        "cgroup1": ({"cgroup1": (not_executable,)}, errno.EBADF),
        "bind": ({"binds": (Bind(fd=not_executable, target="/etc/passwd/below"),)}, errno.ENOTDIR),
        "bind directory on a file": ({"binds": (Bind(fd=site.open(site.dev), target="/etc/passwd"),)}, errno.EINVAL),
        "tmpfs": ({"tmpfs": (Tmpfs(target="/tmp", options="no-such-option"),)}, errno.EINVAL),
        "tmpfs relative": ({"tmpfs": (Tmpfs(target="tmp"),)}, errno.EINVAL),
        "devpts": ({"devpts": "/etc/passwd"}, errno.EINVAL),
        "overlay": ({"overlay": ("no-such-option=1",)}, errno.EINVAL),
        "rlimit": ({"rlimits": {60: (1, 1)}}, errno.EINVAL),
        "exec not executable": ({"guest": not_executable}, errno.EACCES),
        "exec no program": ({"guest": site.open(script)}, errno.ENOEXEC),
        "exec device": ({"guest": null}, errno.EACCES),
    }


WRONG = [
    "lower file",
    "lower missing",
    "upper missing",
    "upper elsewhere",
    "idmap",
    "hostname",
    "cgroup2",
    "cgroup1",
    "bind",
    "bind directory on a file",
    "tmpfs",
    "tmpfs relative",
    "devpts",
    "overlay",
    "rlimit",
    "exec not executable",
    "exec no program",
    "exec device",
]


@pytest.mark.parametrize("what", WRONG)
async def test_a_failing_step_is_named_and_leaves_nothing(site: Site, launcher: Launcher, what: str) -> None:
    changes, number = _wrong(site)[what]
    assert launcher.pid is not None
    descriptors = Path(f"/proc/{launcher.pid}/fd")
    when_ready = len(list(descriptors.iterdir()))
    os.close((await launcher.launch(site.place().plan)).pidfd)
    place = site.place(**changes)
    with pytest.raises(LaunchError) as caught:
        await launcher.launch(place.plan)
    assert (caught.value.step, caught.value.errno) == (what.split(maxsplit=1)[0], number), str(caught.value)
    assert place.pids() == []
    assert len(list(process.children(launcher.pid))) == 1
    kept = 1  # the user namespace of the first one's range
    wait_until(lambda: len(list(descriptors.iterdir())) == when_ready + kept, "the launcher closed everything")


def test_every_wrong_plan_is_tried(site: Site) -> None:
    assert sorted(_wrong(site)) == sorted(WRONG)


async def test_what_cannot_be_sent_is_named(site: Site, launcher: Launcher) -> None:
    plan = site.place().plan
    with pytest.raises(ValueError, match="hostname: contains a NUL"):
        await launcher.launch(replace(plan, hostname="a\0b"))
    with pytest.raises(ValueError, match="descriptors"):
        await launcher.launch(replace(plan, lower=plan.lower * 300))
    with pytest.raises(ValueError, match="bytes"):
        await launcher.launch(replace(plan, args=("x" * 70000,)))


async def test_an_agent_that_ends_at_once_was_started(site: Site, launcher: Launcher) -> None:
    place = site.place(args=("--exit",))
    launched = await launcher.launch(place.plan)
    await process.wait_ended(launched.pidfd, timeout_s=10)
    os.close(launched.pidfd)
    wait_until(lambda: not Path(f"/proc/{launched.pid}").exists(), "the launcher reaped it")


async def test_the_launchers_death_fails_what_is_under_way_and_nothing_else(site: Site, launcher: Launcher) -> None:
    survivor = site.place()
    survived = await launcher.launch(survivor.plan)
    stuck = site.place(cgroup1=(site.blocking_fd(),))
    assert launcher.pid is not None
    first_life = launcher.pid
    async with asyncio.TaskGroup() as group:
        under_way = group.create_task(_failure(launcher, stuck))
        await _until(stuck.is_blocked)
        os.kill(first_life, signal.SIGKILL)
    assert under_way.result().step == "launcher"
    wait_until(lambda: not stuck.pids(), "the half-made sandbox died")
    assert not process.has_ended(survived.pidfd)
    assert await survivor.said("hostname") == "sandbox"
    again = site.place()
    os.close((await launcher.launch(again.plan)).pidfd)
    assert launcher.pid != first_life
    assert await again.said("hostname") == "sandbox"
    os.close(survived.pidfd)


async def _failure(launcher: Launcher, place: Place) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        await launcher.launch(place.plan)
    return caught.value


async def _until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_closed_launcher_may_be_started_again(site: Site) -> None:
    again = Launcher()
    await again.start()
    await again.close()
    with pytest.raises(LaunchError, match="was closed"):
        await again.launch(site.place().plan)
    async with again:
        place = site.place()
        os.close((await again.launch(place.plan)).pidfd)
        assert await place.said("hostname") == "sandbox"


async def test_a_killed_start_says_where_it_was(site: Site, launcher: Launcher) -> None:
    stuck = site.place(cgroup1=(site.blocking_fd(),))
    async with asyncio.TaskGroup() as group:
        failing = group.create_task(_failure(launcher, stuck))
        await _until(stuck.is_blocked)
        os.kill(stuck.pids()[0], signal.SIGKILL)
    assert (failing.result().step, failing.result().errno) == ("cgroup1", errno.EINTR)
    assert "killed" in str(failing.result())


async def test_a_cancelled_start_is_ended(site: Site, launcher: Launcher) -> None:
    stuck, next_one = site.place(cgroup1=(site.blocking_fd(),)), site.place()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await launcher.launch(stuck.plan)
    wait_until(lambda: not stuck.pids(), "the cancelled start died")
    os.close((await launcher.launch(next_one.plan)).pidfd)


class RawLauncher:
    """The launcher without its Python side, to see what it does by itself when one of the two dies."""

    def __init__(self, program: Path) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid, self.pidfd = process.spawn(program, fds={0: theirs.fileno()})

    def send(self, place: Place, *, seq: int = 1) -> None:
        packet, fds = encode(place.plan, seq=seq)
        self.send_raw(packet, fds)

    def send_raw(self, packet: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([packet], rights)

    def answer(self) -> dict[str, str]:
        packet, fds, _, _ = socket.recv_fds(self.ours, 4096, 1)
        for fd in fds:
            os.close(fd)
        return parse_answer(packet)

    def close(self) -> None:
        self.ours.close()
        process.send_signal(self.pidfd)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)


@pytest.fixture
def raw(program: Path) -> Iterator[RawLauncher]:
    raw = RawLauncher(program)
    raw.ours.settimeout(10)
    assert raw.answer() == {"seq": "0", "ok": "1", "pid": str(raw.pid)}
    yield raw
    raw.close()


def test_a_half_made_sandbox_dies_with_the_launcher(site: Site, raw: RawLauncher) -> None:
    stuck = site.place(cgroup1=(site.blocking_fd(),))
    raw.send(stuck)
    wait_until(stuck.is_blocked, "the start is under way")
    os.kill(raw.pid, signal.SIGKILL)
    wait_until(lambda: not stuck.pids(), "the half-made sandbox died")


def test_a_half_made_sandbox_dies_with_the_edge(site: Site, raw: RawLauncher) -> None:
    stuck = site.place(cgroup1=(site.blocking_fd(),))
    raw.send(stuck)
    wait_until(stuck.is_blocked, "the start is under way")
    raw.ours.close()
    wait_until(lambda: not stuck.pids(), "the half-made sandbox died")
    wait_until(lambda: process.has_ended(raw.pidfd), "the launcher ended")


def test_a_started_sandbox_outlives_both(site: Site, raw: RawLauncher) -> None:
    place = site.place()
    raw.send(place)
    assert raw.answer()["ok"] == "1"
    raw.ours.close()
    wait_until(lambda: process.has_ended(raw.pidfd), "the launcher ended")
    assert asyncio.run(place.said("hostname")) == "sandbox"


MALFORMED = {
    "no NUL": (b"seq=5", "request"),
    "no value": (b"seq=5\0lower\0", "request"),
    "unknown": (b"seq=5\0colour=red\0", "request"),
    "missing": (b"seq=5\0", "lower"),
    "twice": (b"seq=5\0hostname=a\0hostname=b\0", "hostname"),
    "not attached": (b"seq=5\0lower=@0\0", "lower"),
    "no descriptor": (b"seq=5\0lower=/etc\0", "lower"),
    "relative": (b"seq=5\0upper=tmp\0", "upper"),
    "number": (b"seq=5\0idmap=0 many 1\0", "idmap"),
    "huge number": (b"seq=5\0idmap=0 99999999999999999999999 1\0", "idmap"),
    "netns": (b"seq=5\0netns=host\0", "netns"),
    "bind": (b"seq=5\0bind=@0 ro\0", "bind"),
    "tmpfs": (b"seq=5\0tmpfs=/tmp\0", "tmpfs"),
    "hex": (b"seq=5\0caps=xyz\0", "caps"),
    "too many": (b"seq=5\0" + b"mask=/x\0" * 65, "mask"),
    "empty": (b"\0", "request"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_requests_are_answered(raw: RawLauncher, what: str) -> None:
    packet, step = MALFORMED[what]
    raw.send_raw(packet, [])
    answer = raw.answer()
    assert (answer["ok"], answer["step"], answer["errno"]) == ("0", step, str(int(errno.EINVAL)))
    assert answer["seq"] == ("0" if what in ("empty", "no NUL") else "5")


def test_no_packet_upsets_it(site: Site, raw: RawLauncher) -> None:
    """Mutations of a good request, without its descriptors so that none of them starts anything."""
    good, _ = encode(site.place().plan, seq=5)
    dice = random.Random(20)
    for _ in range(400):
        packet = bytearray(good)
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(packet))
            packet[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(4)) * dice.choice((1, 1, 1, 50))
        raw.send_raw(bytes(packet[: dice.randrange(1, len(packet) + 1)]), [])
        assert raw.answer()["ok"] == "0"
    raw.send(site.places[0])
    assert raw.answer()["ok"] == "1"


async def test_200_at_once(site: Site, launcher: Launcher) -> None:
    places = [site.place() for _ in range(200)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(launcher.launch(place.plan)) for place in places]
    launched: list[Launched] = [task.result() for task in tasks]
    assert len({each.pid for each in launched}) == len(places)
    for place, each in zip(places, launched, strict=True):
        assert place.pids() == [each.pid]
    for each in launched:
        process.send_signal(each.pidfd)
    for each in launched:
        await process.wait_ended(each.pidfd, timeout_s=10)
        os.close(each.pidfd)
    assert launcher.pid is not None
    wait_until(lambda: not list(process.children(launcher.pid or 0)), "the launcher has no children")
    assert len(list(Path(f"/proc/{launcher.pid}/fd").iterdir())) < 20


async def test_without_a_descriptor_for_the_pidfd_the_sandbox_is_ended(site: Site, launcher: Launcher) -> None:
    place = site.place()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        with pytest.raises(LaunchError, match="no descriptor is left") as caught:
            await launcher.launch(place.plan)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    wait_until(lambda: not place.pids(), "the sandbox was ended")
