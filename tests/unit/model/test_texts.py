"""Any text a request may hold is taken or refused by name, never a surprise further in."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.errors import InvalidSpecError, RequestError
from opendsec.model.command import ExecRequest, check_exec
from opendsec.model.spec import SandboxSpec, check_spec
from opendsec.wire import codec

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
HALF = "\ud800"


@given(text=ANY_TEXT, other=ANY_TEXT)
def test_what_is_not_refused_has_bytes(text: str, other: str) -> None:
    with contextlib.suppress(RequestError):
        asked = check_exec(ExecRequest(argv=(text,), env={other: text}, user=text, operation_id=other))
        assert codec.decode(codec.encode(asked), ExecRequest) == asked
        text.encode("utf-8", "surrogateescape")
    with contextlib.suppress(RequestError):
        spec = check_spec(SandboxSpec(image="debian", labels={"a": text}, env={other: other}, init_user=text))
        assert codec.decode(codec.encode(spec), SandboxSpec) == spec
        text.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("bad", [HALF, "a\x00"])
@pytest.mark.parametrize("field", ["script", "cwd", "user", "operation_id", "session"])
def test_a_command_names_the_field(field: str, bad: str) -> None:
    given_fields = {"script": "true", field: f"/{bad}"}
    with pytest.raises(InvalidSpecError) as raised:
        check_exec(ExecRequest(**given_fields))  # type: ignore[arg-type]
    assert raised.value.detail["field"] == field


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("labels", SandboxSpec(image="debian", labels={"a": HALF})),
        ("env", SandboxSpec(image="debian", env={"A": HALF})),
        ("workdir", SandboxSpec(image="debian", workdir=f"/{HALF}")),
        ("init_user", SandboxSpec(image="debian", init_user="root\x00x")),
    ],
)
def test_a_spec_names_the_field(field: str, spec: SandboxSpec) -> None:
    with pytest.raises(InvalidSpecError) as raised:
        check_spec(spec)
    assert raised.value.detail["field"] == field
