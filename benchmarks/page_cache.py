"""What containers of one image, and images that share a base, hold of the same files in memory.

    sudo .venv/bin/python -m benchmarks.page_cache [--containers 20] [--family python] [--state DIR]

Counted are pages of the layers' files and of the store's files behind them (fincore(1) of util-linux), so other work on
the machine does not count: one container that has done its task, then so many that have, all live; then one of another
image on the same base. The same with layers mounted without `directio`, as kernels before 6.15 do. Needs the images of
`benchmarks.burst_images`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.burst_images import STATE, Workspace, plan
from benchmarks.shared import crowd, report
from benchmarks.shared.burst_node import drop_caches, edge_process
from benchmarks.shared.platforms import groups_of

import opendsec
from opendsec.model.image import Layer
from opendsec.store.images import ImageStore
from opendsec.store.manifest import hex_of

MIB = 1 << 20
MORE_GOAL = 0.05
AT_ONCE = 4
TRIES = 3
_BATCH = 2000
EDGES = {"with directio": "opendsec.edge", "without directio": "benchmarks.shared.buffered_edge"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Bytes of one image in memory."""

    base: int
    """Of files of the base's layers."""
    own: int
    """Of files of the image's own layers."""
    behind: int
    """Of the store's files they come from."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.base + self.own + self.behind


def resident(files: Sequence[Path]) -> int:
    """Bytes of these files that are in the page cache."""
    total = 0
    for begin in range(0, len(files), _BATCH):
        words = [
            "fincore",
            "--bytes",
            "--raw",
            "--noheadings",
            "--output",
            "RES",
            *map(str, files[begin : begin + _BATCH]),
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        total += sum(map(int, done.stdout.split()))
    return total


def files_below(folder: Path) -> list[Path]:
    """Regular files with content, hard links once."""
    seen: set[int] = set()
    found = []
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            status = path.lstat()
            if path.is_symlink() or not path.is_file() or not status.st_size or status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            found.append(path)
    return found


def measure(store: ImageStore, mounts: Path, one: Workspace) -> Cached:
    """Now."""
    base = store.get(one.base).layers
    own = store.get(one.name).layers
    return Cached(
        base=sum(resident(files_below(mounts / hex_of(layer.digest))) for layer in base),
        own=sum(resident(files_below(mounts / hex_of(layer.digest))) for layer in own),
        behind=resident([path for layer in (*base, *own) for path in behind(store, layer)]),
    )


def behind(store: ImageStore, layer: Layer) -> list[Path]:
    """The store's files of a layer."""
    files = [store.blob_path(layer.mounted.digest)]
    return files if layer.data is None else [*files, store.data_path(layer.data.digest)]


async def compare(socket: Path, store: ImageStore, mounts: Path, images: Sequence[Workspace], containers: int) -> None:
    """One, many, and one of another image; two of each figure."""
    first, second = images
    async with opendsec.DSecClient(f"unix:{socket}", "", timeout=300) as client, AsyncExitStack() as stack:

        async def live(one: Workspace) -> None:
            args = opendsec.DSecContainerRunArgs(container_image=one.name)
            sandbox = await stack.enter_async_context(client.container(args))
            done = await sandbox.run_shell(one.task, check=True, timeout=600)
            assert done.stdout.split("\n")[-2] == one.expected

        await live(first)
        alone = measure(store, mounts, first)
        await crowd.each([first] * (containers - 1), live, at_once=AT_ONCE)
        many = measure(store, mounts, first)
        await live(second)
        other = measure(store, mounts, second)
    print(f"  one container: {_words(alone)}")
    print(f"  {containers} containers: {_words(many)}")
    print(f"  and one of another image on the same base: {_words(other)}")
    report.print_goal(f"page cache {containers} add to one", many.total / alone.total - 1, MORE_GOAL, "")
    report.print_goal("base pages a second image adds", other.base / many.base - 1, MORE_GOAL, "")


def _words(cached: Cached) -> str:
    return (
        f"{cached.total / MIB:.1f} MiB (base {cached.base / MIB:.1f}, own layers {cached.own / MIB:.1f}, "
        f"store's files behind them {cached.behind / MIB:.1f})"
    )


@contextmanager
def own_copy(library: ImageStore, images: Sequence[Workspace], root: Path) -> Iterator[ImageStore]:
    """A store with these images alone, in files nobody else reads; removed afterwards."""
    store = ImageStore(root)
    try:
        for name in {name for one in images for name in (one.base, one.name)}:
            image = library.get(name)
            for layer in image.layers:
                for source in (*behind(library, layer), *tables(library, layer)):
                    target = root / source.relative_to(library.root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
            store.publish(name, layers=image.layers, config=image.config, base=image.base)
        yield store
    finally:
        shutil.rmtree(root)


def tables(store: ImageStore, layer: Layer) -> list[Path]:
    """The table of chunks, if the layer has data."""
    return [] if layer.data is None else [store.table_path(layer.data.digest)]


@contextmanager
def run_directory() -> Iterator[Path]:
    """On a tmpfs, with a short name; the edge's end removes it."""
    folder = Path(tempfile.mkdtemp(prefix="opendsec-bench-", dir="/run"))
    yield folder


def dropped() -> int:
    """How often anybody has dropped the page cache."""
    words = Path("/proc/vmstat").read_text(encoding="ascii").split()
    return int(words[words.index("drop_pagecache") + 1])


def one_pass(
    what: str, module: str, store: ImageStore, images: Sequence[Workspace], options: argparse.Namespace
) -> None:
    """On an edge of its own."""
    print(f"--- {images[0].name}, layers mounted {what}", flush=True)
    name = f"opendsec-page-cache-{os.getpid()}"
    with (
        groups_of(name) as groups,
        run_directory() as run,
        edge_process(module, options.state / "page-cache", run, groups[1].name, store.root) as socket,
    ):
        asyncio.run(compare(socket, store, run / "layers", images, options.containers))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=STATE, help="where burst_images has put everything")
    parser.add_argument("--containers", type=int, default=20)
    parser.add_argument("--family", default="python")
    options = parser.parse_args()
    report.print_machine()
    images = [one for one in plan(2) if one.base == f"burst-{options.family}"]
    library = ImageStore(options.state / "store")
    for what, module in EDGES.items():
        with own_copy(library, images, options.state / "page-cache-store") as store:
            for _ in range(TRIES):
                drop_caches()
                before = dropped()
                one_pass(what, module, store, images, options)
                if dropped() == before:
                    break
                print("  somebody else dropped the page cache meanwhile: these figures mean nothing")


if __name__ == "__main__":
    main()
