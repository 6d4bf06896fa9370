"""Names without content: nothing is copied, references move on or stay, and what would not start is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.store.test_catalogue import publish

from opendsec.errors import ConflictError, ImageInvalidError, ImageNotFoundError, InvalidSpecError, OpenDSecError
from opendsec.model.image import LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.layout import manifest_file
from opendsec.store.loading.sync import sync_images
from opendsec.store.manifest import Tag, digest_of, encode_tag, tag_file_name
from opendsec.store.tagging import Composition, compose_image, tag_image


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "store")
    publish(made, "base", "base 1", "base 2")
    publish(made, "work", "work", role=LayerRole.WORKSPACE)
    for name in ("rg", "fd"):
        publish(made, name, name, role=LayerRole.TOOLKIT)
    return made


def content(store: ImageStore) -> dict[str, int]:
    """Files of layers, each with its inode: what was copied has another."""
    return {str(path): path.stat().st_ino for path in (store.root / "blobs/sha256").iterdir()}


def test_another_name_means_the_same_image(store: ImageStore) -> None:
    before = content(store)
    tagged = tag_image(store, "stable/base", "base")
    assert tagged.digest == store.get("base").digest
    publish(store, "base", "newer")
    assert store.get("stable/base").digest == tagged.digest
    with pytest.raises(ConflictError):
        tag_image(store, "stable/base", "base")
    assert tag_image(store, "stable/base", "base", replace=True).digest == store.get("base").digest
    assert before.items() <= content(store).items()
    with pytest.raises(ImageNotFoundError):
        tag_image(store, "x", "nope")


def make_old(store: ImageStore, name: str) -> str:
    """Write the manifest of an image as the version before did, of the same content; its digest."""
    image = store.get(name)
    fields = json.loads(store.manifest(image))
    manifest = json.dumps({**fields, "schema": 1}).encode()
    (store.root / manifest_file(digest_of(manifest))).write_bytes(manifest)
    tag = Tag(digest=digest_of(manifest), created_at=image.created_at, source="old")
    (store.root / "tags" / tag_file_name(name)).write_bytes(encode_tag(tag))
    return tag.digest


def test_an_image_of_an_earlier_version_stays_the_same_under_another_name(store: ImageStore, tmp_path: Path) -> None:
    digest = make_old(store, "base")
    assert store.get("base").digest == digest
    assert tag_image(store, "again", "base").digest == digest
    sync_images(store, ["base"], str(tmp_path / "other"))
    assert ImageStore(tmp_path / "other").get("base").digest == digest


def test_a_manifest_of_other_content_is_not_published(store: ImageStore) -> None:
    base = store.get("base")
    with pytest.raises(ImageInvalidError, match="describes other content"):
        store.publish("x", layers=base.layers[:1], config=base.config, manifest=store.manifest(base))
    with pytest.raises(ImageNotFoundError):
        store.get("x")


def test_an_old_meaning_can_be_named_again(store: ImageStore) -> None:
    old = store.get("base")
    tag_image(store, "keep", "base")
    publish(store, "base", "newer")
    tag_image(store, "back", f"base@{old.digest}")
    assert store.get("back").digest == old.digest


def test_a_composed_image_starts_as_if_all_had_been_asked_for(store: ImageStore) -> None:
    before = content(store)
    made = compose_image(store, "task", Composition(base="base", workspace="work", toolkits=("rg", "fd")))
    assert (made.base, made.toolkits, made.layers) == ("base", ("rg", "fd"), store.get("work").layers)
    assert store.compose("task").digest == store.compose("base", workspace="work", toolkits=["rg", "fd"]).digest
    assert content(store) == before


def test_one_new_toolkit_is_in_every_image_that_names_it(store: ImageStore) -> None:
    for number in range(5):
        compose_image(store, f"task{number}", Composition(base="base", workspace="work", toolkits=("rg",)))
    compose_image(store, "fixed", Composition(base="base", toolkits=("rg",), pin=True))
    old, fixed = store.compose("task0"), store.compose("fixed")
    new = publish(store, "rg", "rg 2", role=LayerRole.TOOLKIT)
    for number in range(5):
        assert store.compose(f"task{number}").layers == (*old.layers[:-1], *new.layers)
    assert store.compose("fixed").digest == fixed.digest
    assert store.get("fixed").toolkits[0].startswith("rg@sha256:")


def test_toolkits_of_the_base_are_taken_over_unless_others_are_named(store: ImageStore) -> None:
    compose_image(store, "equipped", Composition(base="base", toolkits=("rg",)))
    assert compose_image(store, "a", Composition(base="equipped", workspace="work")).toolkits == ("rg",)
    assert compose_image(store, "b", Composition(base="equipped", toolkits=())).toolkits == ()


@pytest.mark.parametrize(
    ("wanted", "kind", "field"),
    [
        (Composition(base="nope"), ImageNotFoundError, None),
        (Composition(base="base", workspace="nope"), ImageNotFoundError, None),
        (Composition(base="base", workspace="rg"), InvalidSpecError, "workspace"),
        (Composition(base="base", toolkits=("rg", "nope")), ImageNotFoundError, "toolkits"),
        (Composition(base="base", toolkits=("work",)), InvalidSpecError, "toolkits"),
        (Composition(base="rg"), InvalidSpecError, "image"),
        (Composition(base="new"), ImageNotFoundError, None),
    ],
)
def test_what_would_not_start_is_refused_and_not_published(
    store: ImageStore, wanted: Composition, kind: type[OpenDSecError], field: str | None
) -> None:
    with pytest.raises(kind) as caught:
        compose_image(store, "new", wanted)
    assert caught.value.detail.get("field") == field
    assert "new" not in store.names()


def test_no_image_lies_on_itself(store: ImageStore) -> None:
    compose_image(store, "a", Composition(base="base", toolkits=("rg",)))
    compose_image(store, "b", Composition(base="a", toolkits=("rg",)))
    before = os.listdir(store.root / "manifests/sha256")
    with pytest.raises(InvalidSpecError, match="cannot lie on itself"):
        compose_image(store, "b", Composition(base="b"), replace=True)
    with pytest.raises(ImageInvalidError, match="circle"):
        compose_image(store, "a", Composition(base="b"), replace=True)
    assert sorted(os.listdir(store.root / "manifests/sha256")) == sorted(before)
    grown = compose_image(store, "b", Composition(base="b", toolkits=("fd",), pin=True), replace=True)
    assert len(store.compose("b").layers) == 3
    assert grown.base.startswith("b@sha256:")
