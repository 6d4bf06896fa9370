"""What OCI's JSON means, and what of it is refused by field name."""

from __future__ import annotations

from typing import Any

import pytest

from opendsec.errors import ImageInvalidError, InvalidSpecError
from opendsec.model.image import ImageConfig
from opendsec.store.importers.oci_config import (
    Descriptor,
    Platform,
    check_platform,
    choose,
    diff_ids,
    parse_config,
    parse_descriptor,
    parse_list,
)

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
HERE = Platform.of("x86_64")


def entry(number: int, platform: str = "", ref: str = "", media_type: str = MANIFEST) -> Descriptor:
    names = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False)) if platform else {}
    return Descriptor(
        media_type=media_type,
        digest=f"sha256:{number:064x}",
        size_bytes=1,
        platform=names,
        annotations={"org.opencontainers.image.ref.name": ref} if ref else {},
    )


def chosen(*entries: Descriptor, ref: str = "", machine: str = "x86_64") -> int:
    return int(choose(entries, ref=ref, platform=Platform.of(machine), where="index.json").digest[7:], 16)


def test_the_only_one_is_taken() -> None:
    assert chosen(entry(1)) == 1
    assert chosen(entry(1, media_type=INDEX)) == 1


def test_the_platform_decides() -> None:
    several = (
        entry(1, "linux/arm64/v8"),
        entry(2, "linux/amd64"),
        entry(3, "windows/amd64"),
        entry(4, "unknown/unknown"),
    )
    assert chosen(*several) == 2
    assert chosen(*several, machine="aarch64") == 1


def test_a_named_platform_beats_none() -> None:
    assert chosen(entry(1), entry(2, "linux/amd64")) == 2


def test_the_ref_decides() -> None:
    several = (entry(1, ref="a"), entry(2, ref="b"), entry(3, ref="b:c/d@e"))
    assert chosen(*several, ref="b") == 2
    assert chosen(*several, ref="b:c/d@e") == 3
    assert chosen(*several, ref=f"sha256:{1:064x}") == 1


def test_the_same_manifest_twice_is_one() -> None:
    assert chosen(entry(1, ref="a"), entry(1, ref="b")) == 1


@pytest.mark.parametrize(
    ("entries", "ref", "words"),
    [
        ((), "", "nothing fits"),
        ((entry(1, ref="a"), entry(2, ref="b")), "", "several images fit linux/amd64; it holds a, b"),
        ((entry(1, "linux/arm64"),), "", "nothing fits linux/amd64; it holds sha256:000000000000 .linux/arm64."),
        ((entry(1, ref="a"),), "z", "nothing fits 'z'"),
        ((entry(1, media_type="application/vnd.cncf.helm"),), "", "nothing fits"),
    ],
)
def test_no_clear_choice_says_what_there_is(entries: tuple[Descriptor, ...], ref: str, words: str) -> None:
    with pytest.raises(ImageInvalidError, match=words) as caught:
        chosen(*entries, ref=ref)
    assert "oci:DIR:REF" in caught.value.remedy


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (None, "is no descriptor"),
        ({"size": 1}, "digest"),
        ({"digest": "sha256:../../../etc/passwd", "size": 1}, "digest"),
        ({"digest": "sha256:" + "A" * 64, "size": 1}, "digest"),
        ({"digest": "md5:" + "0" * 32, "size": 1}, "digest"),
        ({"digest": "sha256:" + "0" * 64}, "size"),
        ({"digest": "sha256:" + "0" * 64, "size": -1}, "size"),
        ({"digest": "sha256:" + "0" * 64, "size": True}, "size"),
        ({"digest": "sha256:" + "0" * 64, "size": "1"}, "size"),
        ({"digest": "sha256:" + "0" * 64, "size": 1, "platform": []}, "platform"),
    ],
)
def test_bad_descriptors(fields: object, words: str) -> None:
    with pytest.raises(ImageInvalidError, match=f"here.*{words}"):
        parse_descriptor(fields, where="here")


def test_a_list_names_the_item() -> None:
    with pytest.raises(ImageInvalidError, match=r"here: layers\[1\]"):
        parse_list({"layers": [{"digest": "sha256:" + "0" * 64, "size": 1}, 7]}, "layers", where="here")
    with pytest.raises(ImageInvalidError, match="layers is not a list"):
        parse_list({}, "layers", where="here")


