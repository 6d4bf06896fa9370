"""Layers are mounted once per node, shared by all processes, and adopted only when they are what they should be."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.images import make_busybox_image, make_scratch_image

from opendsec.errors import HostCapabilityError, ImageInvalidError, NodeError
from opendsec.linux.libc import MNT_DETACH, MS_RDONLY, mount, umount2
from opendsec.linux.mount import mountinfo
from opendsec.model.image import Image, ImageConfig, Layer
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.leases import Leases
from opendsec.store.loading.base import LayerFiles
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts, mounted_at

pytestmark = [pytest.mark.root, pytest.mark.erofs]


def direct(store: ImageStore) -> DirectLoader:
    return DirectLoader(store, store.root.parent / "metadata")


@pytest.fixture
def mounts(store: ImageStore, tmp_path: Path) -> Iterator[LayerMounts]:
    with LayerMounts(direct(store), tmp_path / "layers") as mounts:
        yield mounts
        mounts.unmount_all()


def mounted(root: Path) -> list[str]:
    return [entry.target for entry in mountinfo() if entry.target.startswith(f"{root}/")]


def names(fd: int) -> list[str]:
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)


def two_layers(store: ImageStore) -> Image:
    upper = make_scratch_image(store, "upper", files={"/top": b""}).layers
    lower = make_busybox_image(store, "lower", files={"/bottom": b""}).layers
    return store.publish("both", layers=[*lower, *upper], config=ImageConfig())


def test_descriptors_are_topmost_first_and_stay(store: ImageStore, mounts: LayerMounts) -> None:
    image = two_layers(store)
    top, bottom = mounts.acquire(image)
    assert "top" in names(top)
    assert "bottom" in names(bottom)
    assert mounts.acquire(image) == (top, bottom)


def test_mounted_read_only_with_directio_and_set_id_bits(
    store: ImageStore, mounts: LayerMounts, tmp_path: Path
) -> None:
    image = make_busybox_image(store)
    mounts.acquire(image)
    entry = mounted_at(tmp_path / "layers" / image.layers[0].digest[7:])
    assert entry is not None
    assert (entry.fstype, entry.source) == ("erofs", str(store.blob_path(image.layers[0].mounted.digest)))
    assert "ro" in entry.options
    assert not {"nosuid", "nodev"} & set(entry.options)
    assert "directio" in entry.super_options


def test_mounts_outlive_the_object_and_are_adopted(store: ImageStore, mounts: LayerMounts, tmp_path: Path) -> None:
    image = make_busybox_image(store)
    mounts.acquire(image)
    mounts.close()
    before = mounted(tmp_path)
    with LayerMounts(direct(store), tmp_path / "layers") as second:
        [fd] = second.acquire(image)
        assert "bin" in names(fd)
    assert mounted(tmp_path) == before
    assert len(before) == 1


def test_a_removed_image_stays_readable_while_mounted(store: ImageStore, mounts: LayerMounts) -> None:
    [fd] = mounts.acquire(make_busybox_image(store, files={"/kept": b"kept"}))
    store.remove("busybox")
    assert collect(store, grace_s=0).files  # the fixture tells nobody what it has mounted
    with open(os.open("kept", os.O_RDONLY, dir_fd=fd), "rb") as file:
        assert file.read() == b"kept"


ACQUIRE = """
import json, sys
from pathlib import Path
from opendsec.store.images import ImageStore
from opendsec.store.loading.base import LayerFiles
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.mounts import LayerMounts
store = ImageStore(Path(sys.argv[1]))
with LayerMounts(DirectLoader(store, store.root.parent / 'metadata'), Path(sys.argv[2])) as mounts:
    sys.stdin.read(1)
    print(json.dumps(len(mounts.acquire(store.get("both")))))
