"""Any operating system, from the SDK to the machine: what its screen shows, pixel for pixel, and what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from tests.boot_disk import GREEN, WHITE, YELLOW, picture, same
from tests.cluster.fullvm.conftest import Platform, command, until

import opendsec.sync
from opendsec import DSecFullVMRunArgs, OpenDSecError, SandboxEnd, SandboxState
from opendsec.errors import InvalidSpecError, SandboxExitedError, UnsupportedError
from opendsec.vm.q35 import QMP_SOCKET
from opendsec.vm.qmp import monitor

pytestmark = [pytest.mark.root, pytest.mark.qemu, pytest.mark.cgroup, pytest.mark.timeout(180)]


def test_it_draws_and_hears_keys_buttons_and_its_serial_line(machine: opendsec.sync.Sandbox) -> None:
    assert same(machine.screen.screenshot(), picture())
    size = machine.screen.size()
    assert (size.width, size.height) == (640, 400)
    machine.keyboard.type("Hello, World")
    machine.keyboard.press("shift", "a")
    until(lambda: machine.serial.read(5) == b"Hello, WorldA")
    assert same(machine.screen.screenshot(), picture(keys=13))
    machine.serial.write("xy")
    until(lambda: machine.serial.read(18) == b"xxyy")
    for button, corner in (("left", YELLOW), ("right", WHITE)):
        machine.mouse.down(button)
        shown = picture(keys=15, corner=corner)
        until(partial(_shows, machine, shown))
        machine.mouse.up(button)
        until(lambda: same(machine.screen.screenshot(), picture(keys=15, corner=GREEN)))
    machine.keyboard.press("f1")  # the guest changes its screen as it likes
    until(lambda: machine.screen.size().width == 720)
    machine.keyboard.press("f2")
    until(lambda: same(machine.screen.screenshot(), picture()))


def test_what_is_not_there_is_refused_by_name(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    refused = (
        ("no guest agent", lambda: machine.run_shell("true")),
        ("no guest agent", lambda: machine.files.read("/etc/passwd")),
        ("no guest agent", machine.clipboard.get),
        ("reads no tablet", lambda: machine.mouse.click(10, 10)),
        ("env: its image has no guest agent", lambda: platform.start(env={"A": "b"})),
    )
    for words, call in refused:
        with pytest.raises(OpenDSecError, match=words) as caught:
            call()
        assert isinstance(caught.value, UnsupportedError) or "env" in words
    bad = (
        ("outside of the screen", lambda: machine.mouse.click(640, 10)),
        ("'☃' at 2 is on no key", lambda: machine.keyboard.type("ok☃")),
        ("no key is called 'hyper'", lambda: machine.keyboard.press("hyper")),
        ("layout", lambda: machine.keyboard.type("a", layout="xx")),
    )
    for words, wrong in bad:
        with pytest.raises(InvalidSpecError, match=words):
            wrong()  # type: ignore[no-untyped-call]
    assert machine.serial.read() == b"boot\n"  # nothing of it was typed


def test_it_outlives_its_edge_and_loses_nothing_of_its_screen(platform: Platform) -> None:
    running, paused = platform.start(), platform.start()
    with running.stopping(), paused.stopping():
        running.keyboard.type("abc")
        until(lambda: running.serial.read() == b"boot\nabc")
        assert paused.pause().state is SandboxState.PAUSED
        edge = platform.pid("edge")
        os.kill(edge, signal.SIGKILL)
        until(lambda: _pid_or_0(platform) not in (0, edge), "no other edge was started")
        assert same(running.screen.screenshot(), picture(keys=3))
        assert running.serial.read() == b"boot\nabc"
        running.keyboard.type("d")
        until(lambda: running.serial.read(5) == b"abcd")
        assert paused.status().state is SandboxState.PAUSED
        paused.keyboard.type("e")  # wakes it
        until(lambda: paused.serial.read(5) == b"e")


def _shows(machine: opendsec.sync.Sandbox, wanted: Image.Image) -> bool:
    return same(machine.screen.screenshot(), wanted)


def _pid_or_0(platform: Platform) -> int:
    try:
        return platform.pid("edge")
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def test_further_machines_go_on_where_one_was_saved(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    machine.keyboard.type("12")
    until(lambda: machine.serial.read(5) == b"12")
    machine.snapshot("saved", timeout=60)
    machine.keyboard.type("3")
    until(lambda: machine.serial.read(5) == b"123")
    again = platform.client.run_fullvm(DSecFullVMRunArgs(snapshot="saved"), timeout=60)
    with again.stopping():
        assert same(again.screen.screenshot(), picture(keys=2))
        assert asyncio.run(_announce_rounds(platform, again)) == 0
        again.keyboard.type("x")
        until(lambda: again.serial.read() == b"x")
        assert same(again.screen.screenshot(), picture(keys=3))
    assert same(machine.screen.screenshot(), picture(keys=3))
    platform.client.snapshots.remove("saved")


async def _announce_rounds(platform: Platform, sandbox: opendsec.sync.Sandbox) -> int:
    """How often it has asked its guest to announce itself: a Linux guest may deadlock over it."""
    async with monitor(platform.run / "sbx" / sandbox.id / QMP_SOCKET) as qmp:
        return int((await qmp.execute("query-migrate-parameters"))["announce-rounds"])


def test_uefi_tpm_and_virtio(platform: Platform) -> None:
    """OVMF finds nothing to start from this disk; that it draws is what is asked of it here. The TPM's death is the
    guest's trouble alone."""
    sandbox = platform.client.run_fullvm(DSecFullVMRunArgs(image="modern", cpu_cores_limit=0.5), timeout=60)
    with sandbox.stopping():
        until(lambda: sandbox.screen.size().width >= 640)
        emulator = next(pid for pid in _processes(platform, sandbox.id) if _name(pid) == "swtpm")
        os.kill(emulator, signal.SIGKILL)
        until(lambda: "swtpm" not in {_name(pid) for pid in _processes(platform, sandbox.id)})
        assert sandbox.screen.screenshot().startswith(b"\x89PNG")
        (qemu,) = _processes(platform, sandbox.id)
        assert _user(qemu) >= 2**28
        assert "NoNewPrivs:\t1" in Path(f"/proc/{qemu}/status").read_text()
        assert "Seccomp:\t2" in Path(f"/proc/{qemu}/status").read_text()
        assert sorted(os.listdir(f"/proc/{qemu}/root/etc")) == ["ld.so.cache", "resolv.conf"]


