"""Manifests and tags: canonical, exact, and refused when damaged."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import ImageInvalidError
from opendsec.model.image import Blob, ImageConfig, Layer, LayerRole
from opendsec.store.manifest import (
    Manifest,
    Tag,
    decode_manifest,
    decode_tag,
    encode_manifest,
    encode_tag,
    name_of_tag_file,
    tag_file_name,
    two_file_layer,
)

TEXT = st.text(st.characters(exclude_characters="\0"), max_size=20)
LAYERS = st.lists(
    st.builds(
        Layer,
        digest=st.text("0123456789abcdef", min_size=64, max_size=64).map("sha256:{}".format),
        size_bytes=st.integers(0, 1 << 60),
        role=st.sampled_from(LayerRole),
    ),
    max_size=3,
).map(tuple)
CONFIGS = st.builds(
    ImageConfig,
    env=st.dictionaries(TEXT, TEXT, max_size=4),
    workdir=TEXT,
    user=TEXT,
    entrypoint=st.lists(TEXT, max_size=3).map(tuple),
    cmd=st.lists(TEXT, max_size=3).map(tuple),
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
)


@given(LAYERS, CONFIGS, TEXT, st.lists(TEXT, max_size=3).map(tuple))
def test_round_trip_keeps_everything_and_the_order(
    layers: tuple[Layer, ...], config: ImageConfig, base: str, toolkits: tuple[str, ...]
) -> None:
    manifest = Manifest(layers=layers, config=config, base=base, toolkits=toolkits)
    encoded = encode_manifest(manifest)
    assert decode_manifest(encoded) == manifest
    assert list(decode_manifest(encoded).config.env) == list(config.env)
    assert encode_manifest(decode_manifest(encoded)) == encoded


def test_order_of_env_counts_and_of_labels_does_not() -> None:
    def encoded(**fields: dict[str, str]) -> bytes:
        return encode_manifest(Manifest(layers=(), config=ImageConfig(**fields)))  # type: ignore[arg-type]

    assert encoded(env={"a": "1", "b": "2"}) != encoded(env={"b": "2", "a": "1"})
    assert encoded(labels={"a": "1", "b": "2"}) == encoded(labels={"b": "2", "a": "1"})


@given(st.text(string.ascii_letters + string.digits + "._:/@-", min_size=1, max_size=255))
def test_tag_file_names_are_names_and_come_back(name: str) -> None:
    file_name = tag_file_name(name)
    assert "/" not in file_name
    assert len(file_name) == len(name)
    assert name_of_tag_file(file_name) == name


def test_tags_come_back() -> None:
    tag = Tag(digest="sha256:" + "0" * 64, created_at=1.25, source="oci:/x y\n")
    assert decode_tag(encode_tag(tag), name="x") == tag


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"schema":3}', b'{"schema":1}', b"null"])
def test_damage_is_named(content: bytes) -> None:
    with pytest.raises(ImageInvalidError, match="damaged manifest"):
        decode_manifest(content)
    with pytest.raises(ImageInvalidError, match="tag of image 'x' is damaged"):
        decode_tag(content, name="x")


ONE = Layer(digest="sha256:" + "0" * 64, size_bytes=1)


def test_an_unknown_role_is_damage() -> None:
    fields = json.loads(encode_manifest(Manifest(layers=(ONE,), config=ImageConfig())))
    fields["layers"][0]["role"] = "attic"
    with pytest.raises(ImageInvalidError, match="attic"):
        decode_manifest(json.dumps(fields).encode())


def test_manifests_of_the_first_schema_are_read() -> None:
    fields = json.loads(encode_manifest(Manifest(layers=(ONE,), config=ImageConfig())))
    first = {key: value for key, value in fields.items() if key not in ("base", "toolkits")} | {"schema": 1}
    assert decode_manifest(json.dumps(first).encode()) == Manifest(layers=(ONE,), config=ImageConfig())


def test_a_layer_is_named_by_both_its_files() -> None:
    meta, data = (Blob(digest="sha256:" + digit * 64, size_bytes=5) for digit in "12")
    layer = two_file_layer(meta, data, role=LayerRole.TOOLKIT)
    assert layer.size_bytes == 10
    fields = json.loads(encode_manifest(Manifest(layers=(layer,), config=ImageConfig())))
    fields["layers"][0]["data"]["digest"] = "sha256:" + "3" * 64
    with pytest.raises(ImageInvalidError, match="two files"):
        decode_manifest(json.dumps(fields).encode())


GOOD = json.loads(encode_manifest(Manifest(layers=(), config=ImageConfig())))
ONE_FILE = {"digest": f"sha256:{'a' * 64}", "role": "base"}


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 60_000,
        b"\xff",
        b"null",
        json.dumps(GOOD | {"layers": [ONE_FILE | {"size_bytes": -1}]}).encode(),
        json.dumps(GOOD | {"layers": [ONE_FILE | {"size_bytes": float("inf")}]}).encode(),
        json.dumps(GOOD | {"config": GOOD["config"] | {"labels": 5}}).encode(),
        json.dumps(GOOD | {"config": GOOD["config"] | {"workdir": 5}}).encode(),
        json.dumps(GOOD | {"config": GOOD["config"] | {"env": [["A", 1]]}}).encode(),
        json.dumps(GOOD | {"config": GOOD["config"] | {"cmd": [["sh"]]}}).encode(),
    ],
)
def test_whatever_a_store_says_a_bad_manifest_is_an_error_of_the_image(content: bytes) -> None:
    with pytest.raises(ImageInvalidError):
        decode_manifest(content)


@pytest.mark.parametrize(
    "fields", [{"digest": "../../x"}, {"digest": 5}, {"created_at": float("nan")}, {"created_at": float("inf")}]
)
def test_whatever_a_store_says_a_bad_tag_is_an_error_of_the_image(fields: dict[str, object]) -> None:
    good = json.loads(encode_tag(Tag(digest=f"sha256:{'a' * 64}", created_at=1.0, source="")))
    for content in (json.dumps(good | fields).encode(), b"[" * 60_000):
        with pytest.raises(ImageInvalidError):
            decode_tag(content, name="n")
