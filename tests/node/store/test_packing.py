"""A selected tree becomes exactly that layer; what lies below is seen as the kernel shows it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.erofs_versions import both_versions
from tests.tree_facts import difference, tree_of

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.model.image import ImageConfig, LayerRole
from opendsec.store import packing
from opendsec.store.below import Below
from opendsec.store.durable import remove_tree
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.mounts import open_erofs
from opendsec.store.packing import Selection, homes_in, pack_layer, select
from opendsec.store.scrub import Scrub

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]


def whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def opaque(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def make_layer_of(store: ImageStore, work: Path, tree: Path, selection: Selection) -> StagedLayer:
    return pack_layer(store, work, tree, selection, role=LayerRole.WORKSPACE, on_read=lambda: None)


@pytest.fixture
def nothing(disk: Path) -> Iterator[Below]:
    """A layer below that has nothing."""
    (disk / "nothing").mkdir()
    fd = os.open(disk / "nothing", os.O_PATH)
    yield Below([fd])
    os.close(fd)


def names_of(layer: StagedLayer) -> set[str]:
    fd = open_erofs(layer.meta.resolve(), data=layer.data.resolve() if layer.data is not None else None)
    try:
        return set(tree_of(Path(f"/proc/self/fd/{fd}"))) - {"."}
    finally:
        os.close(fd)


@both_versions
def test_the_layer_has_what_was_selected_and_nothing_else(disk: Path, store: ImageStore, nothing: Below) -> None:
    tree = disk / "tree"
    stays = [
        "keep/a.c",
        "keep/plain",
        "tmp",
        "odd/new\nline.txt",
        "odd/a(b",
        "odd/[x]",
        "odd/-dash",
        "odd/é",
        "a.o/x.c",
    ]
    out = ["keep/x.log", "odd/two\nlines.log", "odd/a(b.log", "odd/[x].log", "odd/bad\udcff.log"]
    out += [f"tmp/{number}" for number in range(50)] + [f"many/{number}/__pycache__/x.pyc" for number in range(20)]
    out += [f"objects/{number}.o" for number in range(30)]
    stays += [f"many/{number}/x.py" for number in range(20)] + ["objects/source"]
    for path in (*stays, *out):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        if path != "tmp":
            (tree / path).write_bytes(path.encode("utf-8", "surrogateescape"))
    selection = select(tree, Scrub(scrub=["*.log", "*.o"], keep=["/a.o"]), nothing)
    assert selection.exclusion.regexes, "groups are expressions"
    with store.staging() as work:
        found = names_of(make_layer_of(store, work, tree, selection))
    wanted = {"/".join(path.split("/")[: count + 1]) for path in stays for count in range(path.count("/") + 1)}
    assert found == wanted
    assert selection.files == len(wanted)
    assert selection.left_out == len(out) + 20, "and the directories __pycache__ themselves"


def test_an_attribute_that_leads_elsewhere_is_refused(disk: Path, nothing: Below) -> None:
    (disk / "tree/moved").mkdir(parents=True)
    os.setxattr(disk / "tree/moved", "trusted.overlay.redirect", b"/etc")
    with pytest.raises(ImageInvalidError, match="redirect") as failed:
        select(disk / "tree", Scrub(), nothing)
    assert failed.value.detail["entry"] == "/moved"


def test_absurd_sizes_are_refused_before_anything_is_read(disk: Path, nothing: Below) -> None:
    (disk / "tree").mkdir()
    for number in range(2):
        with (disk / f"tree/{number}").open("xb") as file:
            file.truncate(packing.MAX_CONTENT_BYTES // 2 + 1)
    with pytest.raises(ImageInvalidError, match="at most") as failed:
        select(disk / "tree", Scrub(), nothing)
    assert failed.value.detail["entry"] in ("/0", "/1")
    assert select(disk / "tree", Scrub(scrub=["/0"]), nothing).files == 1


def test_a_store_on_another_machine_gets_the_layer_after_the_tree_may_change(
    disk: Path, nothing: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "can_follow", lambda _work: False)
    store = ImageStore(disk / "far", scratch=disk / "near")
    (disk / "tree").mkdir()
    (disk / "tree/file").write_bytes(os.urandom(300_000))
    before = tree_of(disk / "tree")
    selection = select(disk / "tree", Scrub(), nothing)
    seen: list[list[str]] = []

    def on_read() -> None:
        seen.append(os.listdir(work))
        (disk / "tree/file").write_bytes(b"changed")

    with store.staging() as work:
        layer = pack_layer(store, work, disk / "tree", selection, role=LayerRole.WORKSPACE, on_read=on_read)
        store.publish("far", layers=[layer], config=ImageConfig())
    assert seen == [[]], "nothing was written there before"
    assert [path for path in (disk / "near").iterdir() if path.is_dir()] == []
    [published] = store.get("far").layers
    assert published.data is not None
    fd = open_erofs(
        store.blob_path(published.mounted.digest).resolve(), data=store.data_path(published.data.digest).resolve()
    )
    shown = tree_of(Path(f"/proc/self/fd/{fd}"))
    os.close(fd)
    assert difference({"file": before["file"]}, {"file": shown["file"]}) == ""


def test_a_layer_that_arrives_as_something_else_is_not_published(
    disk: Path, nothing: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "can_follow", lambda _work: False)
    store = ImageStore(disk / "far", scratch=disk / "near")
    (disk / "tree").mkdir()
    (disk / "tree/file").write_bytes(os.urandom(300_000))
    copy = shutil.copyfile

    def lossy(source: Path, target: Path) -> Path:
        copy(source, target)
        with target.open("r+b") as file:
            last = file.seek(-1, os.SEEK_END)
            changed = bytes([file.read(1)[0] ^ 1])
            file.seek(last)
            file.write(changed)
        return target

    monkeypatch.setattr(shutil, "copyfile", lossy)
    with store.staging() as work, pytest.raises(DigestMismatchError, match="did not arrive"):
        make_layer_of(store, work, disk / "tree", select(disk / "tree", Scrub(), nothing))
    assert store.list() == []


@pytest.fixture
def layers(disk: Path) -> list[Path]:
    """Four directories as overlayfs layers, topmost first, with everything that hides something."""
    top, second, third, bottom = (disk / name for name in ("top", "second", "third", "bottom"))
    for layer in (top, second, third, bottom):
        layer.mkdir()
    for path in ("a/b/c", "a/file", "b/x/y", "c/z", "d/deep/er", "e", "f/g", "h/i"):
        (bottom / path).parent.mkdir(parents=True, exist_ok=True)
        (bottom / path).write_bytes(b"bottom")
    (third / "a").mkdir()
    whiteout(third / "a/b")
    (third / "e").mkdir()
    (third / "e/now-a-directory").write_bytes(b"third")
    opaque(third / "h")
    opaque(second / "b/x")
    (second / "b/x/new").write_bytes(b"second")
    (second / "a/b").mkdir(parents=True)
    (second / "a/b/again").write_bytes(b"second")
    (second / "f").write_bytes(b"a file over a directory")
    (second / "h").mkdir(mode=0o700)
    whiteout(top / "c")
    (top / "d").symlink_to("a")
    (top / "a").mkdir()
    os.setxattr(top / "a", "user.note", b"top")
    return [top, second, third, bottom]


def test_below_shows_what_the_kernel_shows(disk: Path, layers: list[Path]) -> None:
    mounted = disk / "mounted"
    mounted.mkdir()
    lower = ":".join(map(str, layers))
    subprocess.run(["mount", "-t", "overlay", "-o", f"lowerdir={lower}", "overlay", mounted], check=True, timeout=120)
    fds = [os.open(layer, os.O_PATH) for layer in layers]
    try:
        below = Below(fds)
        shown = tree_of(mounted)
        paths = {os.path.relpath(path, layer) for layer in layers for path in layer.rglob("*")} | {
            "none",
            "a/none",
            "d/x",
        }
        for path in sorted(paths):
            found = below.find(f"/{path}")
            if path not in shown:
                assert found is None, path
                continue
            assert found is not None, path
            expected = os.lstat(mounted / path)
            assert (found.st_mode, found.st_uid, found.st_mtime_ns) == (
                expected.st_mode,
                expected.st_uid,
                expected.st_mtime_ns,
            ), path
            if stat.S_ISREG(expected.st_mode):
                assert below.read(f"/{path}", most=100) == (mounted / path).read_bytes(), path
        assert below.attributes("/a") == {"user.note": b"top"}
        assert below.read("/c/z", most=100) == b""
    finally:
        for fd in fds:
            os.close(fd)
        subprocess.run(["umount", mounted], check=True, timeout=120)


def test_depth_is_no_obstacle(disk: Path) -> None:
    deep = "/".join(["d"] * 600)
    for tree in (disk / "tree", disk / "under"):
        (tree / "d").mkdir(parents=True)
        subprocess.run(["mkdir", "-p", deep], cwd=tree, check=True, timeout=120)
    (disk / "tree" / deep / ".bash_history").write_text("echo secret")
    fd = os.open(disk / "under", os.O_PATH)
    try:
        found = select(disk / "tree", Scrub(), Below([fd]))
    finally:
        os.close(fd)
    assert (found.left_out_paths, found.changed) == ((f"/{deep}/.bash_history",), False)
    for tree in (disk / "tree", disk / "under"):
        remove_tree(tree)


def test_homes_are_the_sandboxs_own(disk: Path, nothing: Below) -> None:
    elsewhere = disk / "of-the-host"
    elsewhere.mkdir()
    line = "someone:x:1000:1000::/srv/someone:/bin/sh\n"
    (elsewhere / "passwd").write_text(line)
    tree = disk / "tree"
    tree.mkdir()
    (tree / "etc").symlink_to(elsewhere)
    assert "/srv/someone" not in homes_in(tree, nothing)
    (tree / "etc").unlink()
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text(line)
    assert "/srv/someone" in homes_in(tree, nothing)
    fd = os.open(tree, os.O_PATH)
    try:
        below = Below([fd])
        (disk / "upper/etc").mkdir(parents=True)
        assert "/srv/someone" in homes_in(disk / "upper", below)
        whiteout(disk / "upper/etc/passwd")
        assert "/srv/someone" not in homes_in(disk / "upper", below)
    finally:
        os.close(fd)


def test_a_home_is_also_where_its_link_leads(disk: Path, nothing: Below) -> None:
    tree = disk / "tree"
    (tree / "data/me/.aws").mkdir(parents=True)
    (tree / "data/me/.aws/credentials").write_text("secret")
    (tree / "job/.cache/x").mkdir(parents=True)
    (tree / "root").symlink_to("up/me")
    (tree / "up").symlink_to("/data/../data/.")
    (tree / "etc").mkdir()
    (tree / "etc/passwd").symlink_to("../accounts")
    (tree / "accounts").write_text(f"you:x:1000:1000::/loop:/bin/sh\nlong:x:1001:1001::/{'x' * 300}/y:/bin/sh\n")
    (tree / "loop").symlink_to("loop")
    homes = homes_in(tree, nothing, more=["/job/", "/", "none"])
    assert set(homes) == {"/root", "/data/me", "/job", "/loop", f"/{'x' * 300}/y"}
    found = select(tree, Scrub(homes=homes), nothing)
    assert found.left_out_paths == ("/data/me/.aws", "/job/.cache")


def test_a_time_that_would_be_moved_is_refused(disk: Path, nothing: Below) -> None:
    (disk / "tree").mkdir()
    (disk / "tree/file").write_text("x")
    os.utime(disk / "tree/file", ns=(0, -500_000_000))
    with pytest.raises(ImageInvalidError, match="before 1970"):
        select(disk / "tree", Scrub(), nothing)


def test_more_entries_than_a_node_keeps_in_mind_are_refused(
    disk: Path, nothing: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_ENTRIES", 20)
    for number in range(20):
        (disk / f"tree/a/{number}").mkdir(parents=True)
    with pytest.raises(ImageInvalidError, match="more than 20 entries"):
        select(disk / "tree", Scrub(), nothing)
    (disk / "tree/a/0").rmdir()
    assert select(disk / "tree", Scrub(), nothing).files == 20


def test_a_walk_can_be_ended(disk: Path, nothing: Below) -> None:
    (disk / "tree/a/b").mkdir(parents=True)

    def stop() -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        select(disk / "tree", Scrub(), nothing, on_look=stop)
