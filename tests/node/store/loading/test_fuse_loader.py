"""Layers through the loader process, on a real kernel: what is read is right, or an I/O error, and never zeros."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.node.store.loading.conftest import StartNode, digest_or_error, digests, make_image, tree_of, truth
from tests.node.store.loading.servers import web_server

from opendsec.errors import DigestMismatchError, ImageInvalidError, NodeError
from opendsec.linux.mount import mountinfo
from opendsec.store.images import ImageStore
from opendsec.store.loading.sources import data_name, table_name

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.fuse]

EIO = f"errno {errno.EIO}"


def test_a_directory_store_reads_as_it_does_directly(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start_node(str(store.root))
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        assert digests(tree_of(fd)) == expected
        assert layers.acquired(image) == (fd,)
        status = node.ask("status")
        (layer,) = status["layers"].values()
        data = image.layers[0].data
        assert data is not None
        assert layer["present_bytes"] == data.size_bytes
        assert status["store"]["bytes_read"] < data.size_bytes * 1.05 + 100_000, "read once"
        assert sorted(path.name for path in (node.run_dir / "data").iterdir()) == [data.digest[7:]]
        assert layers.unmount_all() == 1
    node.stop()
    assert not [entry for entry in mountinfo() if entry.target.startswith(str(disk))]


def test_after_a_restart_nothing_is_fetched_again(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start_node(str(store.root))
    for again in (False, True):
        with node.mounts() as layers:
            (fd,) = layers.acquire(image)
            assert digests(tree_of(fd)) == expected
            assert (node.ask("status")["store"]["requests"] == 0) is again
            layers.unmount_all()
        node.stop()
        if not again:
            node.start()


def test_a_damaged_cache_is_noticed_and_healed(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start_node(str(store.root))
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        digests(tree_of(fd))
        layers.unmount_all()
    node.stop()
    (cached,) = (path for path in (node.state_dir / "cache/data").iterdir() if path.name != ".lock")
    size = cached.stat().st_size
    with cached.open("r+b") as file:
        for place in range(0, size, 300_000):
            file.seek(place)
            file.write(bytes(5000)[: size - place])
    (table,) = (node.state_dir / "cache/tables/sha256").iterdir()
    table.write_bytes(table.read_bytes()[:-32])
    node.start()
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        assert digests(tree_of(fd)) == expected
        assert node.ask("status")["cache"]["damaged"] > 0


def test_a_cache_with_no_room_serves_all_the_same(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    """1 MiB for 11 MB that 8 readers read three times, each past the page cache."""
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start_node(str(store.root), OPENDSEC_CACHE_MB="1")
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)

        def read_all(_: int) -> bool:
            for directory, _dirs, names in os.walk(tree_of(fd)):
                for name in names:
                    file = os.open(Path(directory, name), os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)
            return digests(tree_of(fd)) == expected

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read_all, range(12)))
        cache = node.ask("status")["cache"]
        assert cache["evicted_bytes"] > 0
        assert cache["used_bytes"] <= 1 << 20


@pytest.mark.loop
def test_a_full_disk_serves_all_the_same(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    """The node's state is on 24 MB that something else fills while layers are read."""
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    node = start_node(str(store.root))
    node.stop()
    shutil.rmtree(node.state_dir)
    node.state_dir.mkdir()
    subprocess.run(["truncate", "-s", "24M", disk / "small"], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk / "small"], check=True)
    subprocess.run(["mount", "-o", "loop", disk / "small", node.state_dir], check=True)
    try:
        node.start()
        with node.mounts() as layers:
            (fd,) = layers.acquire(image)
            with (node.state_dir / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(100_000)):
                    pass
            assert digests(tree_of(fd)) == expected
            cache = node.ask("status")["cache"]
            assert cache["refused"] > 0
            assert cache["damaged"] == 0
            (node.state_dir / "filler").unlink()
            layers.unmount_all()
        node.stop()
    finally:
        subprocess.run(["umount", "-l", node.state_dir], check=True)


