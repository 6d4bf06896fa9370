"""Any set of images, in circles or not: a composition shows what all its layers would show, or is a typed refusal."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import ImageInvalidError, ImageNotFoundError, InvalidSpecError
from opendsec.model.image import Image, ImageConfig, Layer, LayerRole
from opendsec.store.compose import MAX_DEPTH, MAX_LAYERS, compose, split_reference
from opendsec.store.manifest import digest_of

NAMES = ("a", "b", "c", "d")
PATHS = "xyz"

Shape = dict[str, str | None]
"""What a layer has at a path; None is a whiteout."""

_shapes = st.dictionaries(st.sampled_from(PATHS), st.sampled_from(["1", "2", None]), max_size=3)
_layers = st.lists(st.integers(0, 9), max_size=4)
_references = st.sampled_from([*NAMES, "missing", "a@" + digest_of(b"a"), "b@" + digest_of(b"nothing")])


def layer(number: int) -> Layer:
    role = (LayerRole.BASE, LayerRole.BASE, LayerRole.WORKSPACE, LayerRole.TOOLKIT)[number % 4]
    return Layer(digest=digest_of(str(number).encode()), size_bytes=1, role=role)


@st.composite
def _images(draw: st.DrawFn) -> dict[str, Image]:
    return {
        name: Image(
            name=name,
            digest=digest_of(name.encode()),
            layers=tuple(layer(number) for number in draw(_layers)),
            config=ImageConfig(env={name: name}),
            created_at=0,
            base=draw(st.just("") | _references),
            toolkits=tuple(draw(st.lists(_references, max_size=2))),
        )
        for name in NAMES
    }


def shown(layers: Sequence[Layer], shapes: dict[str, Shape]) -> dict[str, str]:
    seen: Shape = {}
    for one in layers:
        seen |= shapes[one.digest]
    return {path: value for path, value in seen.items() if value is not None}


@given(
    images=_images(),
    shapes=st.lists(_shapes, min_size=10, max_size=10),
    workspace=st.just("") | _references,
    toolkits=st.none() | st.lists(_references, max_size=3),
)
def test_any_universe(
    images: dict[str, Image], shapes: list[Shape], workspace: str, toolkits: list[str] | None
) -> None:
    by_digest = {layer(number).digest: shape for number, shape in enumerate(shapes)}

    def look_up(reference: str) -> Image:
        name, digest = split_reference(reference)
        if name not in images or (digest and images[name].digest != digest):
            raise ImageNotFoundError(f"no image {reference!r}")
        return images[name]

    try:
        whole = compose(look_up, "a", workspace=workspace, toolkits=toolkits)
    except (ImageInvalidError, ImageNotFoundError, InvalidSpecError):
        return
    chain = [images["a"]]
    while chain[0].base:
        chain.insert(0, look_up(chain[0].base))
    assert len(chain) <= MAX_DEPTH + 1
    chosen = images["a"].toolkits if toolkits is None else toolkits
    above = [look_up(one) for one in ([workspace] if workspace else []) + list(chosen)]
    every = [one for image in (*chain, *above) for one in image.layers]
    assert len(whole.layers) == len({one.digest for one in every}) <= MAX_LAYERS
    assert shown(whole.layers, by_digest) == shown(every, by_digest)
    assert (whole.base, whole.toolkits) == ("", ())
    assert {part.digest for part in whole.parts} == {image.digest for image in (*chain, *above)}
    if not (images["a"].base or workspace or images["a"].toolkits or chosen):
        assert whole.digest == images["a"].digest
