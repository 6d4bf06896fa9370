"""What is known about mkfs.erofs and a tree before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError, ImageInvalidError
from opendsec.store import erofs
from opendsec.store.erofs import TreeFacts, mkfs_environment, mkfs_version, parse_version, tree_facts
from opendsec.store.programs import Ended


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("mkfs.erofs 1.5\nmkfs.erofs: invalid option -- 'V'", (1, 5)),
        ("mkfs.erofs (erofs-utils) 1.8.6\navailable compressors: lz4", (1, 8, 6)),
        ("mkfs.erofs 1.10-g1234", (1, 10)),
        ("something else", (0, 0)),
    ],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_too_old_a_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erofs, "find_program", lambda name: name)
    monkeypatch.setattr(erofs, "run_program", lambda *_args, **_more: Ended(status=0, tail=("mkfs.erofs 1.4",)))
    with pytest.raises(HostCapabilityError, match=r"mkfs\.erofs 1\.4 is older than 1\.5"):
        mkfs_version()


def test_facts_of_a_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    assert tree_facts(tree).size_bytes == 0
    (tree / "one").write_bytes(b"1" * 10)
    os.link(tree / "one", tree / "two")
    (tree / "link").symlink_to("x" * 50)
    for path in (tree / "one", tree / "link", tree):
        os.utime(path, (100, 100.5), follow_symlinks=False)
    assert tree_facts(tree) == TreeFacts(size_bytes=10, newest_mtime_s=100)
    assert mkfs_environment(tree_facts(tree))["SOURCE_DATE_EPOCH"] == "101"


def test_names_that_would_be_cut(tmp_path: Path) -> None:
    (tmp_path / ("x" * 254)).touch()
    tree_facts(tmp_path)
    (tmp_path / ("ü" * 127 + "x")).touch()
    with pytest.raises(ImageInvalidError, match="255 bytes"):
        tree_facts(tmp_path)
