"""Which layers become one, and what several directories show together; what the kernel says is in tests/node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opendsec.model.image import Layer, LayerRole
from opendsec.store.manifest import digest_of
from opendsec.store.merge import AIM, MOST, Entry, Kind, groups, lay_over, prune


def layers(sizes: list[tuple[int, LayerRole]]) -> list[Layer]:
    return [
        Layer(digest=digest_of(str(number).encode()), size_bytes=size, role=role)
        for number, (size, role) in enumerate(sizes)
    ]


BASE, WORKSPACE = LayerRole.BASE, LayerRole.WORKSPACE


def test_few_layers_stay_as_they_are() -> None:
    assert groups(layers([(1, BASE)] * MOST)) == [range(at, at + 1) for at in range(MOST)]


def test_the_large_layers_below_stay_and_the_small_ones_above_are_merged() -> None:
    plan = groups(layers([(1 << 30, BASE), (1 << 29, BASE), *[(1000, BASE)] * 40]))
    assert len(plan) == AIM
    assert plan[:2] == [range(1), range(1, 2)]


def test_roles_that_alternate_are_left() -> None:
    assert len(groups(layers([(1, BASE), (1, WORKSPACE)] * 20))) == 40


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(LayerRole)), max_size=60), st.integers(1, 20))
def test_every_layer_is_in_one_group_of_one_role_in_order(sizes: list[tuple[int, LayerRole]], most: int) -> None:
    chain = layers(sizes)
    plan = groups(chain, most=most, aim=max(1, most // 2))
    assert [at for group in plan for at in group] == list(range(len(chain)))
    assert all(len({chain[at].role for at in group}) == 1 for group in plan)
    if len({layer.role for layer in chain}) <= 1:
        assert len(plan) <= most


def tree(layer: int, shape: object, *, opaque: bool = False) -> Entry:
    """{"name": {...} a directory | "file" | "whiteout"}; a name that ends with ! is an opaque directory."""
    root = Entry(layer=layer, path=b"", kind=Kind.DIRECTORY, opaque=opaque)
    assert isinstance(shape, dict)
    for name, below in shape.items():
        if isinstance(below, dict):
            entry = tree(layer, below, opaque=name.endswith("!"))
        else:
            entry = Entry(layer=layer, path=b"", kind=Kind.WHITEOUT if below == "whiteout" else Kind.OTHER)
        root.children[name.rstrip("!").encode()] = entry
    return root


def shape(entry: Entry) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, child in entry.children.items():
        mark = "!" if child.opaque else ""
        is_directory = child.kind is Kind.DIRECTORY
        found[name.decode() + mark] = shape(child) if is_directory else f"{child.kind.value} {child.layer}"
    return found


def over(*shapes: object, hides: bool = True) -> dict[str, object]:
    whole = tree(0, shapes[0])
    for number, one in enumerate(shapes[1:], 1):
        whole = lay_over(whole, tree(number, one))
    return shape(prune(whole, hides=hides))


def test_directories_are_one_and_the_upper_file_wins() -> None:
    assert over({"d": {"a": "file", "b": "file"}}, {"d": {"b": "file", "c": "file"}}) == {
        "d": {"a": "other 0", "b": "other 1", "c": "other 1"}
    }


def test_whiteouts_stay_only_where_something_may_lie_below() -> None:
    assert over({"a": "file"}, {"a": "whiteout", "b": "whiteout"}) == {"a": "whiteout 1", "b": "whiteout 1"}
    assert over({"a": "file"}, {"a": "whiteout", "b": "whiteout"}, hides=False) == {}


def test_a_directory_after_a_whiteout_or_a_file_is_opaque() -> None:
    assert over({"d": {"a": "file"}}, {"d": "whiteout"}, {"d": {"b": "file"}}) == {"d!": {"b": "other 2"}}
    assert over({"d": "file"}, {"d": {"b": "file", "c": "whiteout"}}) == {"d!": {"b": "other 1"}}
    assert over({"d": "file"}, {"d": {"b": "file"}}, hides=False) == {"d": {"b": "other 1"}}


def test_an_opaque_directory_hides_and_stays_opaque() -> None:
    assert over({"d": {"a": "file"}}, {"d!": {"b": "file"}}, {"d": {"c": "file"}}) == {
        "d!": {"b": "other 1", "c": "other 2"}
    }
    assert over({"d!": {"e!": {"a": "file", "x": "whiteout"}}}) == {"d!": {"e": {"a": "other 0"}}}


def test_an_opaque_root_hides_everything() -> None:
    whole = lay_over(tree(0, {"a": "file"}), tree(1, {"b": "file"}, opaque=True))
    assert (shape(prune(whole, hides=True)), whole.opaque) == ({"b": "other 1"}, True)
