"""What a user fills in for a call becomes the wire value, or names the field."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from opendsec.client.fncall_args import DSecFnCallArgs, longest_s
from opendsec.errors import InvalidSpecError
from opendsec.model.fncall import Case, TaskType


def double(value: int) -> int:
    """A function that stands for itself."""
    return value * 2


@functools.cache
def decorated() -> int:
    return 1


def test_text_and_pairs_are_taken() -> None:
    spec = DSecFnCallArgs(
        task_type="judge", code="x", files={"a": "text", "b": b"\xff"}, cases=[("in", b"out"), Case(name="n")]
    ).to_spec()
    assert spec.task_type is TaskType.JUDGE
    assert spec.files == {"a": b"text", "b": b"\xff"}
    assert spec.cases == (Case(stdin=b"in", expected=b"out"), Case(name="n"))
    assert longest_s(spec) == 60 + 30 + 2 * 20


def test_a_function_is_sent_as_its_source() -> None:
    spec = DSecFnCallArgs.of_function(double, [21], {"more": None}, imports=["json"]).to_spec()
    assert (spec.task_type, spec.function, spec.imports) == (TaskType.FUNCTION, "double", ("json",))
    assert spec.arguments == '[[21],{"more":null}]'
    scope: dict[str, Any] = {}
    exec(spec.code, scope)
    assert scope["double"](21) == 42

    def inner(x: int) -> int:
        return x

    assert DSecFnCallArgs.of_function(inner).code.startswith("def inner")


def test_what_does_not_stand_for_itself_is_refused() -> None:
    outside = 3

    def closure() -> int:
        return outside

    for wrong in (closure, lambda: 1, decorated, len, functools.partial(double, 1)):
        with pytest.raises(InvalidSpecError) as refused:
            DSecFnCallArgs.of_function(wrong)
        assert refused.value.detail["field"] == "function"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"code": "x", "args": "one string"}, "args"),
        ({"code": "x", "task_type": "guess"}, "task_type"),
        ({"code": "x", "task_type": "function", "function": "f", "arguments": [object()]}, "arguments"),
        ({"code": "x", "task_type": "function", "function": "f", "arguments": [float("nan")]}, "arguments"),
        ({"code": "x", "memory_mb": 0}, "memory_mb"),
        ({}, "code"),
        ({"code": b"x"}, "code"),
        ({"code": "x", "language": None}, "language"),
        ({"code": "x", "args": [5]}, "args"),
        ({"code": "x", "fetch": b"ab"}, "fetch"),
        ({"code": "x", "files": ["a"]}, "files"),
        ({"code": "x", "files": {"a": 5}}, "files"),
        ({"code": "x", "stdin": 5}, "stdin"),
        ({"code": "x", "stdin": None}, "stdin"),
        ({"code": "x", "env": ["ab"]}, "env"),
        ({"code": "x", "env": {"A": 5}}, "env"),
        ({"code": "x", "memory_mb": "256"}, "memory_mb"),
        ({"code": "x", "processes": True}, "processes"),
        ({"code": "x", "cpu_time_s": "1"}, "cpu_time_s"),
        ({"code": "x", "cpu_time_s": float("nan")}, "cpu_time_s"),
        ({"code": "x", "gpu": "shared"}, "gpu"),
        ({"code": "x", "task_type": "judge", "cases": ["ab"]}, "cases"),
        ({"code": "x", "task_type": "judge", "cases": ("in", "out")}, "cases"),
        ({"code": "x", "task_type": "judge", "cases": [(1, 1)]}, "cases"),
        ({"code": "x", "task_type": "judge", "cases": [("a", "b", "c")]}, "cases"),
        ({"code": "x", "task_type": "judge", "cases": [Case(stdin="a")]}, "cases"),  # type: ignore[arg-type]
        *(
            ({"code": "x", "task_type": "function", "function": "f", "arguments": wrong}, "arguments")
            for wrong in ("abc", b"abc", {"a": 1}, {1, 2}, 5, None, iter([1]))
        ),
        *(
            ({"code": "x", "task_type": "function", "function": "f", "keywords": wrong}, "keywords")
            for wrong in ("ab", ["ab"], {1: 2})
        ),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        DSecFnCallArgs(**fields).to_spec()
    assert refused.value.detail["field"] == field
