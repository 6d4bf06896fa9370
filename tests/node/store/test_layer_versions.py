"""Every version of mkfs.erofs makes the same tree of the same tree, with metadata and data apart as layers are made."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from tests.erofs_versions import NEWER, both_versions
from tests.tree_facts import difference, tree_of

from opendsec.errors import ImageInvalidError
from opendsec.model.image import ImageConfig
from opendsec.store.chunks import make_table
from opendsec.store.erofs import mkfs_version
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.importers.conversions import Conversion
from opendsec.store.layers import make_layer
from opendsec.store.marks import ORIGIN
from opendsec.store.mounts import open_erofs
from opendsec.store.programs import ENVIRONMENT

pytestmark = [pytest.mark.root, pytest.mark.erofs]

MIB = 1 << 20


def nasty_tree(root: Path) -> Path:
    """What versions could write differently: extents, holes, equal chunks, times, attributes, whiteouts, many names."""
    (root / "data").mkdir(parents=True)
    once = os.urandom(3 * MIB + 5)
    for name, content in {
        "one-extent": once[:MIB],
        "extent-and-a-byte": once[: MIB + 1],
        "block": once[:4096],
        "again": once,
        "again-shifted": b"x" + once,
        "zeros": bytes(2 * MIB),
        "zeros-and-tail": bytes(MIB) + b"tail",
        "empty": b"",
        "byte": b"1",
    }.items():
        (root / "data" / name).write_bytes(content)
    os.link(root / "data/again", root / "data/linked")
    with (root / "data/holes").open("wb") as file:
        for offset in (0, 3 * MIB - 1, 7 * MIB):
            os.pwrite(file.fileno(), b"here", offset)
    with (root / "data/hole").open("wb") as file:
        file.truncate(5 * MIB + 1)
    (root / "many").mkdir()
    for number in range(600):
        (root / "many" / f"{number}-{'n' * (number % 240)}").write_bytes(b"%d" % number)
    times(root / "times")
    attributes(root / "attributes")
    (root / "hides").mkdir()
    os.mknod(root / "hides/gone", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(root / "hides", "trusted.overlay.opaque", b"y")
    os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(259, 70_000))
    return root


def times(root: Path) -> None:
    root.mkdir()
    for time_ns in (-(2**31) * 10**9, -3 * 10**9 + 123_456_789, -2 * 10**9, 0, 1, 2**31 * 10**9 + 7, 2**33 * 10**9):
        (root / str(time_ns)).touch()
        os.utime(root / str(time_ns), ns=(0, time_ns))


def attributes(root: Path) -> None:
    root.mkdir()
    for number in range(40):
        path = root / str(number)
        path.touch()
        for name in ("user.shared", "user.a.long.name.of.an.attribute", "trusted.mine", "security.own"):
            os.setxattr(path, name, b"value" * (number % 3))
    os.setxattr(root, "user.large", bytes(range(256)) * 8)


def staged(store: ImageStore, work: Path, tree: Path) -> StagedLayer:
    return make_layer(store, work, tree)


def shown(layer: StagedLayer) -> dict[str, tuple[object, ...]]:
    fd = open_erofs(layer.meta.resolve(), data=layer.data.resolve() if layer.data is not None else None)
    try:
        return tree_of(Path(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


@both_versions
def test_a_layer_shows_its_tree_and_its_table_is_right(disk: Path, store: ImageStore) -> None:
    tree = nasty_tree(disk / "tree")
    with store.staging() as work:
        layer = staged(store, work, tree)
        assert not difference(shown(layer), tree_of(tree))
        assert os.getxattr(tree / "hides", ORIGIN) == b""
        assert layer.data is not None
        assert layer.table is not None
        assert layer.table.read_bytes() == make_table(layer.data)
        assert layer.data.stat().st_size < 16 * MIB


@both_versions
def test_the_same_tree_gives_the_same_layer(disk: Path, store: ImageStore) -> None:
    tree = nasty_tree(disk / "tree")
    subprocess.run(["cp", "-a", "--reflink=never", tree, disk / "copy"], check=True, timeout=120)
    with store.staging() as one, store.staging() as two:
        assert staged(store, one, tree).layer.digest == staged(store, two, disk / "copy").layer.digest


@both_versions
@pytest.mark.parametrize("time_ns", [-2 * 10**9 + 1, -(10**9), -1])
def test_a_time_that_would_be_moved_is_refused(disk: Path, store: ImageStore, time_ns: int) -> None:
    (disk / "tree").mkdir()
    (disk / "tree/file").touch()
    os.utime(disk / "tree/file", ns=(0, time_ns))
    with store.staging() as work, pytest.raises(ImageInvalidError, match="'file': its time is in the last two seconds"):
        staged(store, work, disk / "tree")


@both_versions
def test_a_tree_of_zeros_alone(disk: Path, store: ImageStore) -> None:
    (disk / "tree").mkdir()
    (disk / "tree/zeros").write_bytes(bytes(3 * MIB))
    with store.staging() as work:
        layer = staged(store, work, disk / "tree")
        assert not difference(shown(layer), tree_of(disk / "tree"))
        store.publish("zeros", layers=[layer], config=ImageConfig())


@both_versions
def test_a_failure_leaves_words(disk: Path, store: ImageStore) -> None:
    with store.staging() as work:
        (work / "layer.meta").mkdir()
        (disk / "tree").mkdir()
        (disk / "tree/file").write_bytes(b"1")
        with pytest.raises(ImageInvalidError, match=r"mkfs\.erofs ended with status"):
            staged(store, work, disk / "tree")


@pytest.mark.erofs18
def test_a_conversion_by_another_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    conversion = Conversion(below=(), group=("sha256:" + "0" * 64,))
    installed = mkfs_version()
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{NEWER}:{ENVIRONMENT['PATH']}")
    assert mkfs_version()[:2] == (1, 8)
    assert (conversion.key(mkfs=installed) == conversion.key(mkfs=mkfs_version())) == (installed == mkfs_version())
