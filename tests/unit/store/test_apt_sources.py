"""Mirrors and keys out of the machine's own apt configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import HostCapabilityError
from opendsec.store.apt_sources import collect_keys, keys_named, public_sources, sources_from_index

LISTING = [
    "http://mirror.example/debian/ bookworm main",
    "http://mirror.example/debian/ bookworm main",
    "http://mirror.example/debian/ bookworm contrib",
    "http://mirror.example/debian/ bookworm-updates main",
    "http://mirror.example/security/ bookworm-security main",
    "https://deb.nodesource.com/node_20.x/ nodistro main",
    "http://archive.ubuntu.com/ubuntu/ jammy main",
    "not a line",
]

DEB822 = """Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Signed-By: /keys/mirror.gpg

Types: deb
URIs: https://other.example/
Suites: x
Signed-By: /keys/other.gpg
"""


def test_own_mirrors_of_the_suite_only() -> None:
    assert sources_from_index(LISTING, "bookworm") == [
        "deb http://mirror.example/debian/ bookworm main",
        "deb http://mirror.example/debian/ bookworm-updates main",
        "deb http://mirror.example/security/ bookworm-security main",
    ]
    assert sources_from_index(LISTING, "trixie") == []
    assert sources_from_index(["http://x/ bookworm-updates main"], "bookworm") == []


def test_public_sources() -> None:
    assert public_sources("bookworm") == [
        "deb http://deb.debian.org/debian bookworm main",
        "deb http://deb.debian.org/debian bookworm-updates main",
        "deb http://deb.debian.org/debian-security bookworm-security main",
    ]
    assert public_sources("sid") == ["deb http://deb.debian.org/debian sid main"]


def test_keys_named_for_the_same_address_only() -> None:
    assert keys_named(DEB822, ["http://mirror.example/debian/"]) == ["/keys/mirror.gpg"]
    one_line = (
        'deb [arch=amd64 signed-by="/keys/a b.gpg"] http://a/ x main\ndeb [signed-by=/keys/b.asc] http://b x main\n'
    )
    assert keys_named(one_line, ["http://b/"]) == ["/keys/b.asc"]
    assert keys_named(one_line, ["http://c/"]) == []


def test_keys_are_collected(tmp_path: Path) -> None:
    apt, shared = tmp_path / "apt", tmp_path / "keyrings"
    for directory in (apt / "trusted.gpg.d", apt / "sources.list.d", shared):
        directory.mkdir(parents=True)
    (tmp_path / "mirror.gpg").write_text("mirror")
    (tmp_path / "other.gpg").write_text("other")
    (shared / "debian-archive-keyring.gpg").write_text("debian")
    (shared / "ubuntu-archive-keyring.gpg").write_text("ubuntu")
    (apt / "trusted.gpg.d/t.asc").write_text("trusted")
    (apt / "trusted.gpg.d/README").write_text("no key")
    (apt / "sources.list.d/m.sources").write_text(DEB822.replace("/keys", str(tmp_path)))
    sources = ["deb http://mirror.example/debian bookworm main"]
    keys = collect_keys(sources, tmp_path / "into", apt=apt, debian_keys=shared)
    assert sorted(path.read_text() for path in keys.iterdir()) == ["debian", "mirror", "trusted"]


def test_no_keys_name_the_package(tmp_path: Path) -> None:
    with pytest.raises(HostCapabilityError) as caught:
        collect_keys(public_sources("bookworm"), tmp_path / "into", apt=tmp_path / "a", debian_keys=tmp_path / "b")
    assert caught.value.remedy == "apt-get install debian-archive-keyring"
