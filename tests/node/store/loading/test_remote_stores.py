"""Stores behind HTTP and S3, by real servers: what they hold is read and checked; what they do wrong is an error."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.node.store.loading.conftest import StartNode, digests, make_image, tree_of, truth
from tests.node.store.loading.servers import Served, s3_server, web_server

from opendsec.errors import (
    ConflictError,
    DigestMismatchError,
    ImageInvalidError,
    ImageNotFoundError,
    NodeError,
    UnsupportedError,
)
from opendsec.model.image import ImageConfig, LayerRole
from opendsec.store.compose import pinned
from opendsec.store.images import ImageStore
from opendsec.store.layers import make_layer
from opendsec.store.loading import packs
from opendsec.store.loading.reading import GIVEN_UP_S
from opendsec.store.loading.remote import RemoteStore
from opendsec.store.loading.sources import data_name, open_files, table_name
from opendsec.store.loading.sync import sync_images
from opendsec.store.names import NAMES_FILE
from opendsec.store.tagging import tag_image

pytestmark = [pytest.mark.root, pytest.mark.erofs, pytest.mark.fuse]


@pytest.fixture(scope="module")
def s3() -> Iterator[Mapping[str, str]]:
    with s3_server("images") as environment:
        yield environment


@pytest.fixture
def web(store: ImageStore) -> Iterator[Served]:
    with web_server(store.root) as server:
        yield server


def test_names_and_compositions_over_http(store: ImageStore, web: Served) -> None:
    image = make_image(store, "team/one", files=2)
    remote = RemoteStore(open_files(web.url))
    assert remote.get("team/one") == image
    assert remote.compose("team/one").layers == image.layers
    assert remote.get(f"team/one@{image.digest}").layers == image.layers
    assert remote.names() == ["team/one"], "kept by whoever publishes"
    tag_image(store, "a", "team/one")
    assert remote.names() == ["a", "team/one"]
    store.remove("team/one")
    assert remote.names() == ["a"]
    (store.root / NAMES_FILE).unlink()
    assert remote.names() == []
    with pytest.raises(ImageNotFoundError, match="no image 'other'"):
        remote.get("other")
    with pytest.raises(UnsupportedError, match="only reads"):
        remote.publish("new")
    remote.close()


def test_a_server_that_is_gone_or_wrong_is_said_to_be(store: ImageStore) -> None:
    make_image(store, "one", files=2)
    with web_server(store.root) as web:
        remote = RemoteStore(open_files(web.url, attempt_s=0.5), patience_s=0.7)
        web.everything = True
        web.faults = ["zeros"]
        with pytest.raises(ImageInvalidError):
            remote.get("one")
        for fault in ("500", "hang"):
            web.faults = [fault]
            with pytest.raises(NodeError) as caught:
                remote.get("one")
            assert caught.value.retryable
    with pytest.raises(NodeError):
        remote.get("one")
    remote.close()


@pytest.mark.parametrize("everything", [False, True])
def test_a_server_that_lies_now_and_then_costs_time_only(
    store: ImageStore, disk: Path, web: Served, start_node: StartNode, everything: bool
) -> None:
    image = make_image(store, "one", files=12)
    expected = truth(store, image, disk)
    bad = ["500", "drop"] if everything else ["noise", "short", "500", "drop", "zeros"]
    web.faults = [*[""] * 8, *bad]
    web.everything = everything
    node = start_node(web.url)
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        found = digests(tree_of(fd))
        wrong = {name: what for name, what in found.items() if what != expected[name]}
        assert set(wrong.values()) <= {f"errno {errno.EIO}"}, "three lies in a row about one chunk are an error"
        assert len(wrong) <= len(expected) // 2
        assert node.ask("status")["store"]["failures"] > 0


def test_a_server_that_lies_always_gives_errors_and_no_zeros(
    store: ImageStore, disk: Path, web: Served, start_node: StartNode
) -> None:
    image = make_image(store, "one", files=4, largest=60_000)
    node = start_node(web.url, OPENDSEC_STORE_TIMEOUT="1")
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        for fault in ("zeros", "short", "whole", "hang"):
            web.faults = [fault]
            assert set(digests(tree_of(fd)).values()) == {f"errno {errno.EIO}"}, fault
            time.sleep(GIVEN_UP_S)  # else the next reads fail because these have waited in vain
        web.faults = [""]
        web.release.set()
        assert digests(tree_of(fd)) == truth(store, image, disk)


def test_an_answer_without_an_end_is_cut_where_it_was_to_end(store: ImageStore, web: Served) -> None:
    """Else a lying server fills the memory of the node."""
    image = make_image(store, "one", files=2)
    data = image.layers[0].data
    assert data is not None
    web.everything, web.faults = True, ["endless"]
    files = open_files(web.url, attempt_s=600.0)
    assert files.read(data_name(data.digest), 65_536, 65_536) == bytes(65_536)
    with pytest.raises(OSError, match="more than 100 bytes"):
        files.read_whole(table_name(data.digest), most=100)
    assert web.bytes_sent < 100 << 20


def test_damaged_metadata_is_not_mounted(store: ImageStore, web: Served, start_node: StartNode) -> None:
    image = make_image(store, "one", files=4)
    path = store.blob_path(image.layers[0].mounted.digest)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    node = start_node(web.url)
    with node.mounts() as layers, pytest.raises(DigestMismatchError, match="metadata"):
        layers.acquire(image)
    assert list((node.state_dir / "cache/metadata").iterdir()) == []


def test_s3(
    store: ImageStore, disk: Path, s3: Mapping[str, str], start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(store, "team/one", files=20)
    expected = truth(store, image, disk)
    monkeypatch.setattr(packs, "LEAST_METADATA_BYTES", 1)
    for key, value in s3.items():
        monkeypatch.setenv(key, value)
    done = sync_images(store, ["team/one"], "s3://images/stores/a")
    assert done.images == ("team/one",)
    assert done.sent_bytes > image.layers[0].size_bytes
    assert sync_images(store, ["team/one"], "s3://images/stores/a").sent_bytes == 0
    remote = RemoteStore(open_files("s3://images/stores/a"))
    assert remote.names() == ["team/one"]
    assert remote.get("team/one") == image
    assert packs.read_metadata(remote.files, image.layers[0]) is not None
    shutil.rmtree(store.root / "data")
    node = start_node("s3://images/stores/a", **s3)
    with node.mounts() as layers:
        (fd,) = layers.acquire(image)
        assert digests(tree_of(fd)) == expected
        assert node.ask("status")["store"]["failures"] == 0
        layers.unmount_all()
    node.stop()
    with pytest.raises(ImageNotFoundError):
        remote.get("other")
    make_image(other := ImageStore(disk / "other"), "team/one", files=2, seed=5)
    with pytest.raises(ConflictError, match="other content"):
        sync_images(other, ["team/one"], "s3://images/stores/a")
    assert remote.get("team/one") == image
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    unreachable = RemoteStore(open_files("s3://images/stores/a"), patience_s=0.3)
    with pytest.raises(NodeError, match="s3://images/stores/a"):
        unreachable.get("team/one")


def test_sync_to_a_directory(store: ImageStore, disk: Path) -> None:
    """An image that refers to others by name and by digest; a damaged layer stays where it is."""
    base = make_image(store, "base", files=3)
    with store.staging() as work:
        (work / "tree").mkdir()
        (work / "tree" / "own").write_text("own")
        layer = make_layer(store, work, work / "tree", role=LayerRole.WORKSPACE)
        store.publish("top", layers=[layer], config=ImageConfig(), base="base")
        store.publish("fixed", layers=[layer], config=ImageConfig(), base=pinned(base), replace=True)
    done = sync_images(store, ["top", "fixed"], str(disk / "copy"))
    copy = ImageStore(disk / "copy")
    assert done.images == ("base", "top", pinned(base), "fixed")
    for name in ("top", "fixed"):
        assert copy.compose(name).layers == store.compose(name).layers
    assert truth(copy, base, disk) == truth(store, base, disk)
    again = sync_images(store, ["top", "fixed"], str(disk / "copy"))
    assert again.sent_bytes == 0
    data = base.layers[0].data
    assert data is not None
    store.data_path(data.digest).chmod(0o644)
    with store.data_path(data.digest).open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(DigestMismatchError, match="damaged in this node"):
        sync_images(store, ["top"], str(disk / "third"))
    assert ImageStore(disk / "third").names() == []
    with pytest.raises(UnsupportedError, match="plain HTTP"):
        sync_images(store, ["top"], "http://127.0.0.1:9/")
