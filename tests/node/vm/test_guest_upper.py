"""What a guest has written comes out exactly: as its disk has it, which only this test mounts. It can hold still."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from tests.node.guest.agents import ENV, Shell, drain
from tests.node.vm.guests import Machine, run
from tests.tree_facts import difference, tree_of

from opendsec.guest.base import GuestError, StartCommand
from opendsec.guest.channel import Channel
from opendsec.store.programs import find_program, run_program
from opendsec.vm.upper import receive_upper

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.root,
    pytest.mark.native,
    pytest.mark.qemu,
    pytest.mark.vmkernel,
    pytest.mark.timeout(300),  # emulated, on a machine that does other things too
]

WRITE = r"""
set -e
mkdir -p /t/sub /t/deep/a/b/c/d && cd /t
echo text >file && chmod 4751 file && chown 1000:1234 file && touch -d '2001-02-03 04:05:06' file
ln file sub/hard && ln file deep/a/b/other
ln -s /nowhere/at/all link && ln -s file sub/near
mkfifo fifo && mknod null c 1 3 && mknod disk b 7 300 && chmod 640 disk
truncate -s 300000000 sparse && echo middle | dd of=sparse bs=1 seek=123456789 conv=notrunc 2>/dev/null
truncate -s 5000000 hole
: >empty
head -c 3000000 /dev/urandom >big
echo x >"$(printf 'new\nline \377')"
setx file user.note hello && setx sub trusted.mark there && setx link trusted.link 'of a link'
chmod 1777 deep && touch -d '1999-01-01' deep/a
rm /opt/both && rm -r /opt/old && mkdir /opt/old && echo new >/opt/old/new
rmdir /var/lib/gone
chmod 700 /root && chown 5:6 /root
"""


@pytest.fixture
def disk(machine: Machine, tmp_path: Path) -> Path:
    return machine.folder / "rw"


def without_bookkeeping(tree: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Attributes of overlayfs that mean nothing elsewhere are dropped; whiteouts may be one file with many names."""
    found = {}
    for name, facts in tree.items():
        attributes = facts[6]
        assert isinstance(attributes, tuple)
        kept = tuple(one for one in attributes if one[0] == "trusted.overlay.opaque" or "overlay" not in one[0])
        is_whiteout = facts[4] == 0
        found[name] = (*facts[:6], kept, *(() if is_whiteout else facts[7:]))
    return found


async def count(channel: Channel) -> int:
    return (await channel.stat("/ticks")).size


async def test_held_still_the_disk_is_whole_and_nothing_runs(
    machine: Machine, channel: Channel, shell: Shell, tmp_path: Path
) -> None:
    command = shell.new_id()
    await channel.start(command, StartCommand(script="while :; do echo tick >>/ticks; done", env=ENV))
    while (await shell.run("test -s /ticks")).exit.exit_code:
        pass
    copy = tmp_path / "copy"
    async with channel.frozen():
        first = await count(channel)
        await asyncio.to_thread(shutil.copyfile, machine.folder / "rw", copy)
        await asyncio.sleep(0.5)
        assert await count(channel) == first
    checked = run_program([find_program("e2fsck"), "-fn", str(copy)], timeout_s=60)
    assert checked.status == 0, checked.tail
    while await count(channel) == first:
        await asyncio.sleep(0.01)
    await channel.kill(command, 0)
    await drain(channel, command)


async def test_a_freeze_ends_by_itself_and_says_so(channel: Channel, shell: Shell) -> None:
    async def too_long() -> None:
        async with channel.frozen(timeout_ms=700):
            with pytest.raises(GuestError, match="busy"):
                await channel.frozen(timeout_ms=1).__aenter__()
            assert (await shell.run("echo late >/late; echo on")).stdout == b"on\n"

    with pytest.raises(GuestError) as caught:
        await too_long()
    assert (caught.value.code, caught.value.errno) == ("file", errno.ETIMEDOUT)
    assert (await shell.run("echo on")).stdout == b"on\n"


async def test_a_freeze_ends_with_the_connection(machine: Machine, channel: Channel, shell: Shell) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(Exception, match="closed"):
            async with channel.frozen(timeout_ms=3_000_000):
                await channel.aclose()
        again = await machine.channel()
        assert (await Shell(again, shell.new_id()).run("echo on >/on; cat /on")).stdout == b"on\n"
        await again.aclose()


async def test_a_freeze_that_nobody_waits_for_any_more_holds_nothing(channel: Channel, shell: Shell) -> None:
    """Cancelled before its answer, at moments that differ; the next freeze comes while the last one thaws."""
    async with asyncio.timeout(120):
        for moment_s in (0, 0, 0.002, 0.005, 0.01, 0.02):
            asking = asyncio.ensure_future(channel.frozen().__aenter__())
            await asyncio.sleep(moment_s)
            asking.cancel()
            await asyncio.wait({asking})
            async with channel.frozen():
                pass
            assert (await shell.run("echo on >/on; sync; cat /on")).stdout == b"on\n"


@pytest.mark.loop
async def test_all_that_was_written_comes_out_as_it_is(
    machine: Machine, channel: Channel, shell: Shell, tmp_path: Path
) -> None:
    """The last one of the module: it powers the machine off, which writes everything to the disk."""
    said = await shell.run(WRITE)
    assert (said.exit.exit_code, said.stderr) == (0, b"")
    received, mounted = tmp_path / "upper", tmp_path / "disk"
    async with channel.frozen():
        await receive_upper(channel.pack_upper(), received)
    await channel.shutdown(2000)
    assert machine.wait() == 0
    mounted.mkdir()
    run("mount", "-o", "loop", machine.folder / "rw", mounted)
    try:
        expected, found = tree_of(mounted / "upper"), tree_of(received)
        assert {"t/file", "t/sub/hard", "t/sparse", "opt/both", "var/lib/gone"} <= expected.keys()
        assert difference(without_bookkeeping(found), without_bookkeeping(expected)) == ""
        assert os.lstat(received / "t/sparse").st_blocks * 512 < 1 << 20
    finally:
        run("umount", mounted)
    assert stat.S_ISCHR(os.lstat(received / "opt/both").st_mode)
    assert os.getxattr(received / "opt/old", "trusted.overlay.opaque") == b"y"
    shutil.rmtree(received)
