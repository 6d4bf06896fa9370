"""Leases: what a node has mounted is written down before it is looked for, and goes when it is unmounted."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from opendsec.errors import DiskFullError
from opendsec.model.image import Blob, Layer, LayerRole
from opendsec.store.layout import Layout, layer_files
from opendsec.store.leases import Leases, read_lease, read_leases
from opendsec.store.manifest import digest_of, two_file_layer


def layer(text: str) -> Layer:
    meta = Blob(digest=digest_of(f"meta {text}".encode()), size_bytes=1)
    data = Blob(digest=digest_of(f"data {text}".encode()), size_bytes=2)
    return two_file_layer(meta, data, role=LayerRole.BASE)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    (tmp_path / "nodes").mkdir()
    return Layout(tmp_path)


def test_several_processes_of_one_node_share_one_lease(layout: Layout, tmp_path: Path) -> None:
    first, second = Leases(layout, tmp_path / "mounts"), Leases(layout, tmp_path / "mounts")
    first.take(layer("a"))
    second.take(layer("b"))
    first.take(layer("a"))
    [lease] = read_leases(layout)
    assert lease.files == {*layer_files(layer("a")), *layer_files(layer("b"))}
    second.drop(layer("a").digest)
    assert read_leases(layout)[0].files == set(layer_files(layer("b")))
    first.keep_only([layer("c").digest])
    assert read_leases(layout)[0].files == set()
    second.drop_all()
    first.drop_all()
    assert read_leases(layout) == []


def test_other_mount_roots_have_leases_of_their_own(layout: Layout, tmp_path: Path) -> None:
    Leases(layout, tmp_path / "one").take(layer("a"))
    Leases(layout, tmp_path / "two").take(layer("a"))
    assert len(read_leases(layout)) == 2


def test_names_that_are_no_content_are_never_believed(layout: Layout) -> None:
    (layout.nodes / "x.json").write_text('{"schema": 1, "host": "h", "layers": {"a": ["../../etc/passwd", "tags/x"]}}')
    assert read_leases(layout)[0].files == set()


def test_a_lease_of_another_kind_is_refused(layout: Layout) -> None:
    (layout.nodes / "x.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match="is no lease"):
        read_leases(layout)


def test_on_a_full_disk_the_old_one_stays(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(layout, tmp_path / "mounts")
    leases.take(layer("a"))

    def full(*_arguments: object, **_more: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFullError):
        leases.take(layer("b"))
    found = read_lease(leases.file)
    assert found is not None
    assert list(found.layers) == [layer("a").digest]
    assert [path.name for path in layout.nodes.iterdir()] == [leases.file.name]
