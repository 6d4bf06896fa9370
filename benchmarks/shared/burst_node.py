"""What `benchmarks.burst` runs on: a shared store behind a slow cable, a node's own disk, an edge, and their meters.

The store is MooseFS with three chunkservers in network namespaces; the cable between its switch and the node carries no
more than it is told (tc tbf), whoever reads. The node's disk is an ext4 of its own in a file (loop device), so what is
written to it is counted by the kernel and by nobody else's work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from benchmarks.shared import cost
from benchmarks.shared.platforms import groups_of
from tests.shared_store.moosefs import Cluster, moosefs, run

from opendsec.linux import libc
from opendsec.store.mounts import unmount_layers

NODE = "a"
DISK_BYTES = 10 << 30
SAMPLE_S = 0.25
EDGE = "burst"
_READY_S = 60.0
_DEFAULT_TRIES: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Meters at one moment of an arm."""

    at_s: float
    read: int
    """Bytes that came over the cable."""
    written: int
    """Bytes written to the node's disk."""
    writes: int
    completed: int
    running: int


@dataclass(slots=True)
class Counts:
    """What the arm itself knows."""

    completed: int = 0
    running: int = 0


@dataclass(slots=True)
class Node:
    """One node: its disk, its mount of the store, its meters."""

    disk: Path
    shared: Path
    device: str
    cluster: Cluster
    groups: tuple[Path, ...]
    run_dir: Path

    def written(self) -> tuple[int, int]:
        """(bytes, requests) the disk was given so far."""
        words = Path(f"/sys/block/{self.device}/stat").read_text(encoding="ascii").split()
        return int(words[6]) * 512, int(words[4])

    def cpu_s(self) -> float:
        """Of this process, the edge, all sandboxes, and the client of the shared file system."""
        return cost.group_cpu_s(*self.groups)

    def edge(self, module: str, store: Path, **settings: str) -> AbstractContextManager[Path]:
        """An edge process with empty state; its socket."""
        return edge_process(module, self.disk / "state", self.run_dir, self.groups[1].name, store, **settings)


@contextmanager
def edge_process(module: str, state: Path, run_dir: Path, cgroup: str, store: Path, **settings: str) -> Iterator[Path]:
    """A program that is an edge, in directories that are made and removed; its socket."""
    environment: Mapping[str, str] = {
        **os.environ,
        "OPENDSEC_STATE_DIR": str(state),
        "OPENDSEC_RUN_DIR": str(run_dir),
        "OPENDSEC_STORE": str(store),
        "OPENDSEC_LOADER": "direct",
        "OPENDSEC_EDGE": EDGE,
        "OPENDSEC_EDGE_CGROUP": cgroup,
        "OPENDSEC_EDGE_KEEP_ENDED": "2",
        "OPENDSEC_LOG_LEVEL": "warning",
        **settings,
    }
    for folder in (state, run_dir):
        folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-m", module], env=environment, stdin=subprocess.DEVNULL)
    try:
        socket = run_dir / f"edge-{EDGE}.sock"
        deadline = time.monotonic() + _READY_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{module} did not start")
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait(60)
        unmount_layers(run_dir / "layers")
        shutil.rmtree(run_dir)
        shutil.rmtree(state)


class Meters:
    """A thread that reads all meters four times a second while the block runs."""

    def __init__(self, node: Node, counts: Counts) -> None:
        self._node = node
        self._counts = counts
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)
        self._begin = 0.0
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def as_rows(self) -> list[dict[str, float]]:
        """Bytes and requests counted from the first sample."""
        first = asdict(self.samples[0])
        counted = ("read", "written", "writes")
        return [
            {key: value - first[key] if key in counted else value for key, value in asdict(one).items()}
            for one in self.samples
        ]

    def _run(self) -> None:
        """In the node's network namespace, whose counters this thread can read without any program."""
        with open(f"/run/netns/{self._node.cluster.name}-{NODE}", "rb") as namespace:
            libc.setns(namespace.fileno(), libc.CLONE_NEWNET)
        while True:
            over = self._over.wait(SAMPLE_S)
            written, writes = self._node.written()
            self.samples.append(
                Sample(
                    at_s=time.monotonic() - self._begin,
                    read=_received(),
                    written=written,
                    writes=writes,
                    completed=self._counts.completed,
                    running=self._counts.running,
                )
            )
            if over:
                return


def _received() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            return int(rest.split()[0])
    return 0


@contextmanager
def burst_node(state: Path, library: Path, *, megabytes_s: int) -> Iterator[Node]:
    """Everything; `library` holds `store` and `tars`, which are copied to the shared store. Gone afterwards."""
    with ExitStack() as stack:
        servers = state / "servers"
        servers.mkdir(parents=True, exist_ok=True)
        stack.callback(servers.rmdir)
        cluster = stack.enter_context(moosefs(servers, copies=1))  # before our own control groups: other machines
        name = f"opendsec-burst-{os.getpid()}"
        groups = stack.enter_context(groups_of(name))
        device, disk = stack.enter_context(_own_disk(state))
        shared = stack.enter_context(cluster.mounted(NODE, state / "shared", options=_DEFAULT_TRIES))
        for part in ("store", "tars"):
            print(f"copying {part} to the shared store", flush=True)
            run_long("cp", "-r", "--sparse=never", str(library / part), str(shared / part))
        throttle = f"tc qdisc add dev {NODE} root tbf rate {megabytes_s * 8}mbit burst 1mb latency 100ms".split()
        run("nsenter", f"--net=/run/netns/{cluster.name}-switch", *throttle)
        yield Node(disk, shared, device, cluster, groups, Path(f"/run/{name}"))


def run_long(*argv: str) -> None:
    """A program that may take minutes."""
    subprocess.run(argv, check=True, timeout=1200, stdin=subprocess.DEVNULL)


@contextmanager
def _own_disk(state: Path) -> Iterator[tuple[str, Path]]:
    file, mounted = state / "node.ext4", state / "node"
    with file.open("wb") as made:
        made.truncate(DISK_BYTES)
    try:
        run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(file))
        loop = run("losetup", "--find", "--show", "--direct-io=on", str(file)).strip()
        try:
            mounted.mkdir(exist_ok=True)
            run("mount", "-o", "discard", loop, str(mounted))
            try:
                yield Path(loop).name, mounted
            finally:
                run("umount", str(mounted))
                mounted.rmdir()
        finally:
            run("losetup", "--detach", loop)
    finally:
        file.unlink()


def drop_caches() -> None:
    """Every arm begins with nothing in memory."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
