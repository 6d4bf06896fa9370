"""Streams of hostile guests end by a typed error, and nothing is made outside of the tree."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.guest.test_machine import END, entry, piece

from opendsec.errors import ImageInvalidError
from opendsec.guest import protocol as p
from opendsec.vm.upper import UpperLimits, receive_upper

pytestmark = [pytest.mark.anyio, pytest.mark.root]

ROOT = entry("directory", b"")
DIRECTORY = entry("directory", b"d")


async def receive(stream: bytes, tree: Path, **limits: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(stream), 1000):
            yield stream[at : at + 1000]

    await receive_upper(chunks(), tree, limits=UpperLimits(**limits))


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        END,
        ROOT,
        DIRECTORY + END,
        ROOT + entry("file", b"../out") + piece(0, b"") + END,
        ROOT + entry("file", b"/out") + piece(0, b"") + END,
        ROOT + entry("file", b"d/out") + piece(0, b"") + END,
        ROOT + DIRECTORY + entry("file", b"d/./out") + piece(0, b"") + END,
        ROOT + DIRECTORY + DIRECTORY + END,
        ROOT + entry("symlink", b"l", (p.T_LINK, b"/")) + entry("file", b"l/out") + piece(0, b"") + END,
        ROOT + entry("symlink", b"l", (p.T_LINK, b"..")) + entry("file", b"h", (p.T_HARD_LINK, b"l/secret")) + END,
        ROOT + entry("file", b"h", (p.T_HARD_LINK, b"../secret")) + END,
        ROOT + DIRECTORY + entry("file", b"h", (p.T_HARD_LINK, b"d")) + END,
        ROOT + entry("directory", b"r", (p.T_XATTR, b"trusted.overlay.redirect\0/etc")) + END,
        ROOT + entry("file", b"m", (p.T_XATTR, b"trusted.overlay.metacopy\0")) + piece(0, b"") + END,
        ROOT + entry("file", b"o", (p.T_XATTR, b"trusted.overlay.opaque\0y")) + piece(0, b"") + END,
        ROOT + entry("file", b"x", (p.T_XATTR, b"nobody.knows\0y")) + piece(0, b"") + END,
        ROOT + entry("file", b"n" * 256) + piece(0, b"") + END,
        ROOT + entry("file", b"huge", size=1 << 62) + piece(0, b"") + END,
        ROOT + entry("file", b"cut", size=10) + piece(0, b"abc"),
        ROOT + entry("directory", b"/".join([b"d"] * 2000)) + END,
    ],
    ids=range(21),
)
async def test_what_a_hostile_guest_may_send(stream: bytes, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    before = os.lstat(tmp_path / "secret")
    with pytest.raises(ImageInvalidError, match="what the guest sent"):
        await receive(stream, tmp_path / "tree")
    after = os.lstat(tmp_path / "secret")
    assert (after.st_nlink, after.st_mtime_ns) == (before.st_nlink, before.st_mtime_ns)
    assert set(os.listdir(tmp_path)) <= {"secret", "tree"}


async def test_more_entries_and_bytes_than_allowed_are_refused(tmp_path: Path) -> None:
    many = ROOT + b"".join(entry("fifo", b"%d" % number) for number in range(2000)) + END
    with pytest.raises(ImageInvalidError, match="more than 1000 entries"):
        await receive(many, tmp_path / "many", max_entries=1000)
    with pytest.raises(ImageInvalidError, match="more than 1000 files and directories"):
        await receive(many, tmp_path / "inodes", max_inodes=1000)
    big = ROOT + entry("file", b"f", size=5000) + piece(0, b"x" * 3000) + piece(3000, b"x" * 2000) + piece(0, b"") + END
    with pytest.raises(ImageInvalidError, match="more than 4000 bytes"):
        await receive(big, tmp_path / "big", max_bytes=4000)


async def test_what_is_allowed_is_made_as_it_is_said(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    stream = ROOT + entry(
        "directory", b"d", (p.T_XATTR, b"trusted.overlay.opaque\0y"), (p.T_XATTR, b"trusted.overlay.origin\0z")
    )
    stream += entry("file", b"d/f", (p.T_XATTR, b"user.a\0b"), size=1 << 30) + piece(1 << 20, b"data") + piece(0, b"")
    stream += entry("file", b"hard", (p.T_HARD_LINK, b"d/f")) + entry("char_device", b"gone", (p.T_DEVICE, 0)) + END
    await receive(stream, tree)
    made = os.lstat(tree / "hard")
    assert (made.st_nlink, made.st_size, made.st_uid, made.st_gid, made.st_mtime_ns) == (2, 1 << 30, 1, 2, -5)
    assert made.st_blocks * 512 < 1 << 20
    assert os.listxattr(tree / "d") == ["trusted.overlay.opaque"]
    assert os.getxattr(tree / "hard", "user.a") == b"b"
    assert os.lstat(tree / "gone").st_rdev == 0
