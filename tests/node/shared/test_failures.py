"""Servers of the shared file system die, are cut off and come back while layers are read from it: what is read is
right or an error, within a known time, nobody else waits, and afterwards everything works again.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.images import make_scratch_image
from tests.node.shared.conftest import NodeView
from tests.shared_store.moosefs import Cluster, Server

from opendsec.errors import NodeError
from opendsec.model.image import Image
from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.loading.healing import Healing
from opendsec.store.mounts import LayerMounts

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.moosefs]

Nodes = tuple[NodeView, NodeView]
PIECE = 64 * 1024
GIVES_UP_S = 40.0
"""Much more than the client's own limit (`BOUNDED`), much less than for ever."""


@dataclass(slots=True)
class Reader:
    """A thread that reads a file piece by piece, again and again, and compares."""

    directory_fd: int
    content: bytes
    pause_s: float = 0.002
    pieces: int = 0
    wrong: int = 0
    slowest_s: float = 0.0
    failure: OSError | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        file = os.open("big", os.O_RDONLY, dir_fd=self.directory_fd)
        try:
            while not self.over.wait(self.pause_s) and self.failure is None:
                self._one(file)
        finally:
            os.close(file)

    def _one(self, file: int) -> None:
        offset = self.pieces * PIECE % len(self.content)
        if offset == 0:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.monotonic()
        try:
            piece = os.pread(file, PIECE, offset)
        except OSError as error:
            self.failure = error
            return
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
        self.wrong += piece != self.content[offset : offset + PIECE]
        self.pieces += 1

    @contextmanager
    def running(self) -> Iterator[threading.Thread]:
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            self.wait_for(20)
            yield thread
        finally:
            self.over.set()
            thread.join(60)
            assert not thread.is_alive()

    def wait_for(self, more: int, *, within_s: float = 60.0) -> None:
        """So many more pieces, or a failure."""
        wanted, deadline = self.pieces + more, time.monotonic() + within_s
        while self.pieces < wanted and self.failure is None:
            assert time.monotonic() < deadline, "nothing is read any more"
            time.sleep(0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """A layer on the shared file system, and one on this node's own disk, both mounted."""

    store: ImageStore
    image: Image
    content: bytes
    loader: DirectLoader
    layers: LayerMounts
    fd: int
    local_fd: int

    def reader(self) -> Reader:
        return Reader(self.fd, self.content)

    def local_reader(self) -> Reader:
        return Reader(self.local_fd, self.content, pause_s=0.02)


@pytest.fixture
def mounted(nodes: Nodes) -> Iterator[Mounted]:
    first, second = nodes
    content = random.Random(7).randbytes(8 << 20)
    files = {"/big": content, "/etc/small": b"small"}
    image = make_scratch_image(first.store(), "big", files=files)
    store = second.store()
    local = ImageStore(second.local / "store")
    local_image = make_scratch_image(local, "big", files=files)
    loader = DirectLoader(store, second.local / "metadata")
    local_loader = DirectLoader(local, second.local / "local-metadata")
    with (
        LayerMounts(loader, second.local / "layers") as layers,
        LayerMounts(local_loader, second.local / "local-layers") as local_layers,
    ):
        try:
            [fd], [local_fd] = layers.acquire(image), local_layers.acquire(local_image)
            yield Mounted(
                store=store, image=image, content=content, loader=loader, layers=layers, fd=fd, local_fd=local_fd
            )
        finally:
            layers.unmount_all()
            local_layers.unmount_all()


def holders(cluster: Cluster, file: Path) -> list[Server]:
    """The chunkservers that have a copy of a file of one chunk."""
    text = cluster.asked("b", "mfsfileinfo", str(file))
    found = [server for server in cluster.chunkservers if server.address in text]
    assert len(found) == 2, text
    return found


def data_of(mounted: Mounted) -> Path:
    [layer] = mounted.image.layers
    assert layer.data is not None
    return mounted.store.data_path(layer.data.digest)


@pytest.mark.parametrize("nodes", [()], indirect=True, ids=["patient client"])
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_reading_goes_on_when_a_server_is_lost(mounted: Mounted, cluster: Cluster, nodes: Nodes, how: str) -> None:
    lost = holders(cluster, data_of(mounted))[0]
    reader = mounted.reader()
    with reader.running():
        if how == "killed":
            lost.kill()
        else:
            lost.cut()
        try:
            before = cluster.received_bytes("b")
            wait_until(
                lambda: reader.failure or cluster.received_bytes("b") - before > len(mounted.content), within_s=90
            )
        finally:
            if how == "killed":
                lost.start()
            else:
                lost.mend()
        reader.wait_for(len(mounted.content) // PIECE)
    assert reader.failure is None, cluster.said("b")
    assert reader.wrong == 0
    cluster.wait_for_chunkservers(nodes[1].shared)


def test_without_any_copy_reads_fail_in_time_and_work_again_after_it(
    mounted: Mounted, cluster: Cluster, nodes: Nodes
) -> None:
    healing = Healing(mounted.loader.data_of, mounted.layers.held, mounted.loader.renew)
    assert not healing.look()
    reader, local = mounted.reader(), mounted.local_reader()
    with local.running():
        with reader.running() as thread:
            for server in cluster.chunkservers:
                server.kill()
            thread.join(GIVES_UP_S)
            assert not thread.is_alive()
        assert reader.failure is not None
        assert reader.failure.errno == errno.EIO
        assert reader.wrong == 0
        assert not healing.look()  # nothing would be better anew
        for server in cluster.chunkservers:
            server.start()
        cluster.wait_for_chunkservers(nodes[1].shared)
        with pytest.raises(OSError, match="Input/output"):
            read_past_cache(mounted.fd)  # MooseFS' client has given that open file up
        wait_until(healing.look)
        assert mounted.layers.acquired(mounted.image) is None
        [fd] = mounted.layers.acquire(mounted.image)
        assert fd != mounted.fd
        again = Reader(fd, mounted.content)
        with again.running():
            again.wait_for(len(mounted.content) // PIECE)
        assert (again.failure, again.wrong) == (None, 0)
        assert not healing.look()
    assert (local.failure, local.wrong) == (None, 0)
    assert local.slowest_s < 2.0
    loader = DirectLoader(mounted.store, nodes[1].local / "metadata")
    with LayerMounts(loader, nodes[1].local / "layers") as adopted:  # the next process of this node knows it too
        [other] = adopted.acquire(mounted.image)
        assert os.fstat(other).st_dev == os.fstat(fd).st_dev


def test_a_master_that_is_gone_is_a_clear_error_and_no_end(mounted: Mounted, cluster: Cluster, nodes: Nodes) -> None:
    local = mounted.local_reader()
    with local.running():
        cluster.master.kill()
        try:
            begin = time.monotonic()
            with (
                LayerMounts(mounted.loader, nodes[1].local / "other") as layers,
                pytest.raises(NodeError, match="cannot be read from the store") as caught,
            ):
                layers.acquire(mounted.image)
            assert caught.value.retryable
            assert time.monotonic() - begin < GIVES_UP_S
        finally:
            cluster.master.start()
        cluster.wait_for_chunkservers(nodes[1].shared)
        healing = Healing(mounted.loader.data_of, mounted.layers.held, mounted.loader.renew)
        healing.look()
        [fd] = mounted.layers.acquire(mounted.image)
        after = Reader(fd, mounted.content)
        with after.running():
            after.wait_for(len(mounted.content) // PIECE)
        assert (after.failure, after.wrong) == (None, 0)
    assert (local.failure, local.wrong) == (None, 0)
    assert local.slowest_s < 2.0


def read_past_cache(directory_fd: int) -> None:
    file = os.open("big", os.O_RDONLY, dir_fd=directory_fd)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(file, 1, 0)
    finally:
        os.close(file)


def wait_until(condition: object, *, within_s: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
