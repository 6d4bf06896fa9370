"""What a start is made of: order, references, roles, and what is refused. Pure, so images are values here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from opendsec.errors import ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole, PartKind
from opendsec.store.compose import MAX_DEPTH, MAX_LAYERS, compose
from opendsec.store.manifest import Manifest, digest_of, encode_manifest

_Store = dict[str, Image]


def layer(text: str, role: LayerRole = LayerRole.BASE) -> Layer:
    return Layer(digest=digest_of(text.encode()), size_bytes=1, role=role)


def image(
    name: str, *layers: Layer, base: str = "", toolkits: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Image:
    config = ImageConfig(env=env or {})
    manifest = Manifest(layers=layers, config=config, base=base, toolkits=toolkits)
    return Image(
        name=name,
        digest=digest_of(encode_manifest(manifest)),
        layers=layers,
        config=config,
        created_at=0,
        base=base,
        toolkits=toolkits,
    )


def toolkit(name: str, *texts: str) -> Image:
    return image(name, *(layer(text, LayerRole.TOOLKIT) for text in texts or (name,)), env={name.upper(): "1"})


def store(*images: Image) -> Callable[[str], Image]:
    """Looks up as a store does: by name, and by `name@digest` what any image of that digest is."""
    by_name: _Store = {one.name: one for one in images}
    by_digest: _Store = {one.digest: one for one in images}

    def look_up(reference: str) -> Image:
        name, _, digest = reference.partition("@")
        try:
            return by_name[name] if not digest else replace(by_digest[digest], name=reference)
        except KeyError:
            raise ImageNotFoundError(f"no image {reference!r}", detail={"image": reference}) from None

    return look_up


BASE = image("base", layer("b1"), layer("b2"), env={"PATH": "/bin", "A": "base"})
WORK = image("work", layer("w", LayerRole.WORKSPACE), env={"A": "work"})
RG, FD = toolkit("rg"), toolkit("fd")
ALL = store(BASE, WORK, RG, FD)


def digests(found: Image) -> list[str]:
    return [one.digest for one in found.layers]


def test_an_image_asked_for_alone_is_itself() -> None:
    found = compose(ALL, "base")
    assert (found.digest, found.layers, found.config) == (BASE.digest, BASE.layers, BASE.config)
    [part] = found.parts
    assert (part.kind, part.name, part.digest, list(part.layers)) == (
        PartKind.IMAGE,
        "base",
        BASE.digest,
        digests(BASE),
    )


def test_workspace_over_base_toolkits_over_all_in_their_order() -> None:
    found = compose(ALL, "base", workspace="work", toolkits=["fd", "rg"])
    assert digests(found) == [*digests(BASE), *digests(WORK), *digests(FD), *digests(RG)]
    assert found.config.env == {"PATH": "/bin", "A": "work", "FD": "1", "RG": "1"}
    assert [(part.kind.value, part.name, part.digest) for part in found.parts] == [
        ("image", "base", BASE.digest),
        ("workspace", "work", WORK.digest),
        ("toolkit", "fd", FD.digest),
        ("toolkit", "rg", RG.digest),
    ]
    assert (found.base, found.toolkits) == ("", ())


def test_order_counts_and_names_do_not() -> None:
    one, other = compose(ALL, "base", toolkits=["fd", "rg"]), compose(ALL, "base", toolkits=["rg", "fd"])
    assert one.digest != other.digest
    renamed = store(BASE, replace(FD, name="x"), replace(RG, name="y"))
    assert compose(renamed, "base", toolkits=["x", "y"]).digest == one.digest


def test_references_of_an_image_are_followed_and_toolkits_replaced_at_the_create() -> None:
    task = image("task", layer("t", LayerRole.WORKSPACE), base="base", toolkits=("rg",))
    known = store(BASE, RG, FD, task)
    own, none, other = (
        compose(known, "task"),
        compose(known, "task", toolkits=[]),
        compose(known, "task", toolkits=["fd"]),
    )
    lower = [*digests(BASE), *digests(task)]
    assert digests(own) == [*lower, *digests(RG)]
    assert digests(none) == lower
    assert digests(other) == [*lower, *digests(FD)]
    assert [part.kind.value for part in own.parts] == ["base", "image", "toolkit"]
    assert len({own.digest, none.digest, other.digest, task.digest}) == 4
    assert compose(known, "task", toolkits=["rg"]).digest == own.digest


def test_an_image_without_its_toolkits_is_not_called_that_image() -> None:
    task = image("task", layer("t"), toolkits=("rg",))
    assert compose(store(RG, task), "task", toolkits=[]).digest != task.digest


def test_names_move_on_and_pins_do_not() -> None:
    new = toolkit("rg", "rg 2")
    pin = f"rg@{RG.digest}"
    known = store(BASE, RG, new)
    assert digests(compose(known, "base", toolkits=["rg"]))[-1] == digests(new)[0]
    pinned = compose(known, "base", toolkits=[pin])
    assert digests(pinned)[-1] == digests(RG)[0]
    assert pinned.parts[-1].pinned == pin
    assert (pinned.parts[-1].name, pinned.parts[-1].digest) == ("rg", RG.digest)


def test_what_parts_pin_composes_to_the_same() -> None:
    task = image("task", layer("t", LayerRole.WORKSPACE), base=f"base@{BASE.digest}", toolkits=("rg",))
    first = compose(store(BASE, RG, task), "task")
    moved = store(BASE, RG, task, toolkit("rg", "newer"))
    pins = [part.pinned for part in first.parts]
    assert compose(moved, "task").digest != first.digest
    assert compose(moved, pins[1], toolkits=pins[2:]).digest == first.digest


def test_a_layer_that_comes_twice_stays_where_it_is_highest() -> None:
    found = compose(ALL, "base", toolkits=["rg", "fd", "rg"])
    assert digests(found) == [*digests(BASE), *digests(FD), *digests(RG)]


@pytest.mark.parametrize(
    ("asked", "field", "sentence"),
    [
        ({"image": "base", "workspace": "rg"}, "workspace", "have the role toolkit, not workspace"),
        ({"image": "base", "workspace": "base"}, "workspace", "have the role base, not workspace"),
        ({"image": "base", "toolkits": ["rg", "work"]}, "toolkits", "have the role workspace, not toolkit"),
        ({"image": "base", "toolkits": ["empty"]}, "toolkits", "have the role none, not toolkit"),
        ({"image": "rg"}, "image", "is a toolkit, with no base below it"),
        ({"image": "work", "toolkits": ["rg"]}, "image", "is a workspace, with no base below it"),
    ],
)
def test_wrong_roles_are_refused_by_field(asked: dict[str, object], field: str, sentence: str) -> None:
    with pytest.raises(InvalidSpecError, match=sentence) as caught:
        compose(store(BASE, WORK, RG, image("empty")), **asked)  # type: ignore[arg-type]
    assert caught.value.detail["field"] == field


@pytest.mark.parametrize(
    ("asked", "detail"),
    [
        ({"image": "nope"}, {"image": "nope", "field": "image"}),
        ({"image": "base", "workspace": "nope"}, {"image": "nope", "field": "workspace"}),
        ({"image": "base", "toolkits": ["rg", "nope"]}, {"image": "nope", "field": "toolkits"}),
        ({"image": "rooted"}, {"image": "nope", "field": "image", "asked_by": "rooted"}),
        ({"image": "equipped"}, {"image": "nope", "field": "toolkits", "asked_by": "equipped"}),
    ],
)
def test_what_is_missing_is_named_with_who_asked_for_it(asked: dict[str, object], detail: dict[str, str]) -> None:
    known = store(BASE, RG, image("rooted", layer("r"), base="nope"), image("equipped", layer("e"), toolkits=("nope",)))
    with pytest.raises(ImageNotFoundError) as caught:
        compose(known, **asked)  # type: ignore[arg-type]
    assert caught.value.detail == detail
    if detail["field"] != "image" and "asked_by" not in detail:
        assert caught.value.message == f"{detail['field']}: no image 'nope'"
        assert str(caught.value).startswith(caught.value.message)


def test_circles_and_endless_chains_are_refused() -> None:
    with pytest.raises(ImageInvalidError, match="circle"):
        compose(store(image("a", layer("a"), base="b"), image("b", layer("b"), base="a")), "a")
    chain = [image(f"c{n}", layer(f"c{n}"), base=f"c{n + 1}") for n in range(MAX_DEPTH + 1)]
    end = image(f"c{MAX_DEPTH + 1}", layer("end"))
    with pytest.raises(ImageInvalidError, match="too many"):
        compose(store(*chain, end), "c0")
    assert len(compose(store(*chain, end), "c1").layers) == MAX_DEPTH + 1


def test_more_layers_than_an_overlay_takes_are_refused() -> None:
    high = image("high", *(layer(str(n)) for n in range(MAX_LAYERS)))
    assert len(compose(store(high, RG), "high").layers) == MAX_LAYERS
    with pytest.raises(ImageInvalidError, match="501 layers in all, at most 500"):
        compose(store(high, RG), "high", toolkits=["rg"])