def test_config_exactly() -> None:
    fields = {
        "config": {
            "Env": ["Z=1", "A=a=b", "E=", "Z=2", "Ü=ß"],
            "WorkingDir": "rel ative",
            "User": " odd:user ",
            "Entrypoint": ["a", ""],
            "Cmd": None,
            "Labels": {"x": ""},
        }
    }
    config = parse_config(fields)
    assert list(config.env.items()) == [("Z", "2"), ("A", "a=b"), ("E", ""), ("Ü", "ß")]
    assert config.workdir == "/rel ative"
    assert (config.user, config.entrypoint, config.cmd, config.labels) == (" odd:user ", ("a", ""), (), {"x": ""})


@pytest.mark.parametrize("fields", [{}, {"config": None}, {"config": {}}, {"config": {"Env": None, "WorkingDir": ""}}])
def test_config_that_says_nothing(fields: dict[str, Any]) -> None:
    assert parse_config(fields) == ImageConfig()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"Env": "A=1"}, "Env"),
        ({"Env": ["A"]}, "Env"),
        ({"Env": ["=x"]}, "Env"),
        ({"Env": [1]}, "Env"),
        ({"Env": ["A=\0"]}, "Env"),
        ({"WorkingDir": 1}, "WorkingDir"),
        ({"WorkingDir": "/a\0"}, "WorkingDir"),
        ({"User": ["root"]}, "User"),
        ({"Cmd": "sh"}, "Cmd"),
        ({"Entrypoint": [1]}, "Entrypoint"),
        ({"Labels": []}, "Labels"),
    ],
)
def test_bad_config_names_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ImageInvalidError, match=f"config.{field}"):
        parse_config({"config": config})


def test_config_that_is_no_object() -> None:
    with pytest.raises(ImageInvalidError, match=r"config\.config"):
        parse_config({"config": [1]})


def test_another_machine_is_refused() -> None:
    check_platform({"os": "linux", "architecture": "amd64"}, platform=HERE)
    check_platform({}, platform=HERE)
    for fields in ({"os": "windows", "architecture": "amd64"}, {"os": "linux", "architecture": "arm64"}):
        with pytest.raises(ImageInvalidError, match="wanted is linux/amd64"):
            check_platform(fields, platform=HERE)


@pytest.mark.parametrize(
    ("text", "architecture", "variant"), [("linux/arm64", "arm64", ""), ("linux/arm/v7", "arm", "v7")]
)
def test_platforms_are_said_as_oci_says_them(text: str, architecture: str, variant: str) -> None:
    platform = Platform.parse(text)
    assert (platform.architecture, platform.variant, str(platform)) == (architecture, variant, text)


@pytest.mark.parametrize("text", ["", "arm64", "windows/amd64", "linux/", "linux/a/b/c", "linux/arm\n"])
def test_what_is_no_platform(text: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        Platform.parse(text)
    assert caught.value.detail["field"] == "platform"


def test_a_variant_decides_when_it_is_said() -> None:
    several = (entry(1, "linux/arm/v6"), entry(2, "linux/arm/v7"))
    assert choose(several, ref="", platform=Platform.parse("linux/arm/v7"), where="x").digest.endswith("2")
    with pytest.raises(ImageInvalidError, match="several images fit linux/arm"):
        choose(several, ref="", platform=Platform.parse("linux/arm"), where="x")


def test_diff_ids_match_the_layers() -> None:
    good = {"rootfs": {"diff_ids": ["sha256:" + "0" * 64]}}
    assert diff_ids(good, count=1) == ["sha256:" + "0" * 64]
    bad: list[dict[str, Any]] = [{}, {"rootfs": {}}, {"rootfs": {"diff_ids": ["x"]}}, {"rootfs": {"diff_ids": [1]}}]
    for fields in bad:
        with pytest.raises(ImageInvalidError, match="diff_ids"):
            diff_ids(fields, count=1)
    with pytest.raises(ImageInvalidError, match="names 1 layers, the manifest 2"):
        diff_ids(good, count=2)
