"""A corpus of nasty layers: what a sandbox would see is what umoci unpacks, name by name and byte by byte.

Where umoci is not the measure, the expected tree is written out, and why.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.store.importers.showing import imported, leftovers, shown
from tests.node.store.importers.test_oci import BASE, CAPABILITY, by_umoci
from tests.oci_layout import TIME, Entry, directory, file, hardlink, make_layout, symlink
from tests.tree_facts import difference, tree_of

from opendsec.errors import ImageInvalidError
from opendsec.store.images import ImageStore

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]


def acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX access list as the kernel's attribute has it: (tag, permissions, id) each."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NOBODY_IN_PARTICULAR = 0xFFFFFFFF
ACL = acl(
    (1, 6, NOBODY_IN_PARTICULAR),
    (2, 4, 1234),
    (4, 4, NOBODY_IN_PARTICULAR),
    (16, 4, NOBODY_IN_PARTICULAR),
    (32, 4, NOBODY_IN_PARTICULAR),
)
WHITEOUT_LINKS = [file("data/.wh.a"), hardlink("data/.wh.b", "data/.wh.a"), hardlink(".wh.etc", "data/.wh.a")]
PLACES = [directory("d"), file("d/f", b"f"), symlink("s", "d"), file("f", b"f"), directory("e"), directory("e/below")]
KINDS: dict[str, Callable[[str], list[Entry]]] = {
    "file": lambda name: [file(name, b"new")],
    "directory": lambda name: [directory(name), file(f"{name}/in", b"i")],
    "link": lambda name: [symlink(name, "e")],
    "FIFO": lambda name: [Entry(name=name, kind=tarfile.FIFOTYPE)],
    "device": lambda name: [Entry(name=name, kind=tarfile.CHRTYPE, device=(1, 7))],
}

CORPUS: dict[str, list[list[Entry]]] = {
    "whiteouts that are hard links": [BASE, WHITEOUT_LINKS],
    "whiteout in an opaque directory": [
        BASE,
        [directory("data"), file("data/.wh..wh..opq"), file("data/.wh.a"), file("data/b", b"new")],
    ],
    "opaque directory that was not there": [BASE, [directory("fresh"), file("fresh/.wh..wh..opq"), file("fresh/f")]],
    "opaque root": [BASE, [directory("./"), file(".wh..wh..opq"), file("only", b"o")]],
    "opaque twice": [
        BASE,
        [directory("data"), file("data/.wh..wh..opq"), file("data/one", b"1")],
        [directory("data"), file("data/.wh..wh..opq"), file("data/two", b"2")],
    ],
    "opaque below opaque": [
        BASE,
        [
            directory("data"),
            file("data/.wh..wh..opq"),
            directory("data/sub"),
            file("data/sub/.wh..wh..opq"),
            file("data/sub/n", b"n"),
            directory("data/sub", mtime=9),
        ],
    ],
    "whiteout of the deep": [BASE, [file("data/sub/.wh.c")], [file("data/.wh.sub"), file("data/sub2", b"s")]],
    "whiteout of a whiteout": [BASE, [file("data/.wh.a")], [file("data/.wh.a")], [file("data/a", b"back")]],
    "hard links over three layers": [
        [file("a", b"x" * 9000, mtime=3), hardlink("b", "a"), directory("d"), hardlink("d/c", "b")],
        [hardlink("d/e", "a"), directory("d", mtime=TIME)],
        [file(".wh.a"), hardlink("g", "d/c")],
    ],
    "hard link to a link": [[symlink("s", "nowhere"), hardlink("t", "s")], [hardlink("u", "t")]],
    "hard link to a device": [BASE, [hardlink("dev/zero", "dev/null"), hardlink("run/tube", "run/pipe")]],
    "hard link over a file": [BASE, [hardlink("data/b", "data/a")]],
    "a file replaces all of its links": [BASE, [file("data/a", b"1"), hardlink("data/a-again", "data/a")]],
    "many hard links": [[file("f", b"f"), *(hardlink(f"l{number}", "f") for number in range(300))]],
    "many hard links, one later": [
        [file("f", b"f"), *(hardlink(f"l{number}", "f") for number in range(300))],
        [hardlink("late", "l299")],
    ],
    "attributes of a directory are replaced": [
        [directory("d", xattrs={"user.a": b"1", "user.b": b"2"}), file("d/f", b"f")],
        [directory("d", xattrs={"user.b": b"3"})],
        [directory("d", mode=0o1777)],
    ],
    "attributes of the root": [
        [directory("./", mode=0o1755, uid=1, gid=2, mtime=5, xattrs={"user.root": b"r"})],
        [file("f", b"f")],
    ],
    "attributes of every kind": [
        [
            directory("d", xattrs={"user.d": b"\0\xff=\n", "trusted.kept": b"t", "security.capability": CAPABILITY}),
            file("f", b"f", xattrs={"user." + "n" * 200: b"v" * 1000, "trusted.empty": b"0"}),
        ]
    ],
    "access lists": [
        [
            file("f", b"f", mode=0o644, xattrs={"system.posix_acl_access": ACL}),
            directory("d", mode=0o755, xattrs={"system.posix_acl_default": ACL}),
        ],
        [directory("e", mode=0o755, xattrs={"system.posix_acl_default": ACL})],
    ],
    "set-id bits and odd modes": [
        [
            directory("g", mode=0o2775, gid=5),
            file("g/plain", b"p", mode=0),
            directory("g/d", mode=0o755),
            file("all", b"a", mode=0o7777, uid=70_000, gid=4_000_000_000),
        ],
        [file("g/later", b"l", mode=0o2755, uid=3)],
    ],
    "empty files and directories": [[file("f"), directory("d")], [file("g"), directory("d/e")]],
    "same path three times in a layer": [[file("x", b"1"), directory("x"), file("x/in", b"i"), symlink("x", "y")]],
    "parents that are links": [
        [directory("a/b"), symlink("l", "a"), symlink("a/up", ".."), directory("./", mtime=1), directory("a", mtime=1)],
        [file("l/b/f", b"f"), file("l/up/g", b"g"), directory("a/b", mtime=1)],
    ],
    "names that are no text": [
        [directory("d\udcff"), file("d\udcff/\udc80é\n", b"x")],
        [file("d\udcff/.wh.\udc80é\n")],
    ],
    "names of 254 bytes": [
        [file("n" * 254, b"n"), directory("d" * 254)],
        [file(".wh." + "n" * 251), hardlink("k", "n" * 254)],
    ],
    "a path of 4000 bytes": [
        [file("/".join(["p" * 199] * 20), b"deep")],
        # umoci leaves the times of parents nobody describes to the clock.
        [directory("./"), *(directory("/".join(["p" * 199] * depth)) for depth in range(1, 20))],
    ],
    "a link of 4095 bytes": [[symlink("s", "t" * 4095), symlink("short", "t")], [hardlink("u", "s")]],
    "layers without anything": [[], BASE, [], [directory("./", mtime=7)], []],
    "numbers of devices": [
        [Entry(name="c", kind=tarfile.CHRTYPE, device=(4095, 1_048_575)), Entry(name="b", kind=tarfile.BLKTYPE)],
    ],
    "times before and after": [
        [file("old", mtime=-5.25), file("late", mtime=4_294_967_296.5), directory("d", mtime=-2)]
    ],
    **{
        f"{kind} in the place of {there}": [PLACES, make(name)]
        for kind, make in KINDS.items()
        for name, there in (("d", "a directory"), ("s", "a link"), ("f", "a file"))
    },
}


@pytest.mark.parametrize("case", CORPUS)
def test_the_same_as_umoci(store: ImageStore, disk: Path, case: str) -> None:
    layout = make_layout(disk / "layout", CORPUS[case])
    expected = tree_of(by_umoci(layout, disk / "umoci"))
    for collapse_bytes in (0, 1 << 30):
        image = imported(store, f"x{collapse_bytes}", layout, collapse_bytes=collapse_bytes)
        with shown(store, image.layers) as tree:
            assert not difference(tree_of(tree), expected)


def test_what_umoci_leaves_out(store: ImageStore, disk: Path) -> None:
    """It takes an empty attribute for none, as Go's tar does; GNU tar writes and restores them, and so do we."""
    (disk / "tree").mkdir()
    (disk / "tree/f").write_bytes(b"f")
    os.setxattr(disk / "tree/f", "user.empty", b"")
    command = ["tar", "--format=pax", "--xattrs", "-C", str(disk / "tree"), "-cf", str(disk / "a.tar"), "."]
    subprocess.run(command, check=True, timeout=120)
    with shown(store, imported(store, "x", disk / "a.tar").layers) as tree:
        assert not difference(tree_of(tree), tree_of(disk / "tree"))


