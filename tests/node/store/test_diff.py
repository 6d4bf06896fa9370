"""Differences of composed trees: exact against a comparison of everything, and cheap where layers are shared."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.node.store.test_tree_view import random_layer, seen_by_us

from opendsec.model.image_view import Change, Difference
from opendsec.store.diff import differences
from opendsec.store.tree_view import ComposedTree, LayerTree, Node

pytestmark = [pytest.mark.root, pytest.mark.erofs]

Composed = Callable[..., ComposedTree]


@pytest.fixture
def composed() -> Iterator[Composed]:
    """A tree of directories as layers, highest first; the same directory is the same layer."""
    with ExitStack() as stack:

        def make(*layers: Path) -> ComposedTree:
            trees = []
            for layer in layers:
                fd = os.open(layer, os.O_PATH)
                stack.callback(os.close, fd)
                trees.append(LayerTree(digest=str(layer), fd=fd))
            return ComposedTree(trees)

        yield make


def told(found: Iterator[Difference]) -> list[str]:
    return [f"{one.change.value} {one.path} {','.join(one.what)}".strip() for one in found]


def test_every_kind_of_change_is_named(disk: Path, composed: Composed) -> None:
    old, new = disk / "old", disk / "new"
    for root in (old, new):
        root.mkdir()
        for name in ("same", "mode", "owner", "size", "bytes", "xattr", "time"):
            (root / name).write_text(name)
        (root / "link").symlink_to("there")
        os.mknod(root / "device", stat.S_IFCHR, os.makedev(1, 3))
        (root / "turned").write_text("file")
    (new / "mode").chmod(0o4755)
    os.chown(new / "owner", 1, 2)
    (new / "size").write_text("longer than before")
    (new / "bytes").write_text("BYTES")
    os.setxattr(new / "xattr", "user.a", b"\0")
    (new / "link").unlink()
    (new / "link").symlink_to("elsewhere")
    (new / "device").unlink()
    os.mknod(new / "device", stat.S_IFCHR, os.makedev(1, 5))
    (new / "turned").unlink()
    (new / "turned").mkdir()
    (new / "turned/inside").write_text("")
    (old / "gone/deep").mkdir(parents=True)
    for root in (old, new):
        for name in ("same", "mode", "owner", "size", "bytes", "xattr", "device", "link", "gone", "turned", "."):
            if os.path.lexists(root / name):
                os.utime(root / name, (1, 1), follow_symlinks=False)
    os.utime(new / "time", (2, 2))
    before, after = composed(old), composed(new)
    assert told(differences(before, after)) == [
        "changed /bytes content",
        "changed /device device",
        "removed /gone",
        "removed /gone/deep",
        "changed /link target",
        "changed /mode mode",
        "changed /owner owner",
        "changed /size size,content",
        "changed /time mtime",
        "changed /turned kind,mode,size",
        "added /turned/inside",
        "changed /xattr xattrs",
    ]
    assert "changed /time mtime" not in told(differences(before, after, times=False))
    assert told(differences(before, composed(old))) == []


def test_what_was_removed_and_added_is_shown_as_it_was(disk: Path, composed: Composed) -> None:
    base, work = disk / "base", disk / "work"
    (base / "d").mkdir(parents=True)
    (base / "d/f").write_text("content")
    work.mkdir()
    os.mknod(work / "d", stat.S_IFCHR)
    (work / "new").write_text("12345")
    removed, below, added = [
        one for one in differences(composed(base), composed(work, base), times=False) if one.path != "/"
    ]
    assert (removed.change, removed.path, below.path) == (Change.REMOVED, "/d", "/d/f")
    assert below.before is not None
    assert below.before.size_bytes == 7
    assert below.after is None
    assert added.after is not None
    assert (added.change, added.after.size_bytes, added.before) == (Change.ADDED, 5, None)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_as_comparing_everything(disk: Path, composed: Composed, seed: int) -> None:
    chance = random.Random(seed)
    layers = [disk / str(number) for number in range(5)]
    for layer in layers:
        random_layer(layer, chance)
    before = composed(*chance.sample(layers, chance.randrange(1, 5)))
    after = composed(*chance.sample(layers, chance.randrange(1, 5)))
    old, new = seen_by_us(before), seen_by_us(after)
    expected = {
        path: "removed" if path not in new else "added" if path not in old else "changed"
        for path in old.keys() | new.keys()
        if old.get(path) != new.get(path)
    }
    found = list(differences(before, after))
    assert {one.path: one.change.value for one in found} == expected
    assert len(found) == len(expected)
    paths = [os.fsencode(one.path).split(b"/") for one in found if one.path != "/"]
    assert paths == sorted(paths)


def test_what_is_shared_is_not_looked_at(disk: Path, composed: Composed, monkeypatch: pytest.MonkeyPatch) -> None:
    base, one, other = disk / "base", disk / "one", disk / "other"
    (base / "usr/lib/deep").mkdir(parents=True)
    (base / "usr/bin").mkdir()
    (base / "usr/bin/tool").write_text("base")
    (base / "etc").mkdir()
    (base / "etc/big").write_text("x" * 1000)
    for root in (one, other):
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin/tool").write_text(root.name)
    listed: list[bytes] = []
    opened: list[bytes] = []
    children, open_file = ComposedTree.children, ComposedTree.open_file

    def noted_children(tree: ComposedTree, node: Node) -> list[Node]:
        listed.append(node.path)
        return children(tree, node)

    def noted_open(tree: ComposedTree, node: Node) -> int:
        opened.append(node.path)
        return open_file(tree, node)

    monkeypatch.setattr(ComposedTree, "children", noted_children)
    monkeypatch.setattr(ComposedTree, "open_file", noted_open)
    assert told(differences(composed(one, base), composed(other, base), times=False)) == [
        "changed /usr/bin/tool size,content"
    ]
    assert set(listed) == {b"", b"usr", b"usr/bin"}
    assert opened == []
