"""Sparse files are filled before they are read, whatever is killed; what cannot be filled is an error, never zeros."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.node.store.loading.conftest import Node, digest_or_error, digests, make_image, tree_of, truth
from tests.node.store.loading.servers import web_server

from opendsec.linux.process import send_signal
from opendsec.model.image import Image
from opendsec.store.images import ImageStore
from opendsec.store.loading.cache import RESERVE_BYTES
from opendsec.store.loading.fanotify_group import (
    FILLER,
    GUARDIAN,
    HOLDERS,
    KEEPERS,
    Place,
    find_holder,
    is_holding,
    place_of,
)
from opendsec.store.manifest import hex_of
from opendsec.store.mounts import unmount_layers

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.fanotify]


@dataclass(slots=True)
class FanotifyNode(Node):
    """The same with the other loader."""

    @property
    def place(self) -> Place:
        return place_of(self.run_dir, self.state_dir)

    def wait_ready(self) -> None:
        """The processes started now, not those before them."""
        Node.wait_ready(self)
        assert self.process is not None
        own = str(self.process.pid)
        wait_for(lambda: (self.place.run / GUARDIAN).read_text(encoding="ascii").split()[0] == own)

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

        def begin(address: str, *, root: str = "", **environment: str) -> FanotifyNode:
            node = FanotifyNode(
                root=disk / (root or f"node{len(list(disk.glob('node*')))}"),
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
        assert node.process.wait(60) == 0
    left = [name for name in HOLDERS if is_holding(node.place, name)]
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


READ = """
import hashlib, sys
try:
    with open(sys.argv[1], 'rb', buffering=0) as file:
        digest = hashlib.sha256()
        while piece := file.read(65536):
            digest.update(piece)
    print(digest.hexdigest(), flush=True)
except OSError as error:
    print(f'errno {error.errno}', flush=True)
