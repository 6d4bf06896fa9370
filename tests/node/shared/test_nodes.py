"""Several nodes, one store on a distributed file system: what one publishes the other starts from, and nobody's
death stops the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.images import make_scratch_image
from tests.node.shared.conftest import NodeView
from tests.shared_store.moosefs import Cluster

from opendsec.errors import ConflictError
from opendsec.model.image import Image
from opendsec.store.images import ImageStore
from opendsec.store.mounts import mounted_at
from opendsec.store.staging import locked

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.moosefs]

Nodes = tuple[NodeView, NodeView]
PIECE = 64 * 1024


def big_image(store: ImageStore, name: str = "big", *, megabytes: int = 12) -> tuple[Image, bytes]:
    """An image with a file /big of random bytes, and those."""
    content = random.Random(name).randbytes(megabytes << 20)
    return make_scratch_image(store, name, files={"/big": content}), content


def read_all(directory_fd: int, name: str = "big") -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory_fd), "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(1 << 20), b""))


def test_what_one_node_publishes_the_other_reads(nodes: Nodes) -> None:
    first, second = nodes
    image, content = big_image(first.store())
    store = second.store()
    assert store.get("big") == image
    with second.layers(store) as layers:
        [fd] = layers.acquire(image)
        try:
            assert read_all(fd) == content
            entry = mounted_at(second.local / "layers" / image.layers[0].digest[7:])
            assert entry is not None
            assert "directio" in entry.super_options
            assert Path(entry.source).is_relative_to(second.local)  # metadata is this node's own copy
        finally:
            layers.unmount_all()


def test_many_readers_at_once_get_their_own_bytes(nodes: Nodes) -> None:
    first, second = nodes
    image, content = big_image(first.store())
    store = second.store()
    with second.layers(store) as layers:
        [fd] = layers.acquire(image)
        file = os.open("big", os.O_RDONLY, dir_fd=fd)

        def read_here_and_there(seed: int) -> int:
            source = random.Random(seed)
            for _ in range(60):
                at, size = source.randrange(len(content)), source.randrange(1, 3 * PIECE)
                assert os.pread(file, size, at) == content[at : at + size]
            return seed

        try:
            with ThreadPoolExecutor(8) as threads:
                assert list(threads.map(read_here_and_there, range(8))) == list(range(8))
        finally:
            os.close(file)
            layers.unmount_all()


def test_both_publish_at_once_and_nothing_is_lost(nodes: Nodes) -> None:
    stores = [node.store() for node in nodes]
    names = [f"image-{number}" for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        made = list(
            threads.map(
                lambda number: make_scratch_image(
                    stores[number % 2], names[number], files={"/own": names[number].encode(), "/same": b"same"}
                ),
                range(8),
            )
        )
    for store in stores:
        assert sorted(store.list(), key=lambda image: image.name) == made
        for image in made:
            for layer in image.layers:
                assert layer.data is not None
                assert store.data_path(layer.data.digest).stat().st_size == layer.data.size_bytes
                meta = store.blob_path(layer.mounted.digest).read_bytes()
                assert f"sha256:{hashlib.sha256(meta).hexdigest()}" == layer.mounted.digest
    assert list((nodes[0].shared / "store/staging").glob("[0-9a-f]*")) == []


def test_one_name_has_one_winner(nodes: Nodes) -> None:
    def publish(node: NodeView) -> Image | ConflictError:
        store = node.store()
        staged = make_scratch_image(store, f"of-{node.name}", files={"/who": node.name.encode()})
        try:
            return store.publish("taken", layers=staged.layers, config=staged.config)
        except ConflictError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(publish, nodes))
    won = [answer for answer in answers if isinstance(answer, Image)]
    assert len(won) == 1
    assert [node.store().get("taken").digest for node in nodes] == [won[0].digest] * 2


def test_opening_reaps_nothing_of_a_node_that_lives(nodes: Nodes) -> None:
    first, second = nodes
    with first.store().staging() as work:
        (work / "half").write_bytes(b"half")
        second.store()
        assert (work / "half").read_bytes() == b"half"


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_node_that_dies_gives_the_stores_lock_back(nodes: Nodes, cluster: Cluster, how: str) -> None:
    """After SESSION_SUSTAIN_TIME, which is a minute here and a day unless it is set."""
    first, second = nodes
    with contextlib.suppress(OSError), locked(first.store().layout.lock):
        cluster.lose(first.name, first.shared, cut=how == "cut off")
        begin = time.monotonic()
        make_scratch_image(second.store(), "after", files={"/f": b"f"})
        assert 1 < time.monotonic() - begin < 130
    cluster.restore(first.name)