def test_nothing_is_inherited_from_a_directory(store: ImageStore, disk: Path) -> None:
    """Access lists and groups of a directory go to what is made in it, unless somebody minds; umoci does not."""
    lower = [directory("d", mode=0o2775, gid=7, xattrs={"system.posix_acl_default": ACL})]
    upper = [file("d/f", b"f", mode=0o640), directory("d/sub", mode=0o700), file("d/made/g", b"g")]
    for collapse_bytes in (0, 1 << 30):
        layout = make_layout(disk / f"layout{collapse_bytes}", [lower, upper])
        image = imported(store, f"x{collapse_bytes}", layout, collapse_bytes=collapse_bytes)
        with shown(store, image.layers) as tree:
            found = tree_of(tree)
        assert found["d/f"][:2] == ("0o100640", (0, 0))
        assert found["d/sub"][:2] == ("0o40700", (0, 0))
        assert found["d/made"][:2] == ("0o40755", (0, 0))
        assert [name for name, facts in found.items() if facts[6]] == ["d"]


REFUSED: dict[str, tuple[list[Entry], str]] = {
    "below a whiteout": ([file("d/.wh.x/f", b"f")], "d/.wh.x/f"),
    "a name of 255 bytes": ([file("n" * 255, b"n")], "n" * 255),
    "a moment before 1970": ([file("f", mtime=-0.5)], "f"),
    "an attribute that is too large": ([file("f", xattrs={"user.a": b"a" * 5000})], "f"),
    "an attribute of nobody": ([file("f", xattrs={"nobody.a": b"a"})], "f"),
    "an attribute on a link": ([symlink("s", "t", xattrs={"user.a": b"a"})], "s"),
    "an escaped attribute of overlays": ([file("f", xattrs={"trusted.overlay.overlay.opaque": b"y"})], "f"),
    "an opaque mark": ([directory("d", xattrs={"trusted.overlay.opaque": b"y"})], "d"),
    "a link too long": ([symlink("s", "t" * 4096)], "s"),
    "a hard link to a hidden file": ([file(".wh.a"), hardlink("b", "a")], "b"),
    "a hard link to itself": ([hardlink("a", "a")], "a"),
    "a link to nothing": ([symlink("s", "")], "s"),
    "a device out of range": ([Entry(name="c", kind=tarfile.CHRTYPE, device=(1 << 20, 1))], "c"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused(store: ImageStore, disk: Path, case: str) -> None:
    entries, entry = REFUSED[case]
    layout = make_layout(disk / "layout", [[file("a", b"a")], entries])
    for collapse_bytes in (0, 1 << 30):
        with pytest.raises(ImageInvalidError) as caught:
            imported(store, "x", layout, collapse_bytes=collapse_bytes)
        assert caught.value.detail["entry"] == entry
        assert "layer 2 of 2" in str(caught.value.detail["layer"])
        assert repr(entry)[:40] in str(caught.value)
    assert leftovers(store) == []
    assert not list((store.root / "staging").iterdir())


def test_what_aufs_left_is_not_there(store: ImageStore, disk: Path) -> None:
    entries = [directory(".wh..wh.plnk"), file(".wh..wh.plnk/1.2", b"x"), file(".wh..wh.aufs"), file("f", b"f")]
    image = imported(store, "x", make_layout(disk / "layout", [entries]))
    with shown(store, image.layers) as tree:
        assert os.listdir(tree) == ["f"]


def test_names_with_such_letters_elsewhere_are_names(store: ImageStore, disk: Path) -> None:
    names = ["a.wh.b", ".w", ".wh", "wh.", "..wh.x", "d.wh./f", ".whx"]
    image = imported(store, "x", make_layout(disk / "layout", [[file(name, b"x") for name in names]]))
    with shown(store, image.layers) as tree:
        assert sorted(tree_of(tree)) == sorted([".", "d.wh.", *names])
