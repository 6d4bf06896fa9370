"""What an export's target means, and what the documents of an exported image say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.store.exporters.compression import Compression, Hashed, compressed
from opendsec.store.exporters.documents import (
    Written,
    WrittenLayer,
    docker_tag,
    encode_config,
    encode_docker_list,
    encode_index,
    encode_manifest,
)
from opendsec.store.exporters.target import Target, TargetKind, parse_target

DIGEST = "sha256:" + "ab" * 32
LAYER = WrittenLayer(
    layer=Layer(digest=DIGEST, size_bytes=1, role=LayerRole.TOOLKIT),
    blob=Written(digest=DIGEST, size_bytes=7),
    diff_id="sha256:" + "cd" * 32,
)


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        ("file", TargetKind.OCI_ARCHIVE, "file"),
        ("./a:b/c", TargetKind.OCI_ARCHIVE, "./a:b/c"),
        ("oci:dir", TargetKind.OCI, "dir"),
        ("oci-archive:x.tar", TargetKind.OCI_ARCHIVE, "x.tar"),
        ("docker-archive:/x.tar", TargetKind.DOCKER_ARCHIVE, "/x.tar"),
    ],
)
def test_targets(text: str, kind: TargetKind, path: str) -> None:
    assert parse_target(text) == Target(kind=kind, path=Path(path))


@pytest.mark.parametrize("text", ["", "oci:", "..", "oci:.", "a/.", "docker://host/name:tag"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="target"):
        parse_target(text)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("debian", "debian:latest"),
        ("debian:12", "debian:12"),
        ("host:5000/a/b", "host:5000/a/b:latest"),
        ("a/b_c.d-e:V1", "a/b_c.d-e:V1"),
        ("Upper", ""),
        ("a@b", ""),
    ],
)
def test_names_for_docker(name: str, tag: str) -> None:
    assert docker_tag(name) == tag


def image(**config: object) -> Image:
    return Image(
        name="n",
        digest=DIGEST,
        layers=(LAYER.layer,),
        config=ImageConfig(**config),  # type: ignore[arg-type]
        created_at=1.0,
    )


def test_the_configuration_says_what_is_said_and_no_more() -> None:
    fields = json.loads(encode_config(image(env={"A": "", "B": "ü"}, cmd=("",), workdir="/w"), [LAYER]))
    assert fields["config"] == {"Env": ["A=", "B=ü"], "Cmd": [""], "WorkingDir": "/w"}
    assert fields["rootfs"]["diff_ids"] == [LAYER.diff_id]
    assert "created" not in fields


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(ImageInvalidError, match="no UTF-8"):
        encode_config(image(labels={"l": "\udc80"}), [LAYER])


def test_the_manifest_keeps_roles() -> None:
    fields = json.loads(encode_manifest(LAYER.blob, [LAYER], Compression.ZSTD))
    (layer,) = fields["layers"]
    assert layer["mediaType"].endswith("tar+zstd")
    assert layer["annotations"] == {"dev.opendsec.layer.role": "toolkit"}
    index = json.loads(encode_index("a/b", LAYER.blob))
    assert index["manifests"][0]["annotations"] == {"org.opencontainers.image.ref.name": "a/b"}
    (docker,) = json.loads(encode_docker_list("Upper", LAYER.blob, [LAYER]))
    assert (docker["RepoTags"], docker["Layers"]) == (None, ["blobs/sha256/" + "ab" * 32])


def test_what_making_pieces_raises_comes_out_of_the_compressor() -> None:
    def pieces() -> object:
        yield b"x" * 100_000
        raise RuntimeError("here")

    for compression in Compression:
        with pytest.raises(RuntimeError, match="here"):
            b"".join(compressed(pieces(), compression))  # type: ignore[arg-type]


def test_both_sides_are_hashed() -> None:
    passing = Hashed(iter((b"a", b"b")))
    assert b"".join(passing) == b"ab"
    assert (passing.size_bytes, passing.digest[:12]) == (2, "sha256:fb8e2")
