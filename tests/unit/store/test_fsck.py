"""Checking a store: every kind of damage is found and named with the images it touches; repair loses nothing good."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.errors import ConflictError
from opendsec.model.image import Image, ImageConfig, LayerRole
from opendsec.store import fsck
from opendsec.store.compose import pinned
from opendsec.store.fsck import Checked, Fault, Repair, check
from opendsec.store.gc import keeping
from opendsec.store.images import ImageStore
from opendsec.store.layout import layer_files, manifest_file
from opendsec.store.progress import Progress

DATA = b"".join(bytes([number]) * 65_536 for number in range(3)) + b"end"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def publish(
    store: ImageStore, name: str, data: bytes = DATA, *, base: str = "", role: LayerRole = LayerRole.BASE
) -> Image:
    with store.staging() as work:
        (work / "meta").write_bytes(b"meta " + data[:9])
        (work / "data").write_bytes(data)
        layer = store.stage_layer(work / "meta", work / "data", role=role)
        return store.publish(name, layers=[layer], config=ImageConfig(), base=base)


def alter(path: Path, content: bytes | None = None) -> None:
    """Other bytes of the same length, unless told."""
    old = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(bytes([old[0] ^ 1]) + old[1:] if content is None else content)


def faults(checked: Checked) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.fault.value, one.file, one.images) for one in checked.findings]


def everything(store: ImageStore) -> dict[str, bytes]:
    return {
        str(path.relative_to(store.root)): path.read_bytes()
        for path in store.root.rglob("*")
        if path.is_file() and not {"staging", "claims"} & set(path.parts) and not path.name.endswith("lock")
    }


def test_a_good_store_is_sound_and_nothing_is_changed(store: ImageStore) -> None:
    publish(store, "a")
    publish(store, "b", b"other", base="a")
    publish(store, "tool", b"tool", role=LayerRole.TOOLKIT)
    publish(store, "nameless", b"nameless")
    store.remove("nameless")
    before = everything(store)
    told: list[Progress] = []
    checked = check(store, repair=True, on_progress=told.append)
    assert (checked.sound, checked.findings, checked.images, checked.files) == (True, (), 3, 16)
    assert told[-1].done == told[-1].total
    assert everything(store) == before


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("cut", [False, True])
def test_damage_to_each_file_of_a_layer_is_found_and_mended(store: ImageStore, number: int, cut: bool) -> None:
    image = publish(store, "a")
    publish(store, "above", b"above", base="a")
    publish(store, "pinning", b"pinning", base=pinned(image))
    publish(store, "other", b"other")
    before = everything(store)
    file = layer_files(image.layers[0])[number]
    alter(store.root / file, before[file][:-1] if cut else None)
    assert check(store, quick=True).sound is not cut
    checked = check(store)
    assert faults(checked) == [("damaged", file, ("a", "above", "pinning"))]
    if file.startswith("data/") and not cut:
        assert "1 of its 4 chunks" in checked.findings[0].sentence
    repaired = check(store, repair=True)
    is_table = file.startswith("tables/")
    assert repaired.findings[0].repair is (Repair.REBUILT if is_table else Repair.SET_ASIDE)
    assert repaired.sound is is_table
    assert len(list(store.layout.damaged.iterdir())) == 1
    if not is_table:
        assert faults(check(store)) == [("missing", file, ("a", "above", "pinning"))]
    publish(store, "a")  # the same again brings back what was lost
    assert check(store).sound
    assert {name: content for name, content in everything(store).items() if not name.startswith("damaged")} == before


def test_a_missing_table_is_written_again_and_missing_data_is_said(store: ImageStore) -> None:
    image = publish(store, "a")
    assert image.layers[0].data is not None
    table = store.table_path(image.layers[0].data.digest)
    good = table.read_bytes()
    table.unlink()
    checked = check(store, repair=True)
    assert [(one.fault, one.repair) for one in checked.findings] == [(Fault.MISSING, Repair.REBUILT)]
    assert table.read_bytes() == good
    store.data_path(image.layers[0].data.digest).unlink()
    checked = check(store, repair=True)
    assert [(one.fault, one.repair) for one in checked.findings] == [(Fault.MISSING, Repair.NONE)]


def test_table_and_data_damaged_at_once(store: ImageStore) -> None:
    _, data, table = layer_files(publish(store, "a").layers[0])
    alter(store.root / data)
    alter(store.root / table)
    checked = check(store, repair=True)
    assert faults(checked) == [("damaged", data, ("a",)), ("damaged", table, ("a",))]
    assert all(one.repair is Repair.SET_ASIDE for one in checked.findings)
    publish(store, "a")
    assert check(store).sound


def test_damaged_manifests_and_tags(store: ImageStore) -> None:
    image = publish(store, "a")
    publish(store, "b", b"b")
    alter(store.root / manifest_file(image.digest))
    alter(store.layout.tag("b"), b"{")
    publish(store, "c", b"c")
    checked = check(store, repair=True)
    manifest = manifest_file(image.digest)
    assert faults(checked) == [("damaged", "tags/b", ("b",)), ("damaged", manifest, ("a",))]
    assert faults(check(store)) == [("missing", manifest, ("a",))]
    publish(store, "a")
    publish(store, "b", b"b")
    assert check(store).sound


def test_references_that_lead_nowhere_or_round_in_a_circle(store: ImageStore) -> None:
    publish(store, "a", b"a", base="none")
    publish(store, "b", b"b", base="c")
    publish(store, "c", b"c", base="b")
    checked = check(store)
    assert [(one.fault, one.file) for one in checked.findings] == [(Fault.DANGLING, name) for name in "abc"]
    assert "none" in checked.findings[0].sentence
    assert "circle" in checked.findings[1].sentence
    assert not checked.sound


def test_what_is_not_the_stores_is_said_and_left_alone(store: ImageStore) -> None:
    publish(store, "a")
    for name in ("notes.txt", "blobs/x", "data/sha256/half", "manifests/sha256/x.json"):
        (store.root / name).write_text("mine")
    checked = check(store, repair=True)
    assert {one.file for one in checked.findings} == {
        "notes.txt",
        "blobs/x",
        "data/sha256/half",
        "manifests/sha256/x.json",
    }
    assert all(one.fault is Fault.UNKNOWN and one.repair is Repair.NONE for one in checked.findings)
    assert checked.sound
    assert (store.root / "notes.txt").read_text() == "mine"


def test_a_file_that_cannot_be_read_is_no_damage(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data, _ = layer_files(publish(store, "a").layers[0])

    def fail(*_arguments: object, **_more: object) -> bytes:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr("opendsec.store.fsck.make_table", fail)
    checked = check(store, repair=True)
    assert faults(checked) == [("unreadable", data, ("a",))]
    assert not checked.sound
    assert (store.root / data).exists()


def test_what_others_publish_and_remove_meanwhile_is_no_fault(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "a")
    publish(store, "b", b"other", base="a")
    publish(store, "c", b"damaged tag")
    alter(store.layout.tag("c"), b"damaged")
    listing, compose = fsck._Check._list_content, ImageStore.compose

    def published_late(self: fsck._Check) -> Iterator[fsck.Finding]:
        found = list(listing(self))
        if "late" not in store.names():
            publish(store, "late", b"late")
        yield from found

    def removed_late(self: ImageStore, image: str) -> Image:
        if image == "b" and "b" in store.names():
            store.remove("b")
            store.remove("a")
            store.remove("c")
            publish(store, "c", b"good again")
        return compose(self, image)

    monkeypatch.setattr(fsck._Check, "_list_content", published_late)
    monkeypatch.setattr(ImageStore, "compose", removed_late)
    checked = check(store, repair=True)
    assert [(one.file, one.repair) for one in checked.findings] == [("tags/c", Repair.REBUILT)]
    assert checked.sound
    assert store.get("c").layers, "the good meaning is not set aside"
    assert store.names() == ["c", "late"]


def test_one_at_a_time(store: ImageStore) -> None:
    with keeping(store), pytest.raises(ConflictError):
        check(store)


def test_a_manifest_that_cannot_be_read_ends_no_check(store: ImageStore) -> None:
    publish(store, "good")
    broken = publish(store, "broken", b"other")
    publish(store, "above", b"above", base="broken")
    file = manifest_file(broken.digest)
    store.layout.content(file).unlink()
    store.layout.content(file).mkdir()  # reading it is an OSError
    checked = check(store)
    assert faults(checked) == [("unreadable", file, ("above", "broken")), ("unreadable", "above", ("above",))]
    assert not checked.sound


def test_an_interrupt_does_not_wait_for_the_rest(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        publish(store, f"image-{number}", b"%d" % number)
    began = []

    def slow(*_: object) -> None:
        began.append(time.monotonic())
        time.sleep(0.05)

    def interrupt(_: Progress) -> None:
        if began:
            raise KeyboardInterrupt

    monkeypatch.setattr(fsck, "_check_file", slow)
    with pytest.raises(KeyboardInterrupt):
        check(store, on_progress=interrupt)
    assert len(began) < 60
