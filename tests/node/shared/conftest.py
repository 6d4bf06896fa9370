"""A real distributed file system as the store: MooseFS with a master, three chunkservers and two nodes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.shared_store.moosefs import BOUNDED, Cluster, moosefs

from opendsec.store.images import ImageStore
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node: its mount of the file system, and directories of its own."""

    name: str
    shared: Path
    local: Path

    def store(self) -> ImageStore:
        """The one store, as this node opens it."""
        return ImageStore(self.shared / "store", scratch=self.local / "scratch")

    def layers(self, store: ImageStore) -> LayerMounts:
        """Layers this node mounts: a context manager; `unmount_all` is the caller's."""
        return LayerMounts(DirectLoader(store, self.local / "metadata"), self.local / "layers")


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A directory of this machine's own disk."""
    path = Path(tempfile.mkdtemp(prefix="opendsec-test-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def cluster(disk: Path) -> Iterator[Cluster]:
    """Running servers. Whoever breaks one mends it."""
    folder = disk / "servers"
    folder.mkdir()
    with moosefs(folder) as started:
        yield started


@pytest.fixture
def nodes(cluster: Cluster, disk: Path, request: pytest.FixtureRequest) -> Iterator[tuple[NodeView, NodeView]]:
    """Both nodes, with an empty store. The parameter: options of their clients instead of `BOUNDED`."""
    options: tuple[str, ...] = getattr(request, "param", BOUNDED)
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            local = disk / f"node-{name}"
            local.mkdir()
            stack.callback(shutil.rmtree, local)
            shared = stack.enter_context(cluster.mounted(name, disk / f"shared-{name}", options=options))
            found.append(NodeView(name=name, shared=shared, local=local))
        stack.callback(shutil.rmtree, found[0].shared / "store", ignore_errors=True)
        yield found[0], found[1]
