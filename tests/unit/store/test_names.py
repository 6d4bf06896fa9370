"""The list of names is what the tags say; a broken or missing one is made anew, and nothing fails for its sake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.store.test_images import publish

from opendsec.store.gc import collect
from opendsec.store.images import ImageStore
from opendsec.store.names import NAMES_FILE, changed


def listed(store: ImageStore) -> list[str]:
    return list(json.loads((store.root / NAMES_FILE).read_bytes()))


def test_a_list_with_and_without_a_name() -> None:
    names = ["b", "d"]
    assert [changed(names, one, present=True) for one in "abcde"] == [
        ["a", "b", "d"],
        ["b", "d"],
        ["b", "c", "d"],
        ["b", "d"],
        ["b", "d", "e"],
    ]
    assert [changed(names, one, present=False) for one in "abcde"] == [["b", "d"], ["d"], ["b", "d"], ["b"], ["b", "d"]]


def test_it_follows_the_names(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    for name in ("team/two", "one", "z.9"):
        publish(store, name)
    assert listed(store) == store.names() == ["one", "team/two", "z.9"]
    publish(store, "one")
    store.remove("team/two")
    assert listed(store) == store.names() == ["one", "z.9"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'["one"'])
def test_a_broken_list_is_made_anew(tmp_path: Path, content: bytes) -> None:
    store = ImageStore(tmp_path / "store")
    publish(store, "one")
    (store.root / NAMES_FILE).write_bytes(content)
    publish(store, "two")
    assert listed(store) == ["one", "two"]


def test_a_collection_mends_what_a_crash_left(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    publish(store, "one")
    (store.root / NAMES_FILE).write_text('["gone"]')
    collect(store)
    assert listed(store) == ["one"]


def test_a_list_that_cannot_be_written_keeps_nobody_from_publishing(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    (store.root / NAMES_FILE).mkdir()
    publish(store, "one")
    assert store.names() == ["one"]
