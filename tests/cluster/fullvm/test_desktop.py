"""A Debian desktop, built by one command: boots to a window, takes clicks and words, and goes on from a snapshot.

Takes minutes where guests are emulated; `pytest -m soak tests/cluster/fullvm` runs it. OPENDSEC_TEST_DESKTOP names a
state directory whose store has the image `desktop` already.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from PIL import ImageChops
from tests.boot_disk import decoded
from tests.cluster.fullvm.conftest import Platform, command

import opendsec.sync
from opendsec import DSecFullVMRunArgs
from opendsec.store.disks import DiskRequest, import_disk
from opendsec.store.images import ImageStore

pytestmark = [
    pytest.mark.soak, pytest.mark.root, pytest.mark.qemu, pytest.mark.cgroup, pytest.mark.native,
    pytest.mark.mmdebstrap, pytest.mark.timeout(3600),
]  # fmt: skip
TITLE = "Terminal"


def _image(platform: Platform) -> None:
    kept = os.environ.get("OPENDSEC_TEST_DESKTOP", "")
    if not kept:
        command(platform.environment, "image", "build-desktop", timeout_s=3000)
        return
    image = ImageStore(Path(kept) / "store").get("desktop")
    assert image.config.machine is not None
    path = ImageStore(Path(kept) / "store").blob_path(image.layers[0].digest)
    request = DiskRequest(name="desktop", path=path, machine=image.config.machine, config=image.config)
    import_disk(ImageStore(platform.state / "store"), request)


def _words(machine: opendsec.sync.Sandbox, line: str) -> str:
    return machine.run_shell(line, timeout=120).stdout.strip()


def _patiently(what: str, machine: opendsec.sync.Sandbox, line: str) -> None:
    end = time.monotonic() + 600
    while not _words(machine, line):
        assert time.monotonic() < end, f"{what}: {line}"
        time.sleep(1)


def test_a_window_a_click_words_and_a_picture(platform: Platform) -> None:
    _image(platform)
    wanted = DSecFullVMRunArgs(image="desktop", ttl_running_stop=3600)
    machine = platform.client.run_fullvm(wanted, timeout=900)
    with machine.stopping():
        _patiently("a window", machine, "xdotool search --onlyvisible --class xterm")
        before = decoded(machine.screen.screenshot())
        assert before.size == (1280, 800)
        machine.mouse.click(400, 300)
        assert "x:400 y:300" in _words(machine, "xdotool getmouselocation")
        machine.keyboard.type("echo 'It is \"so\" & so' > /tmp/typed\n")
        _patiently("what was typed", machine, "cat /tmp/typed")
        assert _words(machine, "cat /tmp/typed") == 'It is "so" & so'
        after = decoded(machine.screen.screenshot())
        changed = ImageChops.difference(before, after).getbbox()
        assert changed is not None
        left, top, right, bottom = changed
        assert (left >= 40, top >= 55, right <= 960, bottom <= 640) == (True,) * 4, "more than the window has changed"
        machine.clipboard.set("gr\u00fc\u00df dich")
        assert machine.clipboard.get() == "gr\u00fc\u00df dich"
        _goes_on_from_a_snapshot(platform, machine)


def _goes_on_from_a_snapshot(platform: Platform, machine: opendsec.sync.Sandbox) -> None:
    machine.snapshot("desktop", timeout=900)
    time.sleep(3)
    random = set()
    for _ in range(2):
        again = platform.client.run_fullvm(DSecFullVMRunArgs(snapshot="desktop"), timeout=900)
        with again.stopping():
            random.add(_words(again, "head -c 16 /dev/urandom | od -An -tx1"))
            clock = float(_words(again, "date +%s.%N"))
            assert abs(time.time() - clock) < 30, "its clock is the snapshot's"
            assert _words(again, "cat /tmp/typed")
    assert len(random) == 2
