"""What a user gave, checked for its kind before anything is made of it.

Python takes text apart where a list is wanted, makes a dict of pairs, five zeros of `bytes(5)` and a number of True: a
value would become another one. Here it is refused, naming the field, where it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from opendsec.errors import InvalidSpecError


def must(holds: bool, field: str, kind: str) -> None:
    """Raises InvalidSpecError naming the field and the kind that is wanted, unless it holds."""
    if not holds:
        raise InvalidSpecError(f"{field}: is not {kind}", detail={"field": field})


def check_class(args: object, wanted: type) -> None:
    """Arguments of another kind of sandbox would start one with other isolation than the call names. Raises
    InvalidSpecError."""
    if not isinstance(args, wanted):
        raise InvalidSpecError(
            f"args: {wanted.__name__} is wanted here, {type(args).__name__} was given",
            detail={"field": "args"},
            remedy=f"give {wanted.__name__}, or use `run` or `sandbox`, which take the arguments of any kind",
        )


def is_list(value: object) -> bool:
    """Text and bytes are sequences, too, and never what is meant."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """True and False are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def is_named(value: object, kind: type) -> bool:
    """A dict from text to values of that kind."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(one, kind) for key, one in value.items()
    )


def check_fields(
    given: object,
    *,
    texts: Iterable[str] = (),
    whole: Iterable[str] = (),
    numbers: Iterable[str] = (),
    lists_of_text: Iterable[str] = (),
    dicts_of_text: Iterable[str] = (),
    may_be_none: Iterable[str] = (),
) -> None:
    """Every named attribute of `given` is of its kind, or None where that is allowed. Raises InvalidSpecError naming
    the first that is not."""
    allowed = frozenset(may_be_none)

    def check(names: Iterable[str], kind: str) -> None:
        for name in names:
            value = getattr(given, name)
            must((value is None and name in allowed) or _IS[kind](value), name, kind)

    check(texts, "a string")
    check(whole, "a whole number")
    check(numbers, "a number")
    check(lists_of_text, "a list of strings")
    check(dicts_of_text, "a dict of strings")


def _each(value: object) -> Iterable[object]:
    return value if isinstance(value, Iterable) else ()


_IS: dict[str, Callable[[object], bool]] = {
    "a string": lambda value: isinstance(value, str),
    "a whole number": lambda value: is_number(value, int),
    "a number": is_number,
    "a list of strings": lambda value: is_list(value) and all(isinstance(word, str) for word in _each(value)),
    "a dict of strings": lambda value: is_named(value, str),
}
