"""What a Linux with our agent has written is packed with its file systems whole; without the agent's help it is as
after a power cut, and that is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cluster.fullvm.conftest import BOOT_S, Platform, take_linux, words
from tests.contract.harness import FULLVM_NEEDS, fullvm_place

from opendsec import DSecFullVMRunArgs, SandboxState
from opendsec.backends.fullvm_stillness import _frozen

pytestmark = [*(getattr(pytest.mark, name) for name in FULLVM_NEEDS), pytest.mark.timeout(300)]
RECOVERED = "recovery complete"
"""What ext4 says when it was not whole."""


@pytest.fixture(scope="module")
def linux(up: tuple[Path, Path, dict[str, str]]) -> str:
    """A Linux as a disk, in the platform's store."""
    state, _, _ = up
    return take_linux(state, "busybox", as_name="linux-plain")


def test_an_agent_makes_its_disk_whole_first(platform: Platform, linux: str) -> None:
    box = platform.client.run_fullvm(DSecFullVMRunArgs(image=linux), timeout=BOOT_S)
    with box.stopping():
        words(box, "mkdir /kept; (while :; do echo line >> /kept/log; done) >/dev/null 2>&1 & echo here > /kept/file")
        whole = box.pack_diff("whole")
        assert not whole.details.crash_consistent
        words(box, "echo goes on > /kept/later; sync")
        assert box.pause().state is SandboxState.PAUSED
        torn = box.pack_diff("torn")
        assert torn.details.crash_consistent
        assert box.status().state is SandboxState.PAUSED
    with platform.client.run_fullvm(DSecFullVMRunArgs(image=whole), timeout=BOOT_S).stopping() as again:
        assert words(again, "cat /kept/file; ls /kept") == "here\nfile\nlog\n"
        assert RECOVERED not in words(again, "dmesg")
    with platform.client.run_fullvm(DSecFullVMRunArgs(image=torn), timeout=BOOT_S).stopping() as again:
        assert words(again, "cat /kept/file /kept/later") == "here\ngoes on\n"
        assert RECOVERED in words(again, "dmesg")


@pytest.mark.anyio
async def test_a_guest_is_frozen_by_its_own_programs_where_the_agent_is_one_of_many() -> None:
    """And thaws when nobody holds it any more."""
    async with fullvm_place() as place, place.sandbox() as box:
        async with _frozen(box.guest) as whole:
            assert whole
            number = await box.start("echo x > /file; echo wrote")
            writing = asyncio.ensure_future(box.finish(number))
            await asyncio.wait((writing,), timeout=1)
            assert not writing.done()
        assert (await writing).stdout == b"wrote\n"
        assert (await box.run("cat /file")).stdout == b"x\n"
