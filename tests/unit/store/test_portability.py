"""What is asked of a file system is tried, and what it lacks is said and got around."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.model.image import ImageConfig
from opendsec.store.fsck import check
from opendsec.store.images import ImageStore
from opendsec.store.location import open_location, store_directory
from opendsec.store.portability import Offer, probe_directory


def offers(directory: Path) -> dict[str, Offer]:
    found = {one.name: one for one in probe_directory(directory)}
    assert list(directory.iterdir()) == []
    return found


def test_a_local_disk_offers_everything(tmp_path: Path) -> None:
    assert [(name, one.ok) for name, one in offers(tmp_path).items()] == [
        *(("rename", True), ("fsync", True), ("locks", True), ("clock", True), ("links", True))
    ]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_store_without_hard_links_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_arguments: object, **_more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    probed = offers(tmp_path)["links"]
    assert (probed.ok, probed.needed) == (False, False)
    assert errno.errorcode[number] in probed.sentence
    store = ImageStore(tmp_path / "store")
    for name in ("x", "y", "x"):
        with store.staging() as work:
            (work / "meta").write_bytes(b"meta")
            (work / "data").write_bytes(b"data")
            store.publish(name, layers=[store.stage_layer(work / "meta", work / "data")], config=ImageConfig())
    assert [image.name for image in store.list()] == ["x", "y"]
    assert check(store).findings == ()


def test_locks_that_exclude_nobody_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: None)
    probed = offers(tmp_path)["locks"]
    assert (probed.ok, probed.needed, probed.sentence) == (False, True, "flock grants one lock twice")


def test_an_error_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_directory: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("opendsec.store.portability.sync_directory", fail)
    assert offers(tmp_path)["sync"].sentence == "sync does not work there: Invalid argument"


def test_where_the_store_is(tmp_path: Path) -> None:
    assert store_directory("", tmp_path) == tmp_path / "store"
    assert store_directory("/mnt/shared", tmp_path) == Path("/mnt/shared")
    for text in ("relative", "http://host/store", "s3://bucket"):
        with pytest.raises(InvalidSpecError, match="OPENDSEC_STORE"):
            store_directory(text, tmp_path)


def test_trees_stay_on_this_node(tmp_path: Path) -> None:
    store = open_location(str(tmp_path / "shared"), tmp_path / "state")
    with store.scratch() as trees, store.staging() as work:
        assert trees.parent == tmp_path / "state/scratch"
        assert work.parent == tmp_path / "shared/staging"
    assert {path.name for path in (tmp_path / "state/scratch").iterdir()} == {".lock"}
