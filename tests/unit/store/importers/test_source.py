"""What the SOURCE argument of `image import` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.store.importers.source import Source, SourceKind, parse_source


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout/oci-layout").touch()
    (tmp_path / "file.tar").touch()
    (tmp_path / "oci:odd").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind", "path", "ref"),
    [
        ("tree", SourceKind.DIRECTORY, "tree", ""),
        ("layout", SourceKind.OCI, "layout", ""),
        ("file.tar", SourceKind.TAR, "file.tar", ""),
        ("dir:layout", SourceKind.DIRECTORY, "layout", ""),
        ("tar:file.tar", SourceKind.TAR, "file.tar", ""),
        ("oci:layout", SourceKind.OCI, "layout", ""),
        ("oci:layout:v1", SourceKind.OCI, "layout", "v1"),
        ("oci:layout:host:5000/name:tag", SourceKind.OCI, "layout", "host:5000/name:tag"),
        ("oci:layout:sha256:abc", SourceKind.OCI, "layout", "sha256:abc"),
        ("./oci:odd", SourceKind.DIRECTORY, "oci:odd", ""),
    ],
)
@pytest.mark.usefixtures("place")
def test_meant(text: str, kind: SourceKind, path: str, ref: str) -> None:
    assert parse_source(text) == Source(kind=kind, path=Path(path), ref=ref)


@pytest.mark.parametrize(
    "text", ["gone", "", "oci:gone", "oci:gone:ref", "tar:tree", "dir:file.tar", "oci:", "docker://x"]
)
@pytest.mark.usefixtures("place")
def test_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_source(text)
    assert caught.value.detail["field"] == "source"
    assert "oci:DIR" in caught.value.remedy


def test_written_as_it_is_read(place: Path) -> None:
    for text in ("dir:tree", "tar:file.tar", "oci:layout", "oci:layout:v1"):
        assert str(parse_source(text)) == text
    assert place.is_dir()
