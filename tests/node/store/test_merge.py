"""Merged layers show what the kernel shows of the layers they were made of: names, bytes, links, attributes, times."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.tree_facts import difference, tree_of

from opendsec.errors import ConflictError, ImageInvalidError
from opendsec.linux.libc import mount, umount2
from opendsec.model.image import ImageConfig, Layer, LayerRole
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore, StagedLayer
from opendsec.store.layers import make_layer
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.merge import MOST, OpenLayer, merged, opened_by, settle
from opendsec.store.mounts import mount_erofs
from opendsec.store.progress import Progress

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.overlay]

NAMES = (b"a", b"b", b"\xff")
KINDS = ("none", "none", "file", "whiteout", "whiteout", "directory", "directory", "directory", "link", "other")


class Nasty:
    """A random tree as an overlay's upper directory may be: whiteouts, opaque directories, links, attributes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._files: list[bytes] = []

    def write(self, root: Path) -> Path:
        self._files = []
        root.mkdir()
        self._fill(os.fsencode(root), 0)
        self._finish(os.fsencode(root))
        return root

    def _fill(self, directory: bytes, depth: int) -> None:
        for name in NAMES:
            kind = self._random.choice(KINDS)
            path = directory + b"/" + name
            if kind == "whiteout":
                os.mknod(path, stat.S_IFCHR, 0)
            elif kind == "directory" and depth < 3:
                os.mkdir(path)
                self._fill(path, depth + 1)
            elif kind == "link" and self._files:
                os.link(self._random.choice(self._files), path)
            elif kind == "other":
                self._other(path)
            elif kind == "file":
                with open(path, "wb") as file:
                    file.write(self._random.randbytes(self._random.choice((0, 10, 5000))))
                self._files.append(path)
            if kind != "none" and os.path.lexists(path):
                self._finish(path)
        if depth and self._random.random() < 0.3:
            os.setxattr(directory, "trusted.overlay.opaque", b"y")

    def _other(self, path: bytes) -> None:
        match self._random.randrange(3):
            case 0:
                os.symlink(b"target \xff", path)
            case 1:
                os.mkfifo(path)
            case _:
                os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(7, 3))

    def _finish(self, path: bytes) -> None:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0):
            return
        os.chown(path, self._random.randrange(3), 1000)
        os.chmod(path, self._random.choice((0o755, 0o4711, 0o2770, 0o1777)))
        if self._random.random() < 0.3:
            os.setxattr(path, "trusted.mark", self._random.randbytes(3))
        os.utime(path, ns=(0, self._random.randrange(10**18)), follow_symlinks=False)


@pytest.fixture
def open_layer(store: ImageStore, disk: Path) -> OpenLayer:
    return opened_by(DirectLoader(store, disk / "metadata"))


def as_layer(store: ImageStore, work: Path, tree: Path, role: LayerRole = LayerRole.BASE) -> StagedLayer:
    return make_layer(store, work, tree, name=tree.name, role=role)


