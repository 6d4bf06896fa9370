"""Keyboards: which keys make a character on which layout, and what keys are called. Pure.

A keyboard sends places, not characters: the guest's own layout decides what a key means. So text is typed for a layout,
which must be the one the guest has. Accents that need a dead key are two strokes. Layouts are those of XKB (`us`, `de`,
`fr`); the names of keys are QEMU's (`QKeyCode`), with a few that people use (`enter`, `super`, `cmd`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stroke:
    """One key, and what is held with it."""

    key: str
    shift: bool = False
    altgr: bool = False


_ROWS = (
    ("grave_accent", *"1234567890", "minus", "equal"),
    (*"qwertyuiop", "bracket_left", "bracket_right"),
    (*"asdfghjkl", "semicolon", "apostrophe", "backslash"),
    ("less", *"zxcvbnm", "comma", "dot", "slash"),
)
"""The character keys of a keyboard of 105 keys, by their place; `less` is the one beside the left shift."""

_PLAIN = {
    "us": ("`1234567890-=", "qwertyuiop[]", "asdfghjkl;'\\", " zxcvbnm,./"),
    "de": (" 1234567890ß ", "qwertzuiopü+", "asdfghjklöä#", "<yxcvbnm,.-"),
    "fr": ("²&é\"'(-è_çà)=", "azertyuiop $", "qsdfghjklmù*", "<wxcvbn,;:!"),
}
_SHIFTED = {
    "us": ("~!@#$%^&*()_+", "QWERTYUIOP{}", 'ASDFGHJKL:"|', " ZXCVBNM<>?"),
    "de": ('°!"§$%&/()=? ', "QWERTZUIOPÜ*", "ASDFGHJKLÖÄ'", ">YXCVBNM;:_"),
    "fr": (" 1234567890°+", "AZERTYUIOP £", "QSDFGHJKLM%µ", ">WXCVBN?./§"),
}
_ALTGR = {
    "us": ("", "", "", ""),
    "de": ("  ²³   {[]}\\ ", "@ €        ~", "            ", "|      µ   "),
    "fr": ("  ~#{[|`\\^@]}", "  €        ¤", "            ", "           "),
}
"""A blank is a place where nothing is typed, or a dead key."""
_DEAD: Mapping[str, Mapping[str, Stroke]] = {
    "us": {},
    "de": {"^": Stroke("grave_accent"), "\u00b4": Stroke("equal"), "`": Stroke("equal", shift=True)},
    "fr": {"^": Stroke("bracket_left"), "¨": Stroke("bracket_left", shift=True)},
}
_ACCENTED = {
    "^": dict(zip("aeiouAEIOU", "âêîôûÂÊÎÔÛ", strict=True)),
    "\u00b4": dict(zip("aeiouyAEIOUY", "áéíóúýÁÉÍÓÚÝ", strict=True)),
    "`": dict(zip("aeiouAEIOU", "àèìòùÀÈÌÒÙ", strict=True)),
    "¨": dict(zip("aeiouyAEIOU", "äëïöüÿÄËÏÖÜ", strict=True)),
}
_SPACE = {" ": (Stroke("spc"),), "\n": (Stroke("ret"),), "\t": (Stroke("tab"),)}


def _layout(name: str) -> dict[str, tuple[Stroke, ...]]:
    found: dict[str, tuple[Stroke, ...]] = {}
    levels = ((_PLAIN, False, False), (_SHIFTED, True, False), (_ALTGR, False, True))
    for level, shift, altgr in levels:
        for keys, characters in zip(_ROWS, level[name], strict=True):
            for key, character in zip(keys, characters, strict=False):
                if character != " ":
                    found.setdefault(character, (Stroke(key, shift, altgr),))
    for accent, dead in _DEAD[name].items():
        # A dead key and a blank make the accent itself.
        found.setdefault(accent, (dead, Stroke("spc")))
        for plain, accented in _ACCENTED[accent].items():
            found.setdefault(accented, (dead, *found[plain]))
    return {**found, **_SPACE}


LAYOUTS: Mapping[str, Mapping[str, tuple[Stroke, ...]]] = {name: _layout(name) for name in _PLAIN}
"""For each layout, the strokes of every character it can type."""


def strokes(character: str, layout: str) -> tuple[Stroke, ...] | None:
    """What to press for one character. None: it is on no key. KeyError for a layout nobody knows."""
    return LAYOUTS[layout].get(character)


def _qcodes() -> dict[str, str]:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    names = {letter: letter for letter in letters}
    names |= {key: key for row in _ROWS for key in row if len(key) > 1}
    named = (
        "esc tab ret backspace spc caps_lock num_lock scroll_lock print pause menu insert delete home end pgup pgdn "
        "up down left right shift shift_r ctrl ctrl_r alt alt_r meta_l meta_r power sleep wake "
        "kp_0 kp_1 kp_2 kp_3 kp_4 kp_5 kp_6 kp_7 kp_8 kp_9 kp_add kp_subtract kp_multiply kp_divide kp_enter "
        "kp_decimal volumeup volumedown audiomute"
    )
    names |= {name: name for name in named.split()}
    names |= {f"f{number}": f"f{number}" for number in range(1, 13)}
    names |= {"enter": "ret", "return": "ret", "escape": "esc", "space": "spc", "control": "ctrl", "altgr": "alt_r"}
    names |= {"super": "meta_l", "cmd": "meta_l", "win": "meta_l", "meta": "meta_l", "page_up": "pgup"}
    names |= {"page_down": "pgdn", "del": "delete", "ins": "insert", "printscreen": "print", "capslock": "caps_lock"}
    return names | {
        "-": "minus",
        "=": "equal",
        ",": "comma",
        ".": "dot",
        "/": "slash",
        ";": "semicolon",
        "'": "apostrophe",
    }


QCODES: Mapping[str, str] = _qcodes()
"""Names of keys → QEMU's. Characters mean the key that has them on a US keyboard."""
