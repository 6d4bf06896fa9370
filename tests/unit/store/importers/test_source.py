"""What the SOURCE argument of `image import` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.store.importers.source import Source, SourceKind, default_name, parse_source


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
        ("file.tar", SourceKind.ARCHIVE, "file.tar", ""),
        ("dir:layout", SourceKind.DIRECTORY, "layout", ""),
        ("tar:file.tar", SourceKind.TAR, "file.tar", ""),
        ("oci:layout", SourceKind.OCI, "layout", ""),
        ("oci:layout:v1", SourceKind.OCI, "layout", "v1"),
        ("oci:layout:host:5000/name:tag", SourceKind.OCI, "layout", "host:5000/name:tag"),
        ("oci:layout:sha256:abc", SourceKind.OCI, "layout", "sha256:abc"),
        ("./oci:odd", SourceKind.DIRECTORY, "oci:odd", ""),
        ("oci-archive:file.tar", SourceKind.OCI_ARCHIVE, "file.tar", ""),
        ("oci-archive:file.tar:v1", SourceKind.OCI_ARCHIVE, "file.tar", "v1"),
        ("docker-archive:file.tar:host:5000/name:tag", SourceKind.DOCKER_ARCHIVE, "file.tar", "host:5000/name:tag"),
        ("docker://host.x/a/b_c:1.2", SourceKind.REGISTRY, ".", "host.x/a/b_c:1.2"),
        ("docker://localhost/x", SourceKind.REGISTRY, ".", "localhost/x"),
        ("docker://h:5000/x@sha256:" + "0" * 64, SourceKind.REGISTRY, ".", "h:5000/x@sha256:" + "0" * 64),
    ],
)
@pytest.mark.usefixtures("place")
def test_meant(text: str, kind: SourceKind, path: str, ref: str) -> None:
    assert parse_source(text) == Source(kind=kind, path=Path(path), ref=ref)


@pytest.mark.parametrize(
    "text",
    [
        "gone",
        "",
        "oci:gone",
        "oci:gone:ref",
        "tar:tree",
        "dir:file.tar",
        "oci:",
        "docker://x",
        "docker:h.x/y",
        "archive:file.tar",
        "docker://library/python",
        "docker://h.x/UP",
        "docker://h.x/../y",
        "docker://h.x/y --flag",
        "docker://h.x/y@sha256:1",
    ],
)
@pytest.mark.usefixtures("place")
def test_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_source(text)
    assert caught.value.detail["field"] == "source"
    assert "oci:DIR" in caught.value.remedy


def test_written_as_it_is_read(place: Path) -> None:
    said = ("dir:tree", "tar:file.tar", "oci:layout", "oci:layout:v1", "docker-archive:file.tar:x", "docker://h.x/y:1")
    for text in said:
        assert str(parse_source(text)) == text
    assert place.is_dir()


def test_an_image_of_a_registry_has_a_name_of_its_own() -> None:
    assert default_name(parse_source("docker://host:5000/lib/python:3.12")) == "lib/python:3.12"
    assert default_name(parse_source("docker://host:5000/python@sha256:" + "0" * 64)) == "python"
    with pytest.raises(InvalidSpecError, match="only an image of a registry"):
        default_name(Source(kind=SourceKind.OCI))