"""


def test_many_processes_at_once_mount_once(store: ImageStore, mounts: LayerMounts, tmp_path: Path) -> None:
    two_layers(store)
    command = [sys.executable, "-c", ACQUIRE, str(store.root), str(tmp_path / "layers")]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) for _ in range(6)
    ]
    answers = [process.communicate(b"g", timeout=120)[0] for process in processes]
    assert [json.loads(answer) for answer in answers] == [2] * 6
    assert len(mounted(tmp_path)) == 2
    assert mounts.unmount_all() == 2
    assert mounted(tmp_path) == []
    assert [path.name for path in (tmp_path / "layers").iterdir()] == [".lock"]


def test_many_threads_at_once_share_one_descriptor(store: ImageStore, mounts: LayerMounts, tmp_path: Path) -> None:
    image = two_layers(store)
    with ThreadPoolExecutor(8) as threads:
        answers = {future.result() for future in [threads.submit(mounts.acquire, image) for _ in range(32)]}
    assert len(answers) == 1
    assert len(mounted(tmp_path)) == 2


def test_something_else_in_the_place_is_refused(store: ImageStore, mounts: LayerMounts, tmp_path: Path) -> None:
    image, other = make_busybox_image(store), make_scratch_image(store)
    target = tmp_path / "layers" / image.layers[0].digest[7:]
    target.mkdir(parents=True)
    mount(str(store.blob_path(other.layers[0].mounted.digest)), str(target), "erofs", MS_RDONLY)
    try:
        with pytest.raises(NodeError, match="is taken by erofs"):
            mounts.acquire(image)
    finally:
        umount2(str(target), MNT_DETACH)


def test_a_layer_that_is_gone_is_named(store: ImageStore, mounts: LayerMounts) -> None:
    image = make_busybox_image(store)
    store.remove("busybox")
    collect(store, grace_s=0)
    with pytest.raises(ImageInvalidError, match="is not in the store"):
        mounts.acquire(image)


def test_no_erofs_file_is_named(store: ImageStore, mounts: LayerMounts, tmp_path: Path) -> None:
    with store.staging() as work:
        (work / "layer").write_bytes(b"not a file system" * 1000)
        image = store.publish("bad", layers=[store.stage_layer(work / "layer")], config=ImageConfig())
    with pytest.raises(ImageInvalidError, match="no EROFS file"):
        mounts.acquire(image)
    assert mounted(tmp_path) == []


def test_a_store_on_tmpfs_says_what_to_change(tmp_path: Path) -> None:
    place = tmp_path / "memory"
    place.mkdir()
    mount("tmpfs", str(place), "tmpfs")
    try:
        store = ImageStore(place / "store")
        image = make_busybox_image(store)
        with LayerMounts(direct(store), tmp_path / "layers") as mounts:
            with pytest.raises(HostCapabilityError, match="ENOTBLK") as caught:
                mounts.acquire(image)
            mounts.unmount_all()
        assert "OPENDSEC_STATE_DIR" in caught.value.remedy
    finally:
        umount2(str(place), MNT_DETACH)


class SlowLoader(DirectLoader):
    """Waits with one layer until it is told to go on."""

    def __init__(self, store: ImageStore, copies: Path, slow: str) -> None:
        super().__init__(store, copies)
        self.slow = slow
        self.go_on = threading.Event()

    def attach(self, layer: Layer) -> LayerFiles:
        if layer.digest == self.slow:
            self.go_on.wait(60)
        return super().attach(layer)


def test_a_slow_layer_holds_up_nobody_else_and_ends_in_an_error(store: ImageStore, tmp_path: Path) -> None:
    """50 starts of an image that does not come, and one that does: it needs no thread of the loop's own."""
    slow, quick = make_busybox_image(store, "slow"), make_scratch_image(store, "quick")
    loader = SlowLoader(store, tmp_path / "copies", slow.layers[0].digest)

    async def start_all(mounts: LayerMounts) -> list[object]:
        waiting = [asyncio.ensure_future(mounts.acquire_soon(slow)) for _ in range(50)]
        await asyncio.sleep(0.1)
        await mounts.acquire_soon(quick)
        await asyncio.to_thread(lambda: None)
        assert not any(one.done() for one in waiting)
        return list(await asyncio.gather(*waiting, return_exceptions=True))

    with LayerMounts(loader, tmp_path / "layers", wait_s=3) as mounts:
        try:
            errors = asyncio.run(start_all(mounts))
            assert {type(error) for error in errors} == {NodeError}
            assert all(error.retryable for error in errors if isinstance(error, NodeError))
            loader.go_on.set()
            mounts._wait_s = 60
            assert len(asyncio.run(mounts.acquire_soon(slow))) == 1
        finally:
            loader.go_on.set()
            mounts.unmount_all()


def test_what_is_mounted_with_a_lease_outlives_its_name_until_it_is_unmounted(
    store: ImageStore, tmp_path: Path
) -> None:
    image = make_busybox_image(store, files={"/kept": b"kept"})
    root = tmp_path / "leased"
    with LayerMounts(direct(store), root, leases=Leases(store.layout, root)) as mounts:
        mounts.acquire(image)
        store.remove("busybox")
        assert len(collect(store, grace_s=0).files) == 1  # the manifest
    # Another process of the node adopts the mount, and its lease.
    with LayerMounts(direct(store), root, leases=Leases(store.layout, root)) as mounts:
        assert len(collect(store, grace_s=0).files) == 0
        again = store.publish("packed", layers=image.layers, config=image.config)
        assert again.layers == image.layers
        store.remove("packed")
        assert mounts.unmount_all() == 1
    assert len(collect(store, grace_s=0).files) == 4
    assert not list(store.layout.nodes.iterdir())


def test_a_lease_on_what_was_never_mounted_goes_when_the_node_comes_back(store: ImageStore, tmp_path: Path) -> None:
    [layer] = make_busybox_image(store).layers
    root = tmp_path / "leased"
    Leases(store.layout, root).take(layer)  # and killed before it was mounted
    with LayerMounts(direct(store), root, leases=Leases(store.layout, root)):
        store.remove("busybox")
        assert len(collect(store, grace_s=0).files) == 4
