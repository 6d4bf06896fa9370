"""What one start has read of a layer is in the memory of the next node when it is ready, whatever loads its layers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.store.loading.conftest import START_WAIT_S, Node, StartNode, digest_or_error, make_image, tree_of, truth
from tests.node.store.loading.servers import web_server

from opendsec.model.image import Image, Layer
from opendsec.store.images import ImageStore
from opendsec.store.loading import packs
from opendsec.store.loading.base import LayerFiles
from opendsec.store.loading.direct import DirectLoader
from opendsec.store.loading.packs import metadata_name, pack_name
from opendsec.store.loading.profiles import FileRead, profile_name, read_profile
from opendsec.store.loading.recording import found_in_memory
from opendsec.store.loading.sources import DirectoryFiles
from opendsec.store.loading.starting import Starts
from opendsec.store.mounts import LayerMounts

pytestmark = [pytest.mark.root, pytest.mark.erofs]


NAMES = ("d1/f1", "d2/f2", "d3/f3")


@pytest.fixture(autouse=True)
def all_metadata_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of small images."""
    monkeypatch.setattr(packs, "LEAST_METADATA_BYTES", 1)


class FarLoader(DirectLoader):
    """As if the store lay on another machine's disk."""

    def attach(self, layer: Layer) -> LayerFiles:
        return replace(super().attach(layer), is_far=True)


def start_of(layers: LayerMounts, image: Image) -> int:
    (fd,) = asyncio.run(layers.acquire_soon(image))
    return fd


def read_a_little(fd: int) -> None:
    """Three files, and one page from the middle of a large one."""
    for name in NAMES:
        (tree_of(fd) / name).read_bytes()
    large = os.open("large", os.O_RDONLY, dir_fd=fd)
    os.posix_fadvise(large, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(large, 10, 1 << 20)
    os.close(large)


def recorded(layers: LayerMounts, store: ImageStore, image: Image) -> None:
    """Read, then start: so nothing is looked for too early."""
    (fd,) = layers.acquire(image)
    read_a_little(fd)
    start_of(layers, image)
    profile = store.root / profile_name(image.layers[0].digest)
    end = time.monotonic() + 60
    while not profile.exists():
        assert time.monotonic() < end, "nothing was recorded"
        time.sleep(0.02)


def reads_in_memory(fd: int) -> Mapping[str, FileRead]:
    return {one.read.path: one.read for one in found_in_memory(fd)}


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["fuse", pytest.param("fanotify", marks=pytest.mark.fanotify)])
def test_the_next_node_asks_for_nothing_after_it_is_ready(
    store: ImageStore, disk: Path, start_node: StartNode, kind: str
) -> None:
    image = make_image(store, "one", files=30)
    expected = truth(store, image, disk)
    layer = image.layers[0]
    assert layer.data is not None
    first: Node = start_node(str(store.root), OPENDSEC_LOADER=kind)
    with first.mounts(record_s=0.05) as layers:
        recorded(layers, store, image)
        layers.unmount_all()
    profile = read_profile(DirectoryFiles(store.root), layer)
    assert profile is not None
    assert {read.path for read in profile.reads} == {*NAMES, "large"}
    assert (store.root / pack_name(layer.digest)).exists()
    assert (store.root / metadata_name(layer.digest)).exists()
    with web_server(store.root) as web:
        second: Node = start_node(web.url, OPENDSEC_LOADER=kind)
        with second.mounts() as layers:
            fd = start_of(layers, image)
            before = second.ask("status")
            assert web.seen["blobs"] == 0, "metadata comes compressed"
            assert web.seen["data"] == 0, "all of it comes from the pack"
            web.everything, web.faults = True, ["500"]
            read_a_little(fd)
            assert {name: digest_or_error(tree_of(fd) / name) for name in NAMES} == {
                name: expected[name] for name in NAMES
            }
            after = second.ask("status")
            assert after["layers"][layer.digest]["asked_bytes"] == before["layers"][layer.digest]["asked_bytes"]
            assert after["store"]["requests"] == before["store"]["requests"]
            web.faults = [""]
            assert digest_or_error(tree_of(fd) / "d4/f4") == expected["d4/f4"], "the rest comes when it is asked for"
            layers.unmount_all()


@pytest.mark.fuse
def test_a_store_that_lies_about_starts_costs_time_and_nothing_else(
    store: ImageStore, disk: Path, start_node: StartNode
) -> None:
    """A pack and metadata of another layer, in the place of this one's, and a profile that names what is not there."""
    image, other = make_image(store, "one", files=30), make_image(store, "other", files=30, seed=9)
    expected = truth(store, image, disk)
    node: Node = start_node(str(store.root))
    with node.mounts(record_s=0.05) as layers:
        for one in (image, other):
            recorded(layers, store, one)
        layers.unmount_all()
    mine, others = image.layers[0].digest, other.layers[0].digest
    for name in (pack_name, metadata_name):
        (store.root / name(mine)).write_bytes((store.root / name(others)).read_bytes())
    profile = store.root / profile_name(mine)
    profile.write_bytes(profile.read_bytes().replace(b'"d1/f1"', b'"d1/../../../../etc/passwd"'))
    with web_server(store.root) as web:
        second: Node = start_node(web.url)
        with second.mounts() as layers:
            fd = start_of(layers, image)
            found = {name: digest_or_error(tree_of(fd) / name) for name in expected}
            assert found == expected
            layers.unmount_all()


def test_not_a_page_more_is_read_than_was(store: ImageStore, disk: Path) -> None:
    image = make_image(store, "one", files=30)
    files = DirectoryFiles(store.root)
    for is_second in (False, True):
        starts = Starts(files, disk / "local", wait_s=START_WAIT_S, record_s=0.05)
        with LayerMounts(FarLoader(store, disk / "copies"), disk / "layers", starts=starts) as layers:
            if is_second:
                fd = start_of(layers, image)
            else:
                recorded(layers, store, image)
                (fd,) = layers.acquire(image)
            found = reads_in_memory(fd)
            profile = read_profile(files, image.layers[0])
            assert profile is not None
            assert {read.path: read for read in profile.reads} == found
            assert set(found) == {*NAMES, "large"}
            assert found["large"].size_bytes < 1 << 20
            layers.unmount_all()
        starts.close()


def test_a_store_that_takes_no_writes_leaves_the_profile_on_the_node(store: ImageStore, disk: Path) -> None:
    image = make_image(store, "one", files=10)
    (store.root / "profiles").write_text("in the way")
    starts = Starts(DirectoryFiles(store.root), disk / "local", wait_s=START_WAIT_S, record_s=0.05)
    with LayerMounts(FarLoader(store, disk / "copies"), disk / "layers", starts=starts) as layers:
        (fd,) = layers.acquire(image)
        (tree_of(fd) / "d1/f1").read_bytes()
        start_of(layers, image)
        end = time.monotonic() + 60
        while not (profile := read_profile(DirectoryFiles(disk / "local"), image.layers[0])):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert [read.path for read in profile.reads] == ["d1/f1"]
        layers.unmount_all()
    starts.close()
    assert [path.name for path in (disk / "local" / "profiles").iterdir()] == [Path(profile_name(profile.layer)).name]