@contextmanager
def shown(disk: Path, layers: Sequence[StagedLayer], empty: Path) -> Iterator[Path]:
    """What the kernel shows of layers, lowest first, below a writable top, as a sandbox has them."""
    with ExitStack() as stack:
        below = []
        for number, one in enumerate(layers):
            target = disk / f"mounted-{number}"
            target.mkdir(exist_ok=True)
            mount_erofs(one.meta, target, data=one.data)
            stack.callback(umount2, target)
            below.append(str(target))
        whole, upper, work = (disk / name for name in ("whole", "upper", "work"))
        for directory in (whole, upper, work):
            directory.mkdir(exist_ok=True)
        lower = ":".join([*reversed(below), str(empty)])
        mount("overlay", whole, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
        stack.callback(umount2, whole)
        yield whole


def facts(tree: Path) -> dict[str, tuple[object, ...]]:
    """A file whose other links are hidden is as one without links."""
    return {name: one[:7] if len(one) == 8 and one[7] == (name,) else one for name, one in tree_of(tree).items()}


@pytest.mark.parametrize("seed", range(12))
def test_any_stack_shows_the_same(store: ImageStore, disk: Path, open_layer: OpenLayer, seed: int) -> None:
    nasty, count = Nasty(seed), 3 + seed % 3
    (disk / "empty").mkdir()
    with store.staging() as work:
        trees = [nasty.write(disk / f"tree-{number}") for number in range(count + 2)]
        below, *group, above = [as_layer(store, work, tree) for tree in trees]
        for on_base in (False, True):
            under = [below] if on_base else []
            (work / f"{on_base}").mkdir()
            [one] = merged(store, work / f"{on_base}", group, open_layer, on_base=on_base, most=1, aim=1)
            assert isinstance(one, StagedLayer)
            with shown(disk, [*under, *group, above], disk / "empty") as whole:
                before = facts(whole)
            with shown(disk, [*under, one, above], disk / "empty") as whole:
                after = facts(whole)
            assert difference(before, after) == ""


def chain(store: ImageStore, disk: Path, count: int, *, role: LayerRole = LayerRole.BASE) -> list[Layer]:
    """An image `long` of so many layers: each changes one file, adds one, and deletes that of the one before."""
    with store.staging() as work:
        layers = []
        for number in range(count):
            tree = disk / f"layer-{number}"
            tree.mkdir()
            (tree / "same").write_text(f"version {number}")
            (tree / f"own-{number}").write_text(f"{number}")
            if number:
                os.mknod(tree / f"own-{number - 1}", stat.S_IFCHR, 0)
            layers.append(as_layer(store, work, tree, role))
        image = store.publish("long", layers=layers, config=ImageConfig(workdir="/w"), source="test")
        return list(image.layers)


def test_a_long_chain_settles_and_its_layers_can_be_collected(
    store: ImageStore, disk: Path, open_layer: OpenLayer
) -> None:
    chain(store, disk, MOST + 2)
    before = store.get("long")
    image = settle(store, "long", open_layer)
    assert 1 < len(image.layers) <= MOST // 2
    assert (image.config, image.source) == (before.config, before.source)
    assert settle(store, "long", open_layer) == image
    one = settle(store, "long", open_layer, most=1)
    [layer] = one.layers
    fd = open_layer(layer)
    try:
        assert sorted(os.listdir(f"/proc/self/fd/{fd}/.")) == [f"own-{MOST + 1}", "same"]
    finally:
        os.close(fd)
    collect(store, grace_s=0)
    assert len(list((store.root / "blobs/sha256").iterdir())) == 1
    assert not list((store.root / "staging").iterdir())


def test_a_name_that_changed_meanwhile_is_left_alone(store: ImageStore, disk: Path, open_layer: OpenLayer) -> None:
    layers = chain(store, disk, 3)

    def changing(one: Layer | StagedLayer) -> int:
        store.publish("long", layers=layers[:1], config=ImageConfig(), replace=True)
        return open_layer(one)

    with pytest.raises(ConflictError, match="another meaning"):
        settle(store, "long", changing, most=1)
    assert store.get("long").layers == (layers[0],)


@pytest.mark.parametrize(("name", "value"), [("redirect", b"/x"), ("metacopy", b""), ("opaque", b"x")])
def test_what_says_something_else_is_refused_by_name(
    store: ImageStore, disk: Path, open_layer: OpenLayer, name: str, value: bytes
) -> None:
    (disk / "tree/odd").mkdir(parents=True)
    os.setxattr(disk / "tree/odd", f"trusted.overlay.{name}", value)
    with store.staging() as work:
        layer = as_layer(store, work, disk / "tree")
        with pytest.raises(ImageInvalidError, match=f"{layer.layer.digest}: entry '.*odd'.*trusted.overlay.{name}"):
            merged(store, work, [layer, layer], open_layer, most=1, aim=1)


def test_too_many_layers_are_refused_by_name(store: ImageStore, disk: Path) -> None:
    layer = chain(store, disk, 1)[0]
    with pytest.raises(ImageInvalidError, match="'deep' would have 501 layers of its own, at most 500"):
        store.publish("deep", layers=[layer] * 501, config=ImageConfig())


@pytest.mark.parametrize("patience", [1, 40, 80])
def test_merging_can_be_ended_at_any_step(store: ImageStore, disk: Path, open_layer: OpenLayer, patience: int) -> None:
    class EnoughError(Exception):
        pass

    seen: list[Progress] = []

    def tell(step: Progress) -> None:
        seen.append(step)
        if len(seen) > patience:
            raise EnoughError

    with store.staging() as work:
        layers = []
        for number in range(2):
            tree = disk / f"wide-{number}"
            for name in range(30):
                (tree / f"d{name}").mkdir(parents=True)
                (tree / f"d{name}/file").write_text(f"{number}")
            layers.append(as_layer(store, work, tree))
        with pytest.raises(EnoughError):
            merged(store, work, layers, open_layer, most=1, aim=1, on_progress=tell)
    assert len(seen) == patience + 1
    assert not list(store.layout.staging.iterdir())
