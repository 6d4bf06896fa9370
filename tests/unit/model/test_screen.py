"""What is asked of a screen, a mouse and a keyboard, and which keys make which text."""

from __future__ import annotations

import string

import pytest

from opendsec.errors import InvalidSpecError
from opendsec.model.keymap import LAYOUTS, QCODES, Stroke, strokes
from opendsec.model.screen import (
    Action,
    ActionKind,
    Button,
    InputRequest,
    ViewRequest,
    check_input,
    check_text,
    check_view,
    parse_size,
)

PLAIN = string.ascii_letters + string.digits + string.punctuation + " \n\t"


@pytest.mark.parametrize(
    "text", ["", "1920", "1920x", "1920 x 1080", "1920x1080\n", "64x64", "8000x200", "4096x4096", "²x²"]
)
def test_what_is_no_size_of_a_screen_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="screen: ") as raised:
        parse_size(text)
    assert raised.value.detail["field"] == "screen"


def test_sizes_of_screens() -> None:
    for text in ("320x200", "1920x1080", "4096x2048"):
        size = parse_size(text)
        assert f"{size.width}x{size.height}" == text


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_of_ascii_is_on_every_keyboard(layout: str) -> None:
    check_text(PLAIN, layout)
    for character in PLAIN:
        found = strokes(character, layout)
        assert found
        assert all(stroke.key in QCODES for stroke in found), character


def test_keys_are_where_the_layout_has_them() -> None:
    expected = {
        ("z", "de"): (Stroke("y"),),
        ("Y", "de"): (Stroke("z", shift=True),),
        ("@", "de"): (Stroke("q", altgr=True),),
        ("ß", "de"): (Stroke("minus"),),
        ("é", "de"): (Stroke("equal"), Stroke("e")),
        ("^", "de"): (Stroke("grave_accent"), Stroke("spc")),
        ("|", "de"): (Stroke("less", altgr=True),),
        ("a", "fr"): (Stroke("q"),),
        ("1", "fr"): (Stroke("1", shift=True),),
        ("é", "fr"): (Stroke("2"),),
        ("ê", "fr"): (Stroke("bracket_left"), Stroke("e")),
        ("@", "us"): (Stroke("2", shift=True),),
    }
    assert {asked: strokes(*asked) for asked in expected} == expected


def test_no_two_characters_are_the_same_strokes() -> None:
    for name, layout in LAYOUTS.items():
        seen: dict[tuple[Stroke, ...], str] = {}
        for character, keys in layout.items():
            assert seen.setdefault(keys, character) == character, f"{name}: {character!r} and {seen[keys]!r}"


def act(kind: str, **given: object) -> Action:
    return Action(kind=ActionKind(kind), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("actions", "field"),
    [
        ([], "actions"),
        ([act("press", keys=("a",))] * 1001, "actions"),
        ([act("type", text="x" * 2001)], "text"),
        ([act("type", text="é")], "text"),
        ([act("type", text="a", layout="klingon")], "layout"),
        ([act("type")], "text"),
        ([act("move", x=1)], "y"),
        ([act("move", x=-1, y=1)], "x"),
        ([act("move", x=1, y=16385)], "y"),
        ([act("move", x=1, y=1, button=Button.LEFT)], "button"),
        ([act("down")], "button"),
        ([act("up", keys=("a",), button=Button.LEFT)], "button"),
        ([act("press", keys=("nokey",))], "keys"),
        ([act("press", keys=("a",) * 17)], "keys"),
        ([act("press", keys=("a",), text="a")], "text"),
    ],
)
def test_what_cannot_be_done_is_named(actions: list[Action], field: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        check_input(InputRequest(actions=tuple(actions)))
    assert caught.value.detail["field"] == field


def test_what_can_be_done_passes() -> None:
    good = InputRequest(
        actions=(
            act("move", x=0, y=0),
            act("move_by", x=-5, y=5),
            act("down", button=Button.LEFT),
            act("up", button=Button.LEFT),
            act("down", keys=("ctrl",)),
            act("type", text="ok\n"),
            act("press", keys=("ctrl", "c")),
        )
    )
    assert check_input(good) is good
    assert check_view(ViewRequest()) == ViewRequest()
    with pytest.raises(InvalidSpecError, match="seconds"):
        check_view(ViewRequest(seconds=3601))
