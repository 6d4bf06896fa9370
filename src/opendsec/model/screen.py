"""A screen, its mouse and its keyboard as values: what is asked of them, and which of that is good. Pure.

Points are pixels from the top left corner. Keys have names (`docs/reference/fullvm.md` lists them), or are one
character each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from opendsec.errors import InvalidSpecError
from opendsec.model.keymap import LAYOUTS, QCODES, strokes

MAX_ACTIONS = 1000
MAX_TEXT = 2000
"""Characters typed by one request; the SDK sends more in several."""
MAX_PIXELS = 16384
"""Of either side."""
MAX_SCROLL = 100
MAX_VIEW_S = 3600.0


MIN_SIZE = (320, 200)
MAX_SIZE_BYTES = 32 << 20
"""Of one picture with four bytes for each pixel: what display adapters here have room for, 4096 x 2048."""
_SIZE = re.compile(r"([0-9]{3,4})x([0-9]{3,4})\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenSize:
    """In pixels."""

    width: int
    height: int


def parse_size(text: str, *, field: str = "screen") -> ScreenSize:
    """Of `1920x1080`: 320x200 up to 4096 wide and 32 MiB in all. Raises InvalidSpecError naming the field."""
    match = _SIZE.match(text)
    if match is None:
        raise _bad(field, f"{text[:40]!r} is no size as 1920x1080 is one")
    width, height = int(match[1]), int(match[2])
    if width < MIN_SIZE[0] or height < MIN_SIZE[1] or width > 4096 or width * height * 4 > MAX_SIZE_BYTES:
        raise _bad(field, f"{text} is not between 320x200 and 4096x2048")
    return ScreenSize(width=width, height=height)


class Button(StrEnum):
    """Of a mouse."""

    LEFT = "left"
    MIDDLE = "middle"
    RIGHT = "right"
    WHEEL_UP = "wheel-up"
    WHEEL_DOWN = "wheel-down"
    WHEEL_LEFT = "wheel-left"
    WHEEL_RIGHT = "wheel-right"


class ActionKind(StrEnum):
    """One thing somebody does at a desk."""

    MOVE = "move"
    """The pointer to `x`, `y`."""
    MOVE_BY = "move_by"
    """The pointer by `x`, `y`: for guests that know a mouse and no tablet."""
    DOWN = "down"
    """Press `button`, or the keys, and hold."""
    UP = "up"
    """Let go of them."""
    TYPE = "type"
    """`text`, as on a keyboard with that `layout`."""
    PRESS = "press"
    """The keys down one after the other, and up again in the other order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action; fields its kind has no use for are refused."""

    kind: ActionKind
    x: int | None = None
    y: int | None = None
    button: Button | None = None
    keys: tuple[str, ...] = ()
    text: str | None = None
    layout: str = "us"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """Actions in their order. What is still held at the end stays held; after an error nothing is."""

    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRequest:
    """Ask for a page that shows the screen in a browser."""

    seconds: float = 300.0
    """How long its address is good; a view that was opened goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An address that shows the screen to whoever has it."""

    path: str
    """Below the platform's own address."""
    expires_at: float
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialStatus:
    """Of the serial console."""

    offset: int
    """Bytes it has said so far."""


_NEEDED = {
    ActionKind.MOVE: ("x", "y"),
    ActionKind.MOVE_BY: ("x", "y"),
    ActionKind.TYPE: ("text",),
    ActionKind.PRESS: ("keys",),
}


def check_input(request: InputRequest) -> InputRequest:
    """The request itself if all of it can be done. Raises InvalidSpecError naming the field."""
    if not 0 < len(request.actions) <= MAX_ACTIONS:
        raise _bad("actions", f"{len(request.actions)} actions, 1 to {MAX_ACTIONS} are done at once")
    for action in request.actions:
        _check_action(action)
    if sum(len(action.text or "") for action in request.actions) > MAX_TEXT:
        raise _bad("text", f"longer than {MAX_TEXT} characters")
    return request


def _check_action(action: Action) -> None:
    given = {"x": action.x is not None, "y": action.y is not None, "text": action.text is not None}
    given |= {"keys": bool(action.keys), "button": action.button is not None}
    if action.kind in (ActionKind.DOWN, ActionKind.UP):
        if given["keys"] == given["button"]:
            raise _bad("button", f"{action.kind.value} is of a button or of keys")
        needed: tuple[str, ...] = ("keys",) if given["keys"] else ("button",)
    else:
        needed = _NEEDED[action.kind]
    for name, is_given in given.items():
        if is_given is not (name in needed):
            raise _bad(name, f"{action.kind.value} {'needs it' if name in needed else 'has no use for it'}")
    least = 0 if action.kind is ActionKind.MOVE else -MAX_PIXELS
    for name, value in (("x", action.x), ("y", action.y)):
        if value is not None and not least <= value <= MAX_PIXELS:
            raise _bad(name, f"{value} is not between {least} and {MAX_PIXELS}")
    check_keys(action.keys)
    if action.text is not None:
        check_text(action.text, action.layout)


def check_keys(keys: Sequence[str]) -> None:
    """Raises InvalidSpecError for a key nobody knows."""
    if len(keys) > 16:
        raise _bad("keys", f"{len(keys)} keys at once, at most 16")
    for key in keys:
        if key not in QCODES:
            raise _bad("keys", f"no key is called {key[:40]!r}; docs/reference/fullvm.md lists them")


def check_text(text: str, layout: str) -> None:
    """Raises InvalidSpecError unless every character can be typed on that keyboard."""
    if layout not in LAYOUTS:
        raise _bad("layout", f"{layout[:40]!r} is not of {', '.join(sorted(LAYOUTS))}")
    for at, character in enumerate(text):
        if strokes(character, layout) is None:
            raise InvalidSpecError(
                f"text: {character!r} at {at} is on no key of the layout {layout}",
                detail={"field": "text", "at": at},
                remedy="choose the layout the guest has, or paste it after `sandbox.clipboard.set`",
            )


def check_view(request: ViewRequest) -> ViewRequest:
    """The request itself. Raises InvalidSpecError naming the field."""
    if not 0 < request.seconds <= MAX_VIEW_S:
        raise _bad("seconds", f"{request.seconds} is not between 0 and {MAX_VIEW_S:g}")
    return request


def _bad(field: str, why: str) -> InvalidSpecError:
    return InvalidSpecError(f"{field}: {why}", detail={"field": field})
