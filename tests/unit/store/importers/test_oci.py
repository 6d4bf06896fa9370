"""Finding the image in a layout: nested indexes, versions, kinds, and absurd JSON. No root needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.oci_layout import INDEX, MANIFEST, LayoutMaker, file, make_layout, tar_of

from opendsec.errors import DigestMismatchError, ImageInvalidError
from opendsec.store.importers.limits import Limits
from opendsec.store.importers.oci import Layout, OciImage
from opendsec.store.importers.oci_config import Platform


def found(root: Path, ref: str = "", *, limits: Limits | None = None, machine: str = "x86_64") -> OciImage:
    return Layout(root, limits=limits or Limits()).find(ref, platform=Platform.of(machine))


def test_nested_indexes_and_platforms(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    platforms = []
    for architecture in ("amd64", "arm64"):
        image = maker.image([tar_of([file("f")])], config={"User": architecture}, architecture=architecture)
        platforms.append({**image, "platform": {"os": "linux", "architecture": architecture}})
    attestation = {**platforms[0], "platform": {"os": "unknown", "architecture": "unknown"}}
    inner = maker.json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*platforms, attestation]}, INDEX)
    other = maker.image([tar_of([file("g")])], config={"User": "other"})
    maker.index([maker.tagged(inner, "multi"), maker.tagged(other, "single")])
    assert found(maker.root, "multi").config.user == "amd64"
    assert found(maker.root, "multi", machine="aarch64").config.user == "arm64"
    assert found(maker.root, "single").config.user == "other"
    with pytest.raises(ImageInvalidError, match="several images fit"):
        found(maker.root)


def test_indexes_without_end_are_refused(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    descriptor = maker.image([])
    for _ in range(20):
        descriptor = maker.json({"schemaVersion": 2, "manifests": [descriptor]}, INDEX)
    maker.index([descriptor])
    with pytest.raises(ImageInvalidError, match="nested deeper"):
        found(maker.root)


def test_a_changed_manifest_is_a_digest_mismatch(tmp_path: Path) -> None:
    root = make_layout(tmp_path / "layout", [[file("f")]])
    [entry] = json.loads((root / "index.json").read_text())["manifests"]
    path = root / "blobs/sha256" / entry["digest"][7:]
    path.write_bytes(path.read_bytes().replace(b"schemaVersion", b"schemaversion"))
    with pytest.raises(DigestMismatchError):
        found(root)


def test_a_wrong_size_is_a_digest_mismatch(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    image = maker.image([])
    maker.index([{**image, "size": image["size"] + 1}])
    with pytest.raises(DigestMismatchError):
        found(maker.root)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("oci-layout", "{}", "version None"),
        ("oci-layout", '{"imageLayoutVersion":"2"}', "version '2'"),
        ("index.json", "[]", "not a JSON object"),
        ("index.json", "{", "not JSON"),
        ("index.json", "[" * 100_000, "not JSON"),
        ("index.json", "{}", "manifests is not a list"),
        ("index.json", " " * 2000, "more than 1000 bytes"),
    ],
)
def test_broken_layouts(tmp_path: Path, name: str, content: str, words: str) -> None:
    root = make_layout(tmp_path / "layout", [[file("f")]])
    (root / name).write_text(content)
    limits = Limits(max_json_bytes=1000) if words.startswith("more") else Limits()
    with pytest.raises(ImageInvalidError, match=words):
        found(root, limits=limits)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    root = make_layout(tmp_path / "layout", [[file("f")]])
    (root / "index.json").unlink()
    with pytest.raises(ImageInvalidError, match=r"index\.json is missing"):
        found(root)


def test_a_fifo_in_place_of_a_blob_does_not_hang(tmp_path: Path) -> None:
    import os

    root = make_layout(tmp_path / "layout", [[file("f")]])
    (root / "index.json").unlink()
    os.mkfifo(root / "index.json")
    with pytest.raises(ImageInvalidError, match="not a regular file"):
        found(root)


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    maker.index([maker.image([b"x"], media_type="application/vnd.oci.image.layer.v1.tar+encrypted")])
    with pytest.raises(ImageInvalidError, match="layer 1: the media type"):
        found(maker.root)
    chart = maker.json(
        {"schemaVersion": 2, "config": maker.json({}, "application/vnd.cncf.helm"), "layers": []}, MANIFEST
    )
    maker.index([chart])
    with pytest.raises(ImageInvalidError, match="is not the configuration of an image"):
        found(maker.root)


def test_an_index_that_calls_itself_a_manifest(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    image = maker.image([])
    maker.index([{**image, "mediaType": INDEX}])
    with pytest.raises(ImageInvalidError, match="calls itself"):
        found(maker.root)


def test_too_many_layers(tmp_path: Path) -> None:
    maker = LayoutMaker(tmp_path / "layout")
    maker.index([maker.image([tar_of([file("f")])] * 4)])
    with pytest.raises(ImageInvalidError, match="4 layers, at most 3"):
        found(maker.root, limits=Limits(max_layers=3))
