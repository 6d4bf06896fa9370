"""Sparse files are filled before they are read, whatever is killed; what cannot be filled is an error, never zeros."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendsec.linux.process import send_signal
from opendsec.model.image import Image
from opendsec.store.images import ImageStore
from opendsec.store.loading.fanotify import FanotifyLoader
from opendsec.store.loading.fanotify_group import (
    HOLDERS,
    Place,
    find_holder,
    place_of,
)
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.sources import open_files
from opendsec.store.manifest import hex_of
from opendsec.store.mounts import LayerMounts, unmount_layers

from .conftest import Node, digest_or_error, digests, make_image, tree_of, truth

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.fanotify]


@dataclass(slots=True)
class FanotifyNode(Node):
    """The same with the other loader."""

    @property
    def place(self) -> Place:
        return place_of(self.run_dir, self.state_dir)

    @contextlib.contextmanager
    def mounts(self, *, wait_s: float = 20.0) -> Iterator[LayerMounts]:
        source = ChunkSource(open_files(self.address, attempt_s=2.0), patience_s=5.0)
        loader = FanotifyLoader(source, self.run_dir, self.state_dir, returns_s=wait_s)
        with LayerMounts(loader, self.run_dir / "layers", wait_s=wait_s) as layers:
            yield layers
        loader.close()

    def kill(self, *names: str) -> None:
        """All at one instant, as far as that goes."""
        pidfds = [pidfd for name in names if (pidfd := find_holder(self.place, name)) is not None]
        for pidfd in pidfds:
            send_signal(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            os.close(pidfd)

    def data_file(self, image: Image) -> Path:
        data = image.layers[0].data
        assert data is not None
        return self.place.files / hex_of(data.digest)


Start = Callable[..., FanotifyNode]


@pytest.fixture
def start(disk: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(address: str, **environment: str) -> FanotifyNode:
            node = FanotifyNode(
                root=disk / f"node{len(list(disk.glob('node*')))}",
                address=address,
                environment={"OPENDSEC_LOADER": "fanotify", **environment},
            )
            node.run_dir.mkdir(parents=True)
            stack.callback(_end, node)
            node.start()
            return node

        yield begin


def _end(node: FanotifyNode) -> None:
    unmount_layers(node.run_dir / "layers")
    if node.process is not None and node.process.poll() is None:
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(20) == 0
    left = [name for name in HOLDERS if find_holder(node.place, name) is not None]
    node.kill(*HOLDERS)
    assert left == []


def test_everything_reads_as_it_is_and_a_start_is_not_everything(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        assert digest_or_error(tree_of(fd) / "d0/f0") == expected["d0/f0"]
        assert node.data_file(image).stat().st_blocks * 512 < 1_500_000
        assert digests(tree_of(fd)) == expected
