"""What the environment says about loading, and which value is named when it makes no sense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.store.loading.base import LoaderKind
from opendsec.store.loading.settings import default_cache_bytes, read_loading
from opendsec.store.loading.sources import DirectoryFiles, is_remote, open_files

STATE = Path("/state")


@pytest.mark.parametrize(
    ("environment", "kind", "address"),
    [
        ({}, LoaderKind.DIRECT, "/state/store"),
        ({"OPENDSEC_STORE": "/mnt/shared", "OPENDSEC_LOADER": "auto"}, LoaderKind.DIRECT, "/mnt/shared"),
        ({"OPENDSEC_LOADER": "fuse"}, LoaderKind.FUSE, "/state/store"),
        ({"OPENDSEC_STORE": "https://host/store"}, LoaderKind.FUSE, "https://host/store"),
        ({"OPENDSEC_STORE": "s3://bucket/prefix"}, LoaderKind.FUSE, "s3://bucket/prefix"),
        ({"OPENDSEC_STORE": "s3://b", "OPENDSEC_LOADER": "fanotify"}, LoaderKind.FANOTIFY, "s3://b"),
    ],
)
def test_which_loader(environment: Mapping[str, str], kind: LoaderKind, address: str) -> None:
    found = read_loading(environment, state_dir=STATE)
    assert (found.kind, found.address) == (kind, address)


def test_numbers() -> None:
    found = read_loading({"OPENDSEC_CACHE_MB": "70", "OPENDSEC_STORE_TIMEOUT": "9"}, state_dir=STATE)
    assert (found.cache_mb, found.patience_s, found.attempt_s) == (70, 9.0, 3.0)
    assert read_loading({}, state_dir=STATE).cache_mb is None
    waits = [read_loading({"OPENDSEC_START_WAIT_MS": text}, state_dir=STATE).start_wait_s for text in ("", "0", "250")]
    assert waits == [1.0, 0.0, 0.25]
    assert default_cache_bytes(Path("/")) >= 1 << 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENDSEC_LOADER", "magic"),
        ("OPENDSEC_CACHE_MB", "0"),
        ("OPENDSEC_CACHE_MB", "-1"),
        ("OPENDSEC_STORE_TIMEOUT", "soon"),
        ("OPENDSEC_START_WAIT_MS", "-1"),
    ],
)
def test_nonsense_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidSpecError, match=name) as caught:
        read_loading({name: value}, state_dir=STATE)
    assert caught.value.detail["field"] == name


def test_direct_needs_a_file_system() -> None:
    with pytest.raises(InvalidSpecError, match="direct reads mounted file systems"):
        read_loading({"OPENDSEC_STORE": "http://host", "OPENDSEC_LOADER": "direct"}, state_dir=STATE)


def test_addresses(tmp_path: Path) -> None:
    assert isinstance(open_files(str(tmp_path)), DirectoryFiles)
    assert [is_remote(text) for text in ("/a", "http://a", "https://a", "s3://a", "")] == [
        False,
        True,
        True,
        True,
        False,
    ]
    with pytest.raises(InvalidSpecError, match="is no store"):
        open_files("ftp://host/store")
