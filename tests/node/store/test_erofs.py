"""An EROFS file shows the tree it was made from, and the same tree gives the same bytes."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from tests.erofs_versions import both_versions
from tests.oci_layout import file, make_layout
from tests.tree_facts import difference, tree_of

from opendsec.errors import DiskFullError, ImageInvalidError
from opendsec.linux.libc import MS_RDONLY, mount, umount2
from opendsec.model.image import ImageConfig
from opendsec.store.erofs import make_erofs, mkfs_version
from opendsec.store.images import ImageStore
from opendsec.store.importers import ImportRequest, import_image
from opendsec.store.importers.source import parse_source
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs, both_versions]


def odd_tree(root: Path) -> Path:
    (root / "d" / "e").mkdir(parents=True)
    (root / "d" / "e" / "big").write_bytes(os.urandom(3 << 20))
    os.link(root / "d/e/big", root / "d/again")
    (root / "set-id").write_bytes(b"x")
    os.chown(root / "set-id", 70_000, 80_000)
    (root / "set-id").chmod(0o6711)
    os.setxattr(root / "set-id", "user.note", b"\0bin\n")
    os.setxattr(root / "set-id", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (root / "link").symlink_to("d/e/" + "long" * 50)
    for name in ("with space", "new\nline", "\N{PILE OF POO}", "x" * 254):
        (root / name).write_text(name)
    os.mkdir(os.fsencode(root) + b"/not-\xff-text")
    os.utime(root / "d", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "fifo", (5, 5))
    (root / "future").write_text("")
    os.utime(root / "future", (4_000_000_000, 4_000_000_000))
    return root


def test_the_mounted_tree_is_the_tree(disk: Path) -> None:
    tree = odd_tree(disk / "tree")
    make_erofs(disk / "layer", tree)
    (disk / "at").mkdir()
    mount(str(disk / "layer"), str(disk / "at"), "erofs", MS_RDONLY)
    try:
        assert not difference(tree_of(disk / "at"), tree_of(tree))
    finally:
        umount2(str(disk / "at"))


def test_the_same_tree_gives_the_same_bytes(disk: Path) -> None:
    tree = odd_tree(disk / "tree")
    subprocess.run(["cp", "-a", "--reflink=never", tree, disk / "copy"], check=True, timeout=120)
    make_erofs(disk / "one", tree)
    make_erofs(disk / "two", disk / "copy")
    assert (disk / "one").read_bytes() == (disk / "two").read_bytes()


def test_progress_grows_to_its_total(disk: Path) -> None:
    seen: list[Progress] = []
    make_erofs(disk / "layer", odd_tree(disk / "tree"), on_progress=seen.append)
    assert {step.phase for step in seen} == {"writing the layer"}
    assert [step.done for step in seen] == sorted(step.done for step in seen)
    assert seen[-1].done == seen[-1].total


def test_the_version_is_known() -> None:
    assert mkfs_version() >= (1, 5)


def test_a_name_that_would_be_cut_is_refused(disk: Path) -> None:
    (disk / "tree/d").mkdir(parents=True)
    (disk / "tree/d" / ("x" * 255)).touch()
    with pytest.raises(ImageInvalidError, match=r"entry 'd/xxx.*255 bytes"):
        make_erofs(disk / "layer", disk / "tree")
    assert not (disk / "layer").exists()


def test_mkfs_words_are_in_the_error(disk: Path) -> None:
    (disk / "tree").mkdir()
    (disk / "layer").mkdir()
    with pytest.raises(ImageInvalidError, match=r"mkfs\.erofs ended with status"):
        make_erofs(disk / "layer", disk / "tree")


def test_an_expression_that_leaves_nothing_out_is_an_error(disk: Path) -> None:
    (disk / "tree").mkdir()
    (disk / "tree" / "secret").write_text("secret")
    with pytest.raises(ImageInvalidError, match="invalid regex"):
        make_erofs(disk / "layer", disk / "tree", leave_out_regexes=["("])


def publish(store: ImageStore, tree: Path) -> None:
    with store.staging() as work:
        make_erofs(work / "layer", tree)
        store.publish("x", layers=[store.stage_layer(work / "layer")], config=ImageConfig())


@pytest.mark.loop
def test_a_full_disk_publishes_nothing_and_leaves_nothing(disk: Path) -> None:
    (disk / "image").write_bytes(b"")
    os.truncate(disk / "image", 24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m0", disk / "image"], check=True, timeout=120)
    small = disk / "small"
    small.mkdir()
    subprocess.run(["mount", "-o", "loop", disk / "image", small], check=True, timeout=120)
    try:
        store = ImageStore(small / "store")
        free = os.statvfs(small).f_bavail
        tree = disk / "tree"
        tree.mkdir()
        (tree / "large").write_bytes(os.urandom(40 << 20))
        with pytest.raises(DiskFullError, match="no space left") as caught:
            publish(store, tree)
        assert "opendsec image rm" in caught.value.remedy
        assert store.list() == []
        assert [path.name for path in (small / "store").rglob("*") if path.is_file()] == ["lock"]
        assert os.statvfs(small).f_bavail >= free
    finally:
        subprocess.run(["umount", small], check=True, timeout=120)


@pytest.mark.loop
def test_a_disk_that_fills_up_while_unpacking_leaves_nothing(disk: Path) -> None:
    layout = make_layout(disk / "layout", [[file(f"f{n}", os.urandom(5 << 20)) for n in range(6)]])
    (disk / "image").write_bytes(b"")
    os.truncate(disk / "image", 24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m0", disk / "image"], check=True, timeout=120)
    small = disk / "small"
    small.mkdir()
    subprocess.run(["mount", "-o", "loop", disk / "image", small], check=True, timeout=120)
    try:
        store = ImageStore(small / "store")
        with pytest.raises(DiskFullError):
            import_image(store, ImportRequest(name="x", source=parse_source(str(layout))))
        assert [path.name for path in (small / "store").rglob("*") if path.is_file()] == ["lock"]
        assert list((small / "store/staging").iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True, timeout=120)
