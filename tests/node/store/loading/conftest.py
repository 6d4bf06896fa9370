"""A loader process of its own for each test, and layers mounted through it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from opendsec.errors import NodeError
from opendsec.host.loader import unmount_data
from opendsec.linux.process import children
from opendsec.model.image import Image, ImageConfig
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading.base import Loader
from opendsec.store.loading.control import ask
from opendsec.store.loading.fanotify import FanotifyLoader
from opendsec.store.loading.fetch import ChunkSource
from opendsec.store.loading.fuse import SOCKET, FuseLoader
from opendsec.store.loading.sources import open_files
from opendsec.store.loading.starting import Starts
from opendsec.store.mounts import LayerMounts, unmount_layers

START_WAIT_S = 20.0
"""So that a busy machine does not end the waiting."""

Truth = Mapping[str, str]
"""Digest of each file's content."""


@dataclass(slots=True)
class Node:
    """A loader process and what is mounted through it."""

    root: Path
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    program: Sequence[str] = ("-m", "opendsec.host.loader")

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def state_dir(self) -> Path:
        return self.root / "state"

    def start(self) -> None:
        environment = {
            **os.environ,
            "OPENDSEC_STATE_DIR": str(self.state_dir),
            "OPENDSEC_RUN_DIR": str(self.run_dir),
            "OPENDSEC_STORE": self.address,
            "OPENDSEC_LOG_LEVEL": "error",
            **self.environment,
        }
        self.process = subprocess.Popen([sys.executable, *self.program], env=environment)
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(NodeError):
                self.ask("status")
                return
            assert self.process is not None
            assert self.process.poll() is None, "the loader did not start"
            time.sleep(0.03)
        raise AssertionError("the loader did not get ready")

    def ask(self, what: str, **fields: Any) -> Mapping[str, Any]:
        return ask(self.run_dir / SOCKET, what, timeout_s=30, **fields)

    def server_pid(self) -> int:
        """Of the process that serves, below the guardian."""
        assert self.process is not None
        (pid,) = children(self.process.pid)
        return pid

    def kill_guardian(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    @contextlib.contextmanager
    def mounts(self, *, wait_s: float = 20.0, record_s: float | None = None) -> Iterator[LayerMounts]:
        """As an edge has them, but that nothing is recorded unless it is said when."""
        files = open_files(self.address, attempt_s=2.0)
        source = ChunkSource(files, patience_s=5.0)
        loader: Loader = FuseLoader(source, self.state_dir / "cache" / "metadata", self.run_dir, returns_s=wait_s)
        if self.environment.get("OPENDSEC_LOADER") == "fanotify":
            loader = FanotifyLoader(source, self.run_dir, self.state_dir, returns_s=wait_s)
        starts = Starts(files, self.state_dir / "cache", wait_s=START_WAIT_S, record_s=record_s)
        try:
            with LayerMounts(loader, self.run_dir / "layers", wait_s=wait_s, starts=starts) as layers:
                yield layers
        finally:
            starts.close()
            loader.close()


StartNode = Callable[..., Node]


@pytest.fixture(scope="session", autouse=True)
def threads_of_the_library() -> None:
    """The library for remote stores starts its threads at the first call and keeps them: no test leaves them behind."""
    obstore.put(MemoryStore(), "name", b"content")


@pytest.fixture
def start_node(disk: Path) -> Iterator[StartNode]:
    """Starts loaders; ends them and unmounts everything afterwards."""
    with ExitStack() as stack:

        def start(address: str, **environment: str) -> Node:
            node = Node(root=disk / f"node{len(list(disk.glob('node*')))}", address=address, environment=environment)
            node.run_dir.mkdir(parents=True)
            stack.callback(_end, node)
            node.start()
            return node

        yield start


def _end(node: Node) -> None:
    try:
        unmount_layers(node.run_dir / "layers")
    finally:
        if node.process is not None and node.process.poll() is None:
            node.process.send_signal(signal.SIGTERM)
            node.process.wait(60)
        unmount_data(node.run_dir)


def make_image(store: ImageStore, name: str, *, files: int = 40, seed: int = 0, largest: int = 400_000) -> Image:
    """Files of random sizes and content; one of 3 MB."""
    order = random.Random(seed)
    with store.staging() as work:
        tree = work / "tree"
        for number in range(files):
            path = tree / f"d{number % 7}" / f"f{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(order.randbytes(order.randrange(largest)))
        (tree / "large").write_bytes(order.randbytes(3 << 20))
        layer = make_layer(store, work, tree)
        return store.publish(name, layers=[layer], config=ImageConfig(), source="test")


def tree_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def digests(tree: Path) -> dict[str, str]:
    """Of all files, by 8 readers; what cannot be read is "errno …"."""
    paths = [Path(directory, name) for directory, _, names in os.walk(tree) for name in names]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip([str(path.relative_to(tree)) for path in paths], pool.map(digest_or_error, paths), strict=True))


def digest_or_error(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"errno {error.errno}"


def truth(store: ImageStore, image: Image, disk: Path) -> dict[str, str]:
    """What the files of an image are, by the direct loader."""
    from opendsec.store.loading.direct import DirectLoader

    with LayerMounts(DirectLoader(store, disk / "copies"), disk / "truth") as layers:
        (fd,) = layers.acquire(image)
        found = digests(tree_of(fd))
        layers.unmount_all()
    return found
