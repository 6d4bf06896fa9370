"""The shared /dev, /sys and layers: made once, found again after a crash, given back."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.backends.container_templates import Templates
from opendsec.linux.mount import mountinfo

pytestmark = [pytest.mark.root, pytest.mark.netns]


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ods-", dir="/run") as place:
        yield Path(place) / "templates"


def mounts(root: Path) -> list[str]:
    return [entry.target for entry in mountinfo() if entry.target.startswith(str(root))]


def test_made_found_again_and_given_back(root: Path) -> None:
    first = Templates(root, hostname="box")
    first.open(resolvers=["192.0.2.1"])
    made = mounts(root)
    again = Templates(root, hostname="box")
    again.open(resolvers=["192.0.2.2"])
    assert mounts(root) == made
    assert (root / "online/etc/resolv.conf").read_text() == "nameserver 192.0.2.2\n"
    assert "nameserver" not in (root / "offline/etc/resolv.conf").read_text()
    again.close()
    first.close()
    assert mounts(root) == []


def test_dev_has_the_usual_nodes_and_nothing_of_the_host(root: Path) -> None:
    templates = Templates(root, hostname="box")
    templates.open(resolvers=[])
    try:
        names = set(os.listdir(root / "dev"))
        assert {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "fd", "stdin", "pts", "shm"} <= names
        assert {name for name in names if stat.S_ISBLK((root / "dev" / name).lstat().st_mode)} == set()
        with pytest.raises(OSError, match="Read-only"):
            (root / "dev/new").write_text("")
    finally:
        templates.close()


def test_sys_shows_no_interface_and_no_firmware(root: Path) -> None:
    templates = Templates(root, hostname="box")
    templates.open(resolvers=[])
    try:
        assert [name for name in os.listdir(root / "sys/class/net") if name not in ("lo", "bonding_masters")] == []
        assert os.listdir(root / "sys/firmware") == []
    finally:
        templates.close()
