"""What is told about images: right at once after every change, read once, and one damaged image hides no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from opendsec.errors import ImageNotFoundError
from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.model.image_view import StartCost
from opendsec.store.catalogue import Catalogue
from opendsec.store.images import ImageStore
from opendsec.store.loading.remote import RemoteStore
from opendsec.store.loading.sources import open_files


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def publish(
    store: ImageStore,
    name: str,
    *contents: str,
    role: LayerRole = LayerRole.BASE,
    base: str = "",
    toolkits: Sequence[str] = (),
) -> Image:
    """Layers of one file each; the same content is the same layer."""
    with store.staging() as work:
        layers = []
        for number, content in enumerate(contents):
            (work / str(number)).write_text(content)
            layers.append(store.stage_layer(work / str(number), role=role))
        return store.publish(
            name, layers=layers, config=ImageConfig(), base=base, toolkits=toolkits, source="test", replace=True
        )


def test_pages_are_by_name_and_go_on_where_the_last_ended(store: ImageStore) -> None:
    for name in ("b/2", "a", "b/1", "c"):
        publish(store, name, name)
    catalogue = Catalogue(store)
    first, cursor = catalogue.page(limit=3)
    assert ([one.name for one in first], cursor) == (["a", "b/1", "b/2"], "b/2")
    rest, end = catalogue.page(limit=3, after=cursor)
    assert ([one.name for one in rest], end) == (["c"], "")
    assert [one.name for one in catalogue.page(limit=9, prefix="b/")[0]] == ["b/1", "b/2"]
    assert catalogue.page(limit=4)[1] == ""


def test_sizes_and_what_is_shared(store: ImageStore) -> None:
    publish(store, "base", "12345", "123")
    publish(store, "same", "12345")
    publish(store, "rg", "1234567", role=LayerRole.TOOLKIT)
    publish(store, "task", "12", role=LayerRole.WORKSPACE, base="base", toolkits=["rg"])
    told = {one.name: one for one in Catalogue(store).page(limit=9)[0]}
    assert (told["base"].size_bytes, told["base"].shared_bytes, told["base"].layer_count) == (8, 8, 2)
    assert (told["rg"].size_bytes, told["rg"].shared_bytes, told["rg"].roles) == (7, 7, (LayerRole.TOOLKIT,))
    assert (told["task"].size_bytes, told["task"].shared_bytes) == (2, 0)
    assert (told["task"].base, told["task"].toolkits) == ("base", ("rg",))


def test_details_follow_references(store: ImageStore) -> None:
    base, rg = publish(store, "base", "12345"), publish(store, "rg", "1234567", role=LayerRole.TOOLKIT)
    task = publish(store, "task", "12", role=LayerRole.WORKSPACE, base="base", toolkits=["rg"])

    def cost(image: Image) -> StartCost:
        return StartCost(read_bytes=len(image.layers), of_bytes=14)

    details = Catalogue(store, start_cost=cost).details("task")
    assert (details.size_bytes, details.start_size_bytes, details.shared_bytes) == (2, 14, 12)
    assert [(one.layer.digest, one.images) for one in details.start_layers] == [
        (base.layers[0].digest, 2),
        (task.layers[0].digest, 1),
        (rg.layers[0].digest, 2),
    ]
    assert details.start_digest == store.compose("task").digest
    assert [part.name for part in details.parts] == ["base", "task", "rg"]
    assert details.start_cost == StartCost(read_bytes=3, of_bytes=14)
    assert Catalogue(store).details("base").used_by == ("task",)
    assert Catalogue(store).details(f"rg@{rg.digest}").used_by == ("task",)
    with pytest.raises(ImageNotFoundError):
        Catalogue(store).details("nope")


def test_a_pin_counts_for_what_it_names_only(store: ImageStore) -> None:
    old = publish(store, "base", "old")
    publish(store, "task", "t", base=f"base@{old.digest}")
    publish(store, "base", "new")
    catalogue = Catalogue(store)
    assert catalogue.details("base").used_by == ()
    assert catalogue.details(f"base@{old.digest}").used_by == ("task",)
    assert catalogue.details(f"base@{old.digest}").start_layers[0].images == 1
    assert catalogue.details("base").start_layers[0].images == 1


def test_every_change_is_told_at_once(store: ImageStore) -> None:
    catalogue = Catalogue(store)
    assert catalogue.page(limit=9) == ((), "")
    publish(store, "x", "1")
    assert [one.size_bytes for one in catalogue.page(limit=9)[0]] == [1]
    publish(store, "x", "22")
    assert [(one.size_bytes, one.shared_bytes) for one in catalogue.page(limit=9)[0]] == [(2, 0)]
    publish(store, "y", "22")
    assert [one.shared_bytes for one in catalogue.page(limit=9)[0]] == [2, 2]
    ImageStore(store.root).remove("x")
    assert [(one.name, one.shared_bytes) for one in catalogue.page(limit=9)[0]] == [("y", 0)]


def test_what_is_known_is_not_read_again(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = Catalogue(store)
    for name in "abc":
        publish(store, name, name)
    catalogue.page(limit=9)
    read: list[str] = []
    get = ImageStore.get

    def noted(self: ImageStore, name: str) -> Image:
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(ImageStore, "get", noted)
    catalogue.page(limit=9)
    assert read == []
    publish(store, "b", "other")
    read.clear()
    assert len(catalogue.page(limit=9)[0]) == 3
    assert read == ["b"]


def test_a_damaged_image_is_told_and_hides_no_other(store: ImageStore) -> None:
    for name in ("a", "b", "c"):
        publish(store, name, name)
    (store.root / "tags/b").unlink()
    (store.root / "tags/b").write_bytes(b"{not json")
    told = Catalogue(store).page(limit=9)[0]
    assert [(one.name, bool(one.problem)) for one in told] == [("a", False), ("b", True), ("c", False)]
    assert "tag of image 'b' is damaged" in told[1].problem


def test_an_image_that_refers_to_what_is_missing_says_so(store: ImageStore) -> None:
    publish(store, "base", "b")
    publish(store, "task", "t", base="base")
    (store.root / "tags/base").unlink()
    details = Catalogue(store).details("task")
    assert "image 'task' needs 'base'" in details.problem
    assert (details.size_bytes, details.start_layers, details.start_digest) == (1, (), "")


def test_a_circle_ends(store: ImageStore) -> None:
    publish(store, "a", "a")
    publish(store, "b", "b", base="a")
    publish(store, "a", "a", base="b")
    details = Catalogue(store).details("a")
    assert "circle" in details.problem


def test_a_remote_store_is_told_without_what_is_not_known(store: ImageStore) -> None:
    base = publish(store, "base", "12345")
    publish(store, "rg", "1234567", role=LayerRole.TOOLKIT)
    publish(store, "task", "12", role=LayerRole.WORKSPACE, base="base", toolkits=["rg"])
    (store.root / "tags/torn").write_bytes(b"{")
    remote = Catalogue(RemoteStore(open_files(str(store.root))))
    page, cursor = remote.page(limit=3)
    assert [(one.name, one.size_bytes, one.shared_bytes) for one in page] == [
        ("base", 5, None),
        ("rg", 7, None),
        ("task", 2, None),
    ]
    [torn] = remote.page(limit=3, after=cursor)[0]
    assert (torn.name, bool(torn.problem)) == ("torn", True)
    details, known = remote.details("task"), Catalogue(store).details("task")
    assert (details.start_digest, details.parts, details.layers) == (known.start_digest, known.parts, known.layers)
    assert (details.shared_bytes, details.used_by_count, details.start_layers[0].images) == (None, None, None)
    assert remote.summary("base").digest == base.digest
    with pytest.raises(ImageNotFoundError):
        remote.details("nope")
