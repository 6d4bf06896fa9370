"""A composition is made once, and anew at once when any name in it means something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.store.test_catalogue import publish

from opendsec.errors import ImageNotFoundError
from opendsec.model.image import Image, LayerRole
from opendsec.store.images import ImageStore
from opendsec.store.tagging import Composition, compose_image


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "store")
    publish(made, "base", "base")
    publish(made, "rg", "rg", role=LayerRole.TOOLKIT)
    compose_image(made, "task", Composition(base="base", toolkits=("rg",)))
    return made


def test_every_publish_is_seen_by_the_next_lookup(store: ImageStore) -> None:
    other = ImageStore(store.root)
    seen = {store.compose("task").digest}
    for number in range(8):
        publish(other, "rg", f"rg {number}", role=LayerRole.TOOLKIT)
        seen.add(store.compose("task").digest)
        publish(other, "base", f"base {number}")
        seen.add(store.compose("task").digest)
    assert len(seen) == 17


def test_what_has_not_changed_is_not_read_again(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    get = ImageStore.get

    def noted(self: ImageStore, name: str) -> Image:
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(ImageStore, "get", noted)
    fresh = ImageStore(store.root)
    first = fresh.compose("task")
    assert read == ["task", "base", "rg"]
    assert fresh.compose("task") == first
    assert read == ["task", "base", "rg"]


def test_what_is_gone_is_missed_and_what_was_missing_is_found(store: ImageStore) -> None:
    store.compose("task")
    store.remove("rg", force=True)
    with pytest.raises(ImageNotFoundError):
        store.compose("task")
    publish(store, "rg", "again", role=LayerRole.TOOLKIT)
    store.compose("task")
    pin = f"rg@{store.get('rg').digest}"
    store.compose("base", toolkits=[pin])
    store.layout.content(f"manifests/sha256/{store.get('rg').digest[7:]}.json").unlink()
    with pytest.raises(ImageNotFoundError):
        store.compose("base", toolkits=[pin])
