"""The store: names appear whole or not at all, the same content is kept once, and nothing is left over."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from opendsec.errors import ConflictError, ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.store import images
from opendsec.store.gc import collect
from opendsec.store.images import ImageStore

CONFIG = ImageConfig(
    env={"B": "2", "A": "1 'x\" \udce9"}, workdir="/w d", user="u:g", cmd=("a b", ""), labels={"l": "v"}
)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store", clock=lambda: 1234.5)


def publish(
    store: ImageStore, name: str, *contents: bytes, config: ImageConfig = CONFIG, replace: bool = False
) -> Image:
    with store.staging() as work:
        layers = []
        for number, content in enumerate(contents):
            (work / str(number)).write_bytes(content)
            layers.append(store.stage_layer(work / str(number)))
        return store.publish(name, layers=layers, config=config, source="test", replace=replace)


def files(store: ImageStore) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}


def test_what_is_published_comes_back_exactly(store: ImageStore) -> None:
    published = publish(store, "a/b:c@d", b"one", b"two")
    assert ImageStore(store.root).get("a/b:c@d") == published
    assert list(published.config.env.items()) == list(CONFIG.env.items())
    assert published.created_at == 1234.5
    assert [store.blob_path(layer.digest).read_bytes() for layer in published.layers] == [b"one", b"two"]
    assert [layer.size_bytes for layer in published.layers] == [3, 3]


def test_files_are_immutable_and_named_by_their_digest(store: ImageStore) -> None:
    publish(store, "x", b"bytes")
    [blob] = (store.root / "blobs/sha256").iterdir()
    assert blob.stat().st_mode & 0o777 == 0o444
    assert blob.name == "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9"


def test_same_content_same_digest_whoever_and_whenever(store: ImageStore, tmp_path: Path) -> None:
    other = ImageStore(tmp_path / "other", clock=lambda: 99.0)
    assert publish(store, "x", b"1").digest == publish(other, "y", b"1").digest
    assert publish(store, "x2", b"1").digest != publish(store, "x3", b"1", config=ImageConfig()).digest
    assert len(list((store.root / "blobs/sha256").iterdir())) == 1


def test_longest_name_with_slashes(store: ImageStore) -> None:
    name = "a/" * 127 + "b"
    publish(store, name, b"1")
    assert [image.name for image in store.list()] == [name]


def content(store: ImageStore) -> set[str]:
    """All but locks and records."""
    kept = ("tags/", "blobs/", "data/", "tables/", "manifests/", "staging/", "condemned/")
    return {name for name in files(store) if name.startswith(kept)}


def test_list_is_sorted_and_remove_collects_only_what_nobody_needs(store: ImageStore) -> None:
    publish(store, "b", b"shared", b"only b")
    publish(store, "a", b"shared")
    assert [image.name for image in store.list()] == ["a", "b"]
    store.remove("b")
    assert [image.name for image in store.list()] == ["a"]
    assert len(content(store)) == len({"tag", "manifest of a", "manifest of b", "shared", "only b"})
    collect(store, grace_s=0)
    assert len(content(store)) == len({"tag", "manifest", "blob"})
    store.remove("a")
    collect(store, grace_s=0)
    assert content(store) == set()


def test_unknown_and_impossible_names(store: ImageStore) -> None:
    for action in (store.get, store.remove):
        with pytest.raises(ImageNotFoundError, match="no image 'nope'"):
            action("nope")
    for name in ("../../etc/passwd", "", "a b", "/abs", "x" * 256, "a//b", ".hidden"):
        with pytest.raises(InvalidSpecError):
            store.get(name)
        with pytest.raises(InvalidSpecError):
            publish(store, name, b"1")
    assert files(store) == {"lock"}


def test_blob_path_is_never_a_foreign_path(store: ImageStore) -> None:
    for digest in ("sha256:../../x", "sha256:" + "A" * 64, "md5:" + "0" * 32, "", "sha256:" + "0" * 64 + "\n"):
        with pytest.raises(ImageInvalidError, match="not a sha256 digest"):
            store.blob_path(digest)


def test_a_name_changes_its_meaning_only_on_request(store: ImageStore) -> None:
    first = publish(store, "x", b"1")
    assert publish(store, "x", b"1") == first
    with pytest.raises(ConflictError, match="exists with other content"):
        publish(store, "x", b"2")
    assert store.get("x") == first
    second = publish(store, "x", b"2", replace=True)
    assert store.get("x") == second
    collect(store, grace_s=0)
    assert len(list((store.root / "blobs/sha256").iterdir())) == 1


def test_layers_already_in_the_store_can_be_used_again(store: ImageStore) -> None:
    layer = publish(store, "x", b"1").layers[0]
    image = store.publish("y", layers=[layer], config=ImageConfig())
    assert image.layers == (layer,)
    missing = Layer(digest="sha256:" + "0" * 64, size_bytes=1, role=LayerRole.TOOLKIT)
    with pytest.raises(ImageInvalidError, match="is not in the store"):
        store.publish("z", layers=[missing], config=ImageConfig())
    assert [image.name for image in store.list()] == ["x", "y"]


@pytest.mark.parametrize("step", ["link_into", "write_synced", "sync_directory"])
def test_an_error_at_any_step_leaves_nothing(store: ImageStore, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(images, step, fail)
    with pytest.raises(OSError, match="Input/output"):
        publish(store, "x", b"1")
    monkeypatch.undo()
    assert store.list() == []
    assert not list((store.root / "staging").iterdir())
    collect(store, grace_s=0)
    assert content(store) == set()


def test_damaged_manifest_is_named(store: ImageStore) -> None:
    image = publish(store, "x", b"1")
    manifest = store.root / "manifests/sha256" / f"{image.digest[7:]}.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes().replace(b"/w d", b"/w e"))
    with pytest.raises(ImageInvalidError, match="manifest of image 'x'"):
        store.get("x")


def _in_process(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def _stall(root: Path, step: str, ready: Connection) -> None:
    """Publish, and stand still for ever just before the given step."""

    def wait(*_args: object, **_more: object) -> None:
        ready.send(True)
        signal.pause()

    setattr(images, step, wait)
    publish(ImageStore(root), "x", b"1" * 100)


@pytest.mark.parametrize("step", ["sync_file", "link_into", "write_synced", "sync_directory"])
def test_kill_at_any_step_leaves_nothing_for_the_next_process(tmp_path: Path, step: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = _in_process(_stall, tmp_path / "store", step, theirs)
    assert ours.poll(5)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    process.close()
    ours.close()
    theirs.close()
    store = ImageStore(tmp_path / "store")
    assert store.list() == []
    assert not list((store.root / "staging").iterdir())
    collect(store, grace_s=0)
    assert content(store) == set()
    publish(store, "x", b"2")


def test_a_live_process_keeps_its_staging(store: ImageStore) -> None:
    with store.staging() as work:
        (work / "half").write_text("")
        ImageStore(store.root)
        assert (work / "half").exists()
    assert not work.exists()


def _publish_many(root: Path, seed: int) -> None:
    store = ImageStore(root)
    for round_number in range(5):
        publish(store, f"own-{seed}", b"shared", str(round_number).encode(), replace=True)
        publish(store, "common", b"shared", replace=True)
        store.remove(f"own-{seed}")


def test_many_publishers_and_removers_at_once(tmp_path: Path) -> None:
    processes = [_in_process(_publish_many, tmp_path / "store", seed) for seed in range(4)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    store = ImageStore(tmp_path / "store")
    assert [image.name for image in store.list()] == ["common"]
    collect(store, grace_s=0)
    assert store.blob_path(store.get("common").layers[0].digest).read_bytes() == b"shared"
    assert len(list((store.root / "blobs/sha256").iterdir())) == 1