def test_its_end_is_noticed_and_nothing_of_it_is_left(platform: Platform) -> None:
    killed = platform.start()
    (qemu,) = _processes(platform, killed.id)
    os.kill(qemu, signal.SIGKILL)
    until(lambda: killed.status().end_reason is not None)
    status = killed.status()
    assert (status.state, status.end_reason) == (SandboxState.FAILED, SandboxEnd.GUEST_LOST)
    assert status.end_detail.startswith("its machine has ended")  # there was no agent to be gone
    with pytest.raises(SandboxExitedError):
        killed.screen.screenshot()
    results: list[object] = []

    def start() -> None:
        try:
            results.append(
                platform.client.run_fullvm(DSecFullVMRunArgs(image="boot", labels={"race": "1"}), timeout=60)
            )
        except OpenDSecError as error:
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        for one in platform.client.list(labels={"race": "1"}):
            platform.client.stop(one.sandbox_id)  # while they boot
    for thread in threads:
        thread.join(60)
    for one in platform.client.list(labels={"race": "1"}):
        platform.client.stop(one.sandbox_id)
    assert len(results) == 3
    root = Path("/sys/fs/cgroup/unified") / platform.environment["OPENDSEC_EDGE_CGROUP"]
    assert list(root.glob("*/sbx-*")) == []
    assert list((platform.state / "edge/local/sandboxes").glob("*/box")) == []
    assert list((platform.run / "sbx").iterdir()) == []


def _processes(platform: Platform, sandbox_id: str) -> list[int]:
    root = Path("/sys/fs/cgroup/unified") / platform.environment["OPENDSEC_EDGE_CGROUP"]
    return [int(line) for line in (root / "latency" / sandbox_id / "cgroup.procs").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _user(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def test_the_command_line_starts_one_and_takes_its_picture(platform: Platform, tmp_path: Path) -> None:
    started = command(platform.environment, "run", "--backend", "fullvm", "--keep", "boot").strip()
    machine = platform.client.connect(started)
    with machine.stopping():
        until(lambda: machine.serial.read() == b"boot\n")
        command(platform.environment, "screen", started, "--output", str(tmp_path / "shot.png"))
        assert same((tmp_path / "shot.png").read_bytes(), picture())
        assert "/view/" in command(platform.environment, "screen", started, "--view")
