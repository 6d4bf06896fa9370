"""What it costs to upgrade a toolkit that many images use: one layer, against rebuilding every image.

    .venv/bin/python -m benchmarks.toolkits [--images 100] [--sample 5] [--base-mb 60] [--toolkit-mb 20] [--files 2000]

Every image is a workspace of its own on one base and names one toolkit. Both ways begin with the toolkit's new files in
a directory, and end when every image is current and on the disk: with layers, one layer is made and its name replaced;
without, each image is made anew from its whole tree (which lies there ready: putting it together is not counted). The
second way is measured on a sample and told for all. That every image is current is checked by reading the toolkit's
file through each composition. Bytes are `write_bytes` of /proc/self/io of this process and all it ran, after a sync.

Then: what a store with so many images costs to list and to look into.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.shared.report import print_goal, print_machine

from opendsec.model.image import ImageConfig, LayerRole
from opendsec.store.catalogue import Catalogue
from opendsec.store.erofs import mkfs_version
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import open_erofs
from opendsec.store.tagging import Composition, compose_image
from opendsec.store.tree_view import ComposedTree, LayerTree

VERSION_FILE = "opt/harness/version"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of one piece of work, all processes together."""

    wall_s: float
    cpu_s: float
    written_bytes: int
    blobs: int
    """New files of layers in the store."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--sample", type=int, default=5, help="images that are rebuilt the other way")
    parser.add_argument("--base-mb", type=int, default=60)
    parser.add_argument("--toolkit-mb", type=int, default=20)
    parser.add_argument("--files", type=int, default=2000, help="in the base; a third of it in the toolkit")
    options = parser.parse_args()
    print_machine()
    print(f"mkfs.erofs {'.'.join(map(str, mkfs_version()))}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/var/lib"))
    try:
        _measure(options, folder)
    finally:
        shutil.rmtree(folder)


def _measure(options: argparse.Namespace, folder: Path) -> None:
    store = ImageStore(folder / "store")
    trees = _make_trees(options, folder)
    _publish(store, "base", trees / "base", LayerRole.BASE)
    _publish(store, "harness", trees / "toolkit-1", LayerRole.TOOLKIT)
    names = [f"task-{number}" for number in range(options.images)]
    for name in names:
        _workspace(trees / name, name)
        _publish(store, f"work-{name}", trees / name, LayerRole.WORKSPACE)
        compose_image(store, name, Composition(base="base", workspace=f"work-{name}", toolkits=("harness",)))
    assert _current(store, names, folder, "1") == options.images
    print(f"{options.images} images on one base of {options.base_mb} MB, one toolkit of {options.toolkit_mb} MB\n")
    layered = _spent(store, lambda: _publish(store, "harness", trees / "toolkit-2", LayerRole.TOOLKIT))
    current = _current(store, names, folder, "2")
    rebuilt = _rebuilt(store, trees, names[: options.sample])
    _print(layered, rebuilt, current, options)
    _print_store(store, names)


def _make_trees(options: argparse.Namespace, folder: Path) -> Path:
    trees = folder / "trees"
    chance = random.Random(1)
    _fill(trees / "base/usr", chance, options.base_mb * MIB, options.files)
    for version in (1, 2):
        tree = trees / f"toolkit-{version}"
        _fill(tree / "opt/harness", chance, options.toolkit_mb * MIB, max(options.files // 3, 1))
        (tree / VERSION_FILE).write_text(str(version))
    return trees


def _fill(root: Path, chance: random.Random, size_bytes: int, files: int) -> None:
    for number in range(files):
        path = root / str(number % 40) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(size_bytes // files))


def _workspace(tree: Path, name: str) -> None:
    _fill(tree / "srv", random.Random(name), MIB, 40)


def _publish(store: ImageStore, name: str, tree: Path, role: LayerRole) -> None:
    with store.staging() as work:
        layer = make_layer(store, work, tree, role=role)
        store.publish(name, layers=[layer], config=ImageConfig(), source="benchmark", replace=True)


def _rebuilt(store: ImageStore, trees: Path, names: list[str]) -> list[Spent]:
    """The other way: each image one tree of all there is in it, made anew."""
    spent = []
    for name in names:
        whole = trees / f"whole-{name}"
        for part in ("base", name, "toolkit-2"):
            shutil.copytree(trees / part, whole, dirs_exist_ok=True, symlinks=True)
        os.sync()
        spent.append(_spent(store, partial(_publish, store, f"whole-{name}", whole, LayerRole.BASE)))
        shutil.rmtree(whole)
    return spent


def _current(store: ImageStore, names: list[str], folder: Path, version: str) -> int:
    """How many images have this version of the toolkit, by reading it where a sandbox would."""
    found = 0
    for name in names:
        with _opened(store, name, folder) as tree, os.fdopen(tree.open_file(tree.find(f"/{VERSION_FILE}"))) as file:
            found += file.read() == version
    return found


@contextmanager
def _opened(store: ImageStore, name: str, folder: Path) -> Iterator[ComposedTree]:
    loader = DirectLoader(store, folder / "copies")
    layers = []
    try:
        for layer in reversed(store.compose(name).layers):
            files = loader.attach(layer)
            layers.append(LayerTree(digest=layer.digest, fd=open_erofs(files.meta, data=files.data)))
        yield ComposedTree(layers)
    finally:
        for one in layers:
            os.close(one.fd)


def _spent(store: ImageStore, work: Callable[[], None]) -> Spent:
    os.sync()
    blobs, written, cpu, begin = _blobs(store), _written(), _cpu_s(), time.perf_counter()
    work()
    os.sync()
    wall_s = time.perf_counter() - begin
    return Spent(wall_s=wall_s, cpu_s=_cpu_s() - cpu, written_bytes=_written() - written, blobs=_blobs(store) - blobs)


def _blobs(store: ImageStore) -> int:
    """Layers in the store: each has one file of metadata."""
    return len(list((store.root / "blobs/sha256").iterdir()))


def _written() -> int:
    """Of this process and of those it has waited for."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["write_bytes"])


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _print(layered: Spent, rebuilt: list[Spent], current: int, options: argparse.Namespace) -> None:
    mean = options.images / len(rebuilt)
    other = Spent(
        wall_s=sum(one.wall_s for one in rebuilt) * mean,
        cpu_s=sum(one.cpu_s for one in rebuilt) * mean,
        written_bytes=int(sum(one.written_bytes for one in rebuilt) * mean),
        blobs=int(sum(one.blobs for one in rebuilt) * mean),
    )
    print(f"{'':44} {'layers':>12} {'images':>12} {'ratio':>9}")
    rows = (
        ("layers built", layered.blobs, other.blobs, ""),
        ("written", layered.written_bytes / MIB, other.written_bytes / MIB, "MiB"),
        ("wall time", layered.wall_s, other.wall_s, "s"),
        ("CPU time", layered.cpu_s, other.cpu_s, "s"),
    )
    for what, ours, theirs, unit in rows:
        print(f"{what + (f', {unit}' if unit else ''):44} {ours:12.1f} {theirs:12.1f} {theirs / ours:8.0f}x")
    print(f"(images: {len(rebuilt)} rebuilt, told for {options.images})\n")
    print_goal("layers built by the upgrade", layered.blobs, 1, "layers")
    print_goal("images that are current after it", current, options.images, "images", at_least=True)
    print(flush=True)


def _print_store(store: ImageStore, names: list[str]) -> None:
    count = len(store.names())
    catalogue = Catalogue(store)
    figures = (
        ("names, for a node's report", store.names),
        ("a page of summaries, the first time", lambda: catalogue.page(limit=1000)),
        ("a page of summaries, again", lambda: catalogue.page(limit=1000)),
        ("all about one image", lambda: catalogue.details(names[0])),
        ("a composition, the first time", lambda: ImageStore(store.root).compose(names[0])),
        ("a composition, again (each create)", lambda: store.compose(names[0])),
    )
    print(f"a store of {count} images")
    for what, work in figures:
        begin = time.perf_counter()
        work()
        print(f"  {what:42} {(time.perf_counter() - begin) * 1000:9.3f} ms", flush=True)


if __name__ == "__main__":
    main()
