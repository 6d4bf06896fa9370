"""A walk sees what os.walk sees, and what it does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from opendsec.store.durable import remove_tree
from opendsec.store.walk import walked


def test_it_is_what_os_walk_gives(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/b/file").touch()
    (tmp_path / "a/link").symlink_to(tmp_path / "e")
    as_links = [(top, [one for one in below if one != "link"]) for top, below, _ in os.walk(tmp_path)]
    assert sorted((top, sorted(below)) for top, below, _ in walked(str(tmp_path))) == sorted(
        (top, sorted(below)) for top, below in as_links
    )
    assert {(top, tuple(names)) for top, _, names in walked(os.fsencode(tmp_path)) if names} == {
        (os.fsencode(tmp_path / "a"), (b"link",)),
        (os.fsencode(tmp_path / "a/b"), (b"file",)),
    }


def test_depth_is_no_obstacle(tmp_path: Path) -> None:
    subprocess.run(["mkdir", "-p", "/".join("d" * 1200)], cwd=tmp_path, check=True, timeout=120)
    assert sum(1 for _ in walked(str(tmp_path))) == 1201
    remove_tree(tmp_path / "d")


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(walked(str(tmp_path / "none")))