def test_a_server_killed_mid_read_costs_nothing(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    """The guardian holds the file system; the next server is asked what the last one owed."""
    image = make_image(store, "one", files=120)
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        server.delay_s = 0.01
        node = start_node(server.url)
        with node.mounts() as layers, ThreadPoolExecutor(4) as pool:
            (fd,) = layers.acquire(image)
            reading = [pool.submit(digest_or_error, tree_of(fd) / name) for name in expected]
            for _ in range(2):
                time.sleep(0.3)
                os.kill(node.server_pid(), signal.SIGKILL)
                node.wait_ready()
            assert [future.result(timeout=60) for future in reading] == list(expected.values())
            assert layers.acquired(image) == (fd,)


IMPATIENT = """
import opendsec.host.loader as loader
loader.LOOK_EVERY_S = loader.ANSWERS_S = 0.5
loader.MOST_SILENT = 3
raise SystemExit(loader.main())
"""


def test_a_server_that_says_nothing_is_replaced(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one", files=5)
    expected = truth(store, image, disk)
    node = start_node(str(store.root))
    node.stop()
    node.program = ("-c", IMPATIENT)
    node.start()
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        os.kill(node.server_pid(), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(digests, tree_of(fd)).result(timeout=60) == expected


def test_a_guardian_killed_gives_errors_and_new_starts_work(
    store: ImageStore, disk: Path, start_node: StartNode
) -> None:
    image = make_image(store, "one", files=20)
    expected = truth(store, image, disk)
    with web_server(store.root) as server:
        node = start_node(server.url)
        with node.mounts(wait_s=2.0) as layers:
            (old,) = layers.acquire(image)
            server.faults = ["hang"]
            with ThreadPoolExecutor(2) as pool:
                reading = pool.submit(digest_or_error, tree_of(old) / "large")
                time.sleep(0.5)
                node.kill_guardian()
                assert reading.result(timeout=60).startswith("errno")
            assert layers.acquired(image) is None
            with pytest.raises(NodeError, match="no loader runs") as caught:
                layers.acquire(image)
            assert caught.value.retryable
            server.faults = [""]
            server.release.set()
            node.start()
            (new,) = layers.acquire(image)
            assert new != old
            assert digests(tree_of(new)) == expected
            assert set(digests(tree_of(old)).values()) <= {*expected.values(), EIO, f"errno {errno.ENOTCONN}"}
            assert EIO in digests(tree_of(old)).values()
        with node.mounts() as layers:
            (adopted,) = layers.acquire(image)
            assert digests(tree_of(adopted)) == expected
        assert len([entry for entry in mountinfo() if entry.target.startswith(f"{node.run_dir}/layers/")]) == 1


def test_a_loader_that_goes_on_is_adopted_by_the_next_edge(
    store: ImageStore, disk: Path, start_node: StartNode
) -> None:
    """An edge that was killed: the object is dropped without a word, mounts and loader stay."""
    image = make_image(store, "one", files=5)
    node = start_node(str(store.root))
    with node.mounts() as layers:
        layers.acquire(image)
    before = [entry.mount_id for entry in mountinfo() if entry.target.startswith(str(disk))]
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        assert EIO not in digests(tree_of(fd)).values()
    assert [entry.mount_id for entry in mountinfo() if entry.target.startswith(str(disk))] == before


def test_a_corrupt_chunk_is_an_error_of_that_file_alone(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one")
    expected = truth(store, image, disk)
    data = image.layers[0].data
    assert data is not None
    path = store.data_path(data.digest)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"corrupt")
    node = start_node(str(store.root), OPENDSEC_STORE_TIMEOUT="2")
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        found = digests(tree_of(fd))
        wrong = {name for name in expected if found[name] != expected[name]}
        assert wrong
        assert {found[name] for name in wrong} == {EIO}
        assert len(wrong) <= 3, "the files of one chunk, and of the kernel's read around it"
        (layer,) = node.ask("status")["layers"].values()
        assert layer["failures"] > 0


@pytest.mark.parametrize("damage", ["truncated", "other", "missing"])
def test_a_layer_without_a_good_table_is_not_mounted(
    store: ImageStore, disk: Path, start_node: StartNode, damage: str
) -> None:
    image, other = make_image(store, "one", files=5), make_image(store, "two", files=5, seed=1)
    data, second = image.layers[0].data, other.layers[0].data
    assert data is not None
    assert second is not None
    table = store.root / table_name(data.digest)
    content = table.read_bytes()
    table.unlink()
    if damage == "truncated":
        table.write_bytes(content[:-1])
    elif damage == "other":
        table.write_bytes((store.root / table_name(second.digest)).read_bytes())
    node = start_node(str(store.root), OPENDSEC_STORE_TIMEOUT="2")
    with node.mounts() as layers:
        with pytest.raises((DigestMismatchError, ImageInvalidError, NodeError)):
            layers.acquire(image)
        (fd,) = layers.acquire(other)
        assert EIO not in digests(tree_of(fd)).values()


def test_data_that_is_gone_is_an_error(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    image = make_image(store, "one", files=5)
    data = image.layers[0].data
    assert data is not None
    node = start_node(str(store.root), OPENDSEC_STORE_TIMEOUT="2")
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        (store.root / data_name(data.digest)).unlink()
        assert set(digests(tree_of(fd)).values()) == {EIO}


def test_many_readers_agree_under_pressure(store: ImageStore, disk: Path, start_node: StartNode) -> None:
    """32 readers of 4 images while caches are thrown away: neither a wrong byte nor a wait without end."""
    images = [make_image(store, f"i{seed}", files=12, seed=seed) for seed in range(4)]
    expected = [truth(store, image, disk) for image in images]
    node = start_node(str(store.root), OPENDSEC_CACHE_MB="2")
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(0.2):
            Path("/proc/sys/vm/drop_caches").write_text("1")

    dropper = threading.Thread(target=drop)
    with node.mounts() as layers, ThreadPoolExecutor(32) as pool:
        trees = [tree_of(layers.acquire(image)[0]) for image in images]
        dropper.start()
        try:
            found = list(pool.map(lambda n: digests(trees[n % 4]) == expected[n % 4], range(32)))
        finally:
            ended.set()
            dropper.join()
        assert all(found)


def test_a_server_that_follows_another_without_a_table_serves_once_it_has_it(
    store: ImageStore, disk: Path, start_node: StartNode
) -> None:
    """The table could not be kept, or was damaged, and the store does not answer when the server is killed."""
    image = make_image(store, "one", files=4)
    expected = truth(store, image, disk)
    with web_server(store.root) as web:
        node = start_node(web.url, OPENDSEC_STORE_TIMEOUT="2")
        with node.mounts() as layers:
            (fd,) = layers.acquire(image)
            shutil.rmtree(node.state_dir / "cache/tables")
            web.everything, web.faults = True, ["500"]
            server = node.server_pid()
            os.kill(server, signal.SIGKILL)
            begun = time.monotonic()
            assert digest_or_error(tree_of(fd) / "large") == EIO
            assert time.monotonic() - begun < 8, "the store is not waited for once more for each layer"
            web.faults = [""]
            while digest_or_error(tree_of(fd) / "large") == EIO:
                assert time.monotonic() - begun < 30
                time.sleep(0.1)
            assert digests(tree_of(fd)) == expected
