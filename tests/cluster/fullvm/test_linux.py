"""A Linux that `opendsec image build-disk` made, from the SDK to its agent: a whole PC does what any sandbox does."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tests.cluster.fullvm.conftest import BOOT_S, WAIT_S, Platform, take_linux, until, words
from tests.contract.harness import FULLVM_NEEDS

import opendsec.sync
from opendsec import DSecFullVMRunArgs, SandboxEnd, SandboxState
from opendsec.errors import SandboxExitedError, UnsupportedError

pytestmark = [*(getattr(pytest.mark, name) for name in FULLVM_NEEDS), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def linux(up: tuple[Path, Path, dict[str, str]]) -> str:
    """A Linux as a disk, in the platform's store."""
    state, _, _ = up
    return take_linux(state, "configured", as_name="linux")


def test_a_whole_pc_does_what_any_sandbox_does(platform: Platform, linux: str) -> None:
    wanted = DSecFullVMRunArgs(image=linux, env={"GIVEN": "yes"}, init_user="0", workdir="/home")
    box = platform.client.run_fullvm(wanted, timeout=BOOT_S)
    with box.stopping():
        assert words(box, 'pwd; echo "$GIVEN"; id -u; id -un', user="agent") == "/home\nyes\n1000\nagent\n"
        box.files.write("/tmp/file", "grüß dich\n")
        assert words(box, "cat /tmp/file") == "grüß dich\n"
        words(box, "cd /etc; A=kept", session="s")
        with pytest.raises(UnsupportedError):
            box.clipboard.get()  # no desktop is inside
        _an_edge_that_is_killed_loses_nothing(platform, box)
        _a_pause_keeps_everything_but_the_clock(box)
        (fork,) = box.fork(timeout=BOOT_S)
        with fork.stopping():
            assert words(fork, 'pwd; echo "$A"', session="s") == "/etc\nkept\n"
            words(fork, "echo other > /tmp/file")
            assert words(box, "cat /tmp/file") == "grüß dich\n"
            random = {words(one, "head -c 16 /dev/urandom | od -An -tx1") for one in (box, fork)}
            assert len(random) == 2
        ended = box.stop()
        assert (ended.state, ended.end_reason) == (SandboxState.STOPPED, SandboxEnd.STOPPED)
        with pytest.raises(SandboxExitedError):
            box.run_shell("true")


def _an_edge_that_is_killed_loses_nothing(platform: Platform, box: opendsec.sync.Sandbox) -> None:
    """A command goes on without it, and whoever waits for its end gets it."""
    results: list[str] = []
    command = "touch /tmp/began; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo went"
    waiting = threading.Thread(target=lambda: results.append(words(box, command)))
    waiting.start()
    until(lambda: box.files.exists("/tmp/began"))
    edge = platform.pid("edge")
    os.kill(edge, signal.SIGKILL)
    words(box, "touch /tmp/go")
    waiting.join(WAIT_S * 2)
    assert results == ["went\n"]
    assert platform.pid("edge") != edge
    assert words(box, 'pwd; echo "$A"', session="s") == "/etc\nkept\n"


def _a_pause_keeps_everything_but_the_clock(box: opendsec.sync.Sandbox) -> None:
    words(box, "sleep 10000 & echo $! > /tmp/pid", session="s")
    assert box.pause().state is SandboxState.PAUSED
    time.sleep(3)
    before = time.time()
    guest = float(words(box, "kill -0 $(cat /tmp/pid) && date +%s"))  # wakes it
    assert before - 2 <= guest <= time.time() + 2
    assert words(box, "cat /tmp/file") == "grüß dich\n"