"""


@contextlib.contextmanager
def reading(path: Path, fd: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that reads a file below a mount."""
    command = [sys.executable, "-c", READ, f"/proc/{os.getpid()}/fd/{fd}/{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def answered(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    return process.communicate(timeout=timeout_s)[0].strip()


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def evict_pages(tree: Path) -> None:
    """So that reads reach the file below again."""
    for directory, _, names in os.walk(tree):
        for name in names:
            fd = os.open(Path(directory, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@pytest.mark.parametrize("names", [(FILLER,), (GUARDIAN,), (GUARDIAN, FILLER), (*KEEPERS, FILLER)], ids="+".join)
def test_a_reader_in_the_middle_waits_for_whoever_comes_next(
    store: ImageStore, disk: Path, start: Start, names: tuple[str, ...]
) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        node = start(server.url)
        with node.mounts() as mounts:
            (fd,) = mounts.acquire(image)
            server.faults = ["hang"]
            with reading(Path("large"), fd) as process:
                wait_for(lambda: server.seen["data"])
                node.kill(*names)
                server.faults = [""]
                server.release.set()
                if GUARDIAN in names:
                    assert node.process is not None
                    node.process.wait()
                    node.start()
                assert answered(process) == expected["large"]
            assert digests(tree_of(fd)) == expected
            generation = mounts.acquired(image)
            assert generation == (fd,)
    wait_for(lambda: all(is_holding(node.place, name) for name in HOLDERS))


def test_the_filling_process_is_killed_again_and_again(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=120)
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        done = threading.Event()
        found: list[dict[str, str]] = []

        def read() -> None:
            found.append(digests(tree_of(fd)))
            done.set()

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        kills = 0
        while kills < 8:  # the first at once: a quick machine has read all of it soon
            node.kill(FILLER)
            kills += 1
            if done.wait(0.15):
                break
        for thread in threads:
            thread.join()
    # A read whose event was taken in the instant of a kill is an error; wrong bytes there are none.
    for one in found:
        assert {name: value for name, value in one.items() if not value.startswith("errno")}.items() <= expected.items()
        assert sum(value.startswith("errno") for value in one.values()) <= kills


def test_after_all_holders_died_at_once_nothing_old_is_believed(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        assert digest_or_error(tree_of(fd) / "d0/f0") == expected["d0/f0"]
        assert node.process is not None
        node.process.send_signal(signal.SIGSTOP)  # so that it starts nobody meanwhile
        node.kill(*HOLDERS)
        node.process.wait()
        wait_for(lambda: all(not is_holding(node.place, name) for name in HOLDERS))
        assert mounts.acquired(image) is None
        node.start()
        assert digest_or_error(tree_of(fd) / "large") == "errno 5"
        (again,) = mounts.acquire(image)
        assert again != fd
        assert digests(tree_of(again)) == expected


def test_what_is_on_the_disk_is_checked_again_by_the_next_process(store: ImageStore, disk: Path, start: Start) -> None:
    """As after a crash of the machine: what lies in the file may be anything."""
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        assert digests(tree_of(fd)) == expected
        mounts.unmount_all()
    node.stop()
    with node.data_file(image).open("r+b") as file:
        for offset in range(0, node.data_file(image).stat().st_size, 300_000):
            file.seek(offset)
            file.write(bytes(5000))
    node.start()
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        assert digests(tree_of(fd)) == expected
        mounts.unmount_all()


def test_a_complete_file_is_asked_about_no_more(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        node.ask("prefetch", layer=layer_fields(image), everything=True)
        whole = node.place.whole(node.data_file(image).name)
        wait_for(whole.exists)
        node.kill(*HOLDERS)
        evict_pages(tree_of(fd))
        assert digests(tree_of(fd)) == expected
        assert node.process is not None
        node.process.wait()
        node.start()
        assert mounts.acquired(image) is None  # another group: attached and mounted anew, and nothing is fetched
        (again,) = mounts.acquire(image)
        assert digests(tree_of(again)) == expected


def test_what_the_disk_spoilt_is_fetched_again_before_a_file_counts_as_complete(
    store: ImageStore, disk: Path, start: Start
) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        for name in expected:
            if name != "large":
                assert digest_or_error(tree_of(fd) / name) == expected[name]
        with node.data_file(image).open("r+b") as file:
            for offset in range(0, node.data_file(image).stat().st_size, 300_000):
                file.seek(offset)
                file.write(bytes(5000))
        node.ask("prefetch", layer=layer_fields(image), everything=True)
        wait_for(lambda: node.ask("status")["cache"]["damaged"] > 0)
        time.sleep(1)
        evict_pages(tree_of(fd))
        assert digests(tree_of(fd)) == expected
        wait_for(node.place.whole(node.data_file(image).name).exists)


def layer_fields(image: Image) -> object:
    return msgspec.to_builtins(image.layers[0])


@pytest.mark.parametrize("fault", ["zeros", "drop"])
def test_a_store_that_lies_always_gives_errors_and_sometimes_is_outlived(
    store: ImageStore, disk: Path, start: Start, fault: str
) -> None:
    image = make_image(store, "one", files=6)
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        node = start(server.url, OPENDSEC_STORE_TIMEOUT="1")
        with node.mounts() as mounts:
            (fd,) = mounts.acquire(image)
            server.faults = [fault]
            assert digest_or_error(tree_of(fd) / "large") == "errno 5"
            server.faults = [fault, "", "", ""]
            wait_for(lambda: digests(tree_of(fd)) == expected)
            mounts.unmount_all()


def test_a_store_that_hangs_costs_its_readers_their_patience(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=4)
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        node = start(server.url, OPENDSEC_STORE_TIMEOUT="1")
        with node.mounts() as mounts:
            (fd,) = mounts.acquire(image)
            server.faults = ["hang"]
            assert digest_or_error(tree_of(fd) / "large") == "errno 5"
            server.faults = [""]
            server.release.set()
            wait_for(lambda: digests(tree_of(fd)) == expected)
            mounts.unmount_all()


def test_reads_wait_for_the_next_one_when_who_fills_falls_silent(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=4)
    node = start(str(store.root), OPENDSEC_STORE_TIMEOUT="4")
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        pidfd = find_holder(node.place, FILLER)
        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        os.close(pidfd)
        found = digest_or_error(tree_of(fd) / "large")
        # The guardian kills what is silent, and the next one answers.
        assert found == truth(store, image, disk)["large"]
        mounts.unmount_all()


def test_readers_of_overlapping_ranges_fetch_each_chunk_once(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=4)
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        server.delay_s = 0.05
        node = start(server.url)
        with node.mounts() as mounts:
            (fd,) = mounts.acquire(image)
            with ExitStack() as stack:
                readers = [stack.enter_context(reading(Path("large"), fd)) for _ in range(6)]
                assert {answered(one) for one in readers} == {expected["large"]}
            assert node.ask("status")["store"]["bytes_read"] <= 3.5 * (1 << 20)
            mounts.unmount_all()


def test_mapped_files_are_filled_too(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=4)
    expected = truth(store, image, disk)
    node = start(str(store.root))
    code = (
        "import hashlib, mmap, sys; f = open(sys.argv[1], 'rb'); "
        "print(hashlib.sha256(mmap.mmap(f.fileno(), 0, prot=1)).hexdigest())"
    )
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        for path in (f"/proc/{os.getpid()}/fd/{fd}/large", str(node.data_file(image))):
            done = subprocess.run(
                [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=True
            )
            if path.endswith("/large"):
                assert done.stdout.strip() == expected["large"]
            else:
                data = image.layers[0].data
                assert data is not None
                stored = store.data_path(data.digest).read_bytes()
                assert done.stdout.strip() == hashlib.sha256(stored).hexdigest()
        mounts.unmount_all()


def partly(found: dict[str, str], expected: dict[str, str]) -> bool:
    """Some files are right, some are errors, none is anything else."""
    right = {name: value for name, value in found.items() if value != "errno 5"}
    return 0 < len(right) < len(found) and right.items() <= expected.items()


def test_a_full_cache_is_an_error_and_what_is_there_stays_readable(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=40)
    expected = truth(store, image, disk)
    node = start(str(store.root), OPENDSEC_CACHE_MB="4")
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        found = digests(tree_of(fd))
        assert partly(found, expected)
        evict_pages(tree_of(fd))
        assert partly(digests(tree_of(fd)), expected)
        mounts.unmount_all()


def test_a_full_disk_is_an_error_and_what_is_there_stays_readable(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one", files=40)
    expected = truth(store, image, disk)
    node_root = disk / "node0"
    node_root.mkdir()
    with small_disk(disk / "small.img", node_root, free_bytes=RESERVE_BYTES + (4 << 20)):
        node = start(str(store.root), root="node0")
        with node.mounts() as mounts:
            (fd,) = mounts.acquire(image)
            assert partly(digests(tree_of(fd)), expected)
            (node_root / "ballast").unlink()
            assert digests(tree_of(fd)) == expected
            mounts.unmount_all()
        node.stop()


@contextlib.contextmanager
def small_disk(image: Path, target: Path, *, free_bytes: int) -> Iterator[None]:
    with image.open("wb") as file:
        file.truncate(free_bytes + (128 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-m0", image], check=True, timeout=120)
    subprocess.run(["mount", "-o", "loop", image, target], check=True, timeout=120)
    try:
        free = os.statvfs(target)
        with (target / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - free_bytes)
        yield
    finally:
        subprocess.run(["umount", target], check=True, timeout=120)


def test_two_nodes_fill_from_one_store_at_once(store: ImageStore, disk: Path, start: Start) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    nodes = [start(str(store.root)) for _ in range(2)]
    with nodes[0].mounts() as first, nodes[1].mounts() as second:
        fds = [*first.acquire(image), *second.acquire(image)]
        with ExitStack() as stack:
            readers = [stack.enter_context(reading(Path("large"), fd)) for fd in fds for _ in range(2)]
            assert {answered(one) for one in readers} == {expected["large"]}
        nodes[0].kill(FILLER)
        assert [digests(tree_of(fd)) for fd in fds] == [expected, expected]
        first.unmount_all()
        second.unmount_all()


def test_told_to_end_it_stays_as_long_as_somebody_has_an_incomplete_layer(
    store: ImageStore, disk: Path, start: Start
) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start(str(store.root))
    with node.mounts() as mounts:
        (fd,) = mounts.acquire(image)
        inside = os.open("large", os.O_RDONLY, dir_fd=fd)
        mounts.unmount_all()
    node.stop()
    wait_for(lambda: is_holding(node.place, FILLER))
    with os.fdopen(inside, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == expected["large"]
    node.start()
    node.stop()
    assert [name for name in HOLDERS if is_holding(node.place, name)] == []
